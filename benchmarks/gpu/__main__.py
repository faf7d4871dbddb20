"""Runs every step in a process and within a limit of its own, and keeps what came of all in one file.

What an earlier run of other steps has left in that file stays.

python -m benchmarks.gpu [--cpu] [--out FOLDER] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LAST = 2000  # characters of what a failed step has written


class Step(NamedTuple):
    """module, function: what to run. limit_s: on a GPU; all together take less than ten minutes. cpu_s: on the CPU."""

    module: str
    function: str
    limit_s: int
    cpu_s: int


STEPS = {
    "environment": Step("environment", "environment", 10, 20),
    "doctor": Step("commands", "doctor", 15, 60),
    "verify": Step("commands", "verify", 85, 150),
    "shared": Step("shared", "shared", 40, 120),
    "memory": Step("memory", "memory", 36, 40),
    "gpt2": Step("speed", "gpt2", 80, 180),
    "llama": Step("speed", "llama", 140, 180),
    "resnet": Step("speed", "resnet", 85, 180),
    "host": Step("speed", "host", 30, 60),
    "checkpoint": Step("checkpoint", "checkpoint", 40, 60),
    "no_room": Step("no_room", "no_room", 38, 60),
}


def run_here(name: str, *, cpu: bool, to: Path) -> None:
    """Runs a step in this process; writes what it found, and of one that yields it again and again, the last.

    Shortly before its time is up, it says where it is.
    """
    step = STEPS[name]
    faulthandler.dump_traceback_later(max(1, (step.cpu_s if cpu else step.limit_s) - 5))
    measure: Callable[..., Any] = getattr(import_module(f"benchmarks.gpu.{step.module}"), step.function)
    result = measure(cpu=cpu)
    for found in [result] if isinstance(result, dict) else result:
        written = to.with_suffix(".part")
        written.write_text(json.dumps(found))
        written.replace(to)


def run_apart(name: str, folder: Path, *, cpu: bool) -> dict[str, Any]:
    """Runs a step in a process of its own: what it found, or its error, and the seconds that it took.

    What it found may say that it has failed in part.
    """
    step, to, log, began_s = STEPS[name], folder / f"{name}.json", folder / f"{name}.log", time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", name, "--to", str(to), *["--cpu"] * cpu]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}  # all is compiled here
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(step.cpu_s if cpu else step.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        _end(process)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began_s, 1), "failed": False}
    if to.exists():
        found |= json.loads(to.read_text())
    if code != 0:
        said = log.read_text()[-LAST:]
        found |= {"failed": True, "error": f"it took too long\n{said}" if code is None else said}
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="every step with tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of gpu-DEVICE.json")
    parser.add_argument("--only", nargs="+", choices=[*STEPS], default=[*STEPS], metavar="NAME", help=", ".join(STEPS))
    parser.add_argument("--to", type=Path, help="run the one step in this process, and write what it found there")
    asked = parser.parse_args()
    if asked.to is not None:
        run_here(asked.only[0], cpu=asked.cpu, to=asked.to)
        return 0
    device = "cpu" if asked.cpu else device_name()
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    steps: dict[str, Any] = json.loads(file.read_text())["steps"] if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        for name in asked.only:
            date = time.strftime("%Y-%m-%d", time.gmtime())
            found = steps[name] = {"date": date, **run_apart(name, Path(folder), cpu=asked.cpu)}
            said = found.get("error", "").strip().rpartition("\n")[2] if found["failed"] else ""
            print(
                f"{name:12} {found['seconds']:6.1f} s  {'FAILED: ' + said if found['failed'] else 'done'}", flush=True
            )
            ordered = {one: steps[one] for one in STEPS if one in steps}
            file.write_text(json.dumps({"cpu": asked.cpu, "steps": ordered}, indent=1) + "\n")
    print(file)
    return int(any(steps[name]["failed"] for name in asked.only))


def device_name() -> str:
    """Of the GPU, asked in a process of its own: this one holds none of its memory."""
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    sys.exit(main())
