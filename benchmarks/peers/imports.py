"""Import time of each peer in a fresh interpreter, interleaved; what the first step still imports."""

from __future__ import annotations

import statistics
import subprocess
import time

from contenders import PYTHON

ROUNDS = 4  # the first warms the file cache
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin"}
STEP = (
    "import torch; m = torch.nn.Linear(2, 2); o = torch.optim.AdamW(m.parameters());"
    " m(torch.ones(1, 2)).sum().backward(); o.step()"
)
STATEMENTS = {
    "torch": "import torch",
    "torch + DDP": ("import torch, torch.distributed; from torch.nn.parallel import DistributedDataParallel"),
    "torch + FSDP2": "import torch; from torch.distributed.fsdp import fully_shard",
    "evenly": "import evenly",
    "evenly, all of start": "from evenly import Job, Loss, start",
    "accelerate": "from accelerate import Accelerator",
    "lightning": "import lightning",
    "transformers Trainer": "from transformers import Trainer, TrainingArguments",
    "deepspeed": "import deepspeed",
    "torch + first AdamW step": STEP,
    "torch + import torch._dynamo": "import torch, torch._dynamo",
}


def seconds(code: str) -> float | None:
    """Wall time of a fresh interpreter that runs `code`; None if it fails."""
    start = time.perf_counter()
    done = subprocess.run([*PYTHON, "-c", code], env=ENVIRONMENT, capture_output=True, check=False)
    return None if done.returncode else time.perf_counter() - start


def main() -> None:
    rounds = [{name: seconds(code) for name, code in STATEMENTS.items()} for _ in range(ROUNDS)]
    for name in STATEMENTS:
        times = [times[name] for times in rounds]
        if None in times:
            print(f"{name:30s} failed")
        else:
            middle = statistics.median(times[1:])
            print(f"{name:30s} median {middle:.2f} s  [{min(times):.2f}..{max(times):.2f}]")


if __name__ == "__main__":
    main()
