"""Steps of one variant in a process of its own: builds it, warms up, and runs as many steps as each line of stdin says.

Writes a line of JSON per line read: the processor time of each step in seconds, and the loss of the last. `profile N
FILE` runs N steps under cProfile and keeps where their time went, by function, as text.
"""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import sys
from contextlib import ExitStack
from pathlib import Path
from time import process_time

WARM = 6
ROWS = 70


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    name, kind = sys.argv[1:3]
    from variants import make_step

    with ExitStack() as contexts:
        step = make_step(name, kind, contexts)
        for _ in range(WARM):
            step()
        gc.collect()
        gc.freeze()
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            asked = line.split()
            if asked[0] == "profile":
                profile(step, int(asked[1]), Path(asked[2]), name)
                found = {}
            else:
                found = timed(step, int(asked[1]))
            print(json.dumps(found), file=answers, flush=True)
        answers.flush()
        os._exit(0)  # there is nobody to part from


def timed(step, count: int) -> dict:
    seconds, loss = [], 0.0
    for _ in range(count):
        began = process_time()
        loss = step()
        seconds.append(process_time() - began)
    return {"seconds": seconds, "loss": loss}


def profile(step, count: int, file: Path, name: str) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(count):
        step()
    profiler.disable()
    with file.open("w") as text:
        print(f"{name}: {count} steps under cProfile, which makes each call dearer", file=text)
        for order in ("tottime", "cumulative"):
            pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(ROWS)


if __name__ == "__main__":
    main()
