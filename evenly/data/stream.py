"""Keys of random streams: a function of the job's seed and of a place in the run, and of nothing else.

A place is a path of words and numbers, such as `("microbatch", step, j)` or `("model",)`. Any rank that runs it, in any
order and any number of times, draws the same numbers.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Literal


def stream_key(seed: int, *place: int | str) -> int:
    """A key in [0, 2**63) for the random stream of `place` under `seed`; distinct places give unrelated keys."""
    digest = blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def block_key(microbatch_key: int, name: str, call: int, edge: Literal["begin", "end"]) -> int:
    """A key in [0, 2**63) for what is drawn in a call of a block of the model ("begin"), or after it ("end").

    name: of the block in the model. call: how often the microbatch called it before. It follows from these and from the
    key of the microbatch, so that a block draws the same wherever what comes before it was computed.
    """
    return microbatch_key ^ _salt(name, call, edge)


@lru_cache(maxsize=1 << 14)
def _salt(name: str, call: int, edge: str) -> int:
    return stream_key(0, "block", name, call, edge)
