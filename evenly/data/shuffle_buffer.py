"""The shuffled order of a stream: of so many samples that are held back, one is drawn in the place of the next.

The order is a function of the order in which samples arrive and of the draws alone; draws follow from the seed, the
epoch and how many samples were delivered (`data/stream`), so that it is the same under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def shuffled(arrivals: Iterator[T], size: int, draw: Callable[[int], int]) -> Iterator[T]:
    """Every item of `arrivals` once: each is drawn from the `size` that arrived and were not yet delivered.

    draw: number of the delivery, from 0 -> a number of 0 or more, of which the remainder names the place in the buffer.
    No item is delivered more than `size` - 1 places early. `arrivals` is read no further than the buffer needs.
    """
    buffer = [*islice(arrivals, size)]
    number = 0
    while buffer:
        place = draw(number) % len(buffer)
        yield buffer[place]
        number += 1
        for arrival in islice(arrivals, 1):
            buffer[place] = arrival
            break
        else:
            buffer[place] = buffer[-1]
            buffer.pop()
