"""The job of digits.py with a loop of one's own.

    evenly run examples/digits_own_loop.py --devices 2
    torchrun --nproc-per-node 2 examples/digits_own_loop.py
    python examples/digits_own_loop.py

The batch that the loop sees is the global one; `step` trains on this rank's share of it, and what it reports
counts all ranks.
"""

from __future__ import annotations

from digits import job

import evenly


def main() -> None:
    with evenly.start(job(epochs=2)) as run:
        for batch in run.batches():
            report = run.step(batch)
            if run.world.is_main:
                print(f"step {report.step}: loss {report.loss:.4f}")


if __name__ == "__main__":
    main()
