"""What depth costs: time to the end of step 1, of a step, and of `evenly plan`, for 16 to 1,000 blocks, per block.

    python -m benchmarks.depth.run [--blocks 16 64 256 1000] [--plans single ddp zero3 tensor=2 pipeline=2]

Each line is a process of its own with the default recursion limit; what grows faster than the number of blocks shows as
a time per block that grows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
EVENLY = [sys.executable, "-m", "evenly"]


def timed(arguments: list[str]) -> tuple[float, str]:
    """Seconds of a command of evenly, and why it failed ('' if it did not)."""
    begin = time.perf_counter()
    done = subprocess.run([*EVENLY, *arguments], capture_output=True, text=True, check=False)
    return time.perf_counter() - begin, done.stderr.strip()[-300:] if done.returncode else ""


def run_of(plan: str, blocks: int, steps: int) -> str:
    """A row: seconds to the end of step 1 and of a later step, each also per block in ms."""
    with tempfile.TemporaryDirectory() as folder:
        devices = "1" if plan == "single" else "2"
        asked = ["run", str(JOB), "--plan", plan, "--devices", devices, "--steps", str(steps), "--out", folder]
        total_s, failed = timed([*asked, "--set", f"blocks={blocks}"])
        if failed:
            return f"failed: {failed}"
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    step_s = [record["step_s"] for record in records if "step_s" in record]
    later_s = sum(step_s[1:])
    first_s, mean_s = total_s - later_s, later_s / max(len(step_s) - 1, 1)
    return f"{first_s:9.1f} s {1e3 * first_s / blocks:8.1f} ms {mean_s:9.2f} s {1e3 * mean_s / blocks:8.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64, 256, 1000])
    parser.add_argument("--plans", nargs="+", default=["single", "ddp", "zero3", "tensor=2", "pipeline=2"])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    print(f"{'':12} {'blocks':>6}   to the end of step 1 (per block)   a later step (per block)")
    for plan in options.plans:
        for blocks in options.blocks:
            print(f"{plan:12} {blocks:6} {run_of(plan, blocks, options.steps)}", flush=True)
    for blocks in options.blocks:
        seconds, failed = timed(["plan", str(JOB), "--cluster", "8xH100", "--set", f"blocks={blocks}"])
        row = f"failed: {failed}" if failed else f"{seconds:9.1f} s {1e3 * seconds / blocks:8.1f} ms"
        print(f"{'evenly plan':12} {blocks:6} {row}", flush=True)


if __name__ == "__main__":
    main()
