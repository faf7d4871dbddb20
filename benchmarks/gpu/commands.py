"""`evenly doctor`, and `evenly verify` of the examples on this device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# All have dropout. On one GPU zero=3 has a process group of NCCL's with one rank in it.
EXAMPLES = ("stdlib_lm", "recurrent", "resnet", "digits", "gpt2", "llama", "bert", "vit", "t5")
ON_CPU = ("stdlib_lm", "recurrent")
PLANS = "single;single recompute=full;data=1 zero=3;data=1 zero=3 offload=parameters"


def command(*words: str, cpu: bool) -> subprocess.CompletedProcess[str]:
    """Runs `evenly` with `words`."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if cpu else {}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, **hidden, "PYTHONPATH": path}
    called = [sys.executable, "-m", "evenly", *words]
    return subprocess.run(called, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def doctor(*, cpu: bool) -> dict[str, Any]:
    """What it finds."""
    done = command("doctor", cpu=cpu)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return {"text": done.stdout.replace(str(ROOT), ".").replace(sys.executable, Path(sys.executable).name)}


def verify(*, cpu: bool) -> dict[str, Any]:
    """Each example on this device, in float64; raises where one differs from the plain loop on the same device."""
    names = ON_CPU if cpu else EXAMPLES
    with ThreadPoolExecutor(1 if cpu else 9) as several:
        rows = [*several.map(lambda name: _verify(name, cpu=cpu), names)]
    wrong = [row for row in rows if not row["equal"]]
    if wrong:
        raise RuntimeError(json.dumps(wrong))
    return {"examples": rows}


def _verify(name: str, *, cpu: bool) -> dict[str, Any]:
    plans = PLANS.partition(";")[0] if cpu else PLANS
    words = ("verify", f"examples/{name}.py", "--plans", plans, "--devices", "1", "--steps", "2", "--json")
    done = command(*words, cpu=cpu)
    if done.returncode:
        return {"example": name, "equal": False, "error": (done.stdout + done.stderr)[-600:]}
    found = json.loads(done.stdout)["plans"]
    return {"example": name, "equal": all(row["status"] == "equal" for row in found), "plans": found}
