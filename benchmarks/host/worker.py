"""Steps of one variant in a process of its own: builds it, warms up, and runs as many steps as each line of stdin says.

Writes a line of JSON per line read: the processor time of each step in seconds, and the loss of the last. `profile N`
runs N steps three times more, and writes as text where their time went; `calls N` counts evenly's Python calls a step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from time import process_time

WARM = 6


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
                from profiles import profile

                found = profile(step, int(asked[1]))
            elif asked[0] == "calls":
                found = python_calls(step, int(asked[1])) / int(asked[1])
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


def python_calls(step, count: int) -> int:
    """Count the calls of functions of the package evenly in `count` steps."""
    import evenly

    package, calls = str(Path(evenly.__file__).parent), 0

    def note(frame, event, _) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(note)
    for _ in range(count):
        step()
    sys.setprofile(None)
    return calls


if __name__ == "__main__":
    main()
