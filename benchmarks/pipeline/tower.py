"""The jobs of these benchmarks, how a rank is bound to a core, and where figures are kept."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Sequence, Sized
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import evenly

RESULTS = Path(__file__).parents[1] / "results" / "pipeline.json"
WIDTH, BLOCKS, SAMPLES = 512, 8, 512
DISTURBED = 0.03  # steps in which a rank waited for its core for a larger share of the time are left out


class Block(nn.Module):
    """Pre-norm MLP with a residual, (N, width) -> (N, width); `inner` decides its cost."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """One block per entry of `inners`, then a head of `classes`; next to nothing before the first block."""

    def __init__(self, inners: Sequence[int], *, width: int = WIDTH, classes: int = 8) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width, inner) for inner in inners)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """`length` samples, which repeat the first few hundred: to make them is to take no time."""

    def __init__(self, length: int, width: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.length, self.x = length, torch.randn(256, width, generator=generator)
        self.y = torch.randint(0, classes, (256,), generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index % 256], self.y[index % 256]


def loss(model: nn.Module, batch: Any) -> evenly.Loss:
    return evenly.Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def tower_job(
    microbatches: int,
    *,
    steps: int,
    inners: Sequence[int] = (4 * WIDTH,) * BLOCKS,
    width: int = WIDTH,
    samples: int = SAMPLES,
    classes: int = 8,
) -> evenly.Job:
    """A tower on batches of `microbatches` times `samples`."""
    return evenly.Job(
        model=lambda: Tower(inners, width=width, classes=classes),
        loss=loss,
        data=Points(microbatches * samples, width, classes),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        global_batch=microbatches * samples,
        microbatch=samples,
        steps=steps,
    )


def bind() -> None:
    """From now on all threads of this rank run on a core of its own, as far as there are so many."""
    core = next(islice(cycle(sorted(os.sched_getaffinity(0))), int(os.environ["LOCAL_RANK"]), None))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def waited_s() -> float:
    """Seconds in which this thread could have run, and others had its core. Linux."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9


def enough(steps: Sized, claim: str) -> None:
    """Leaves where there is no median to tell: every step was disturbed."""
    if len(steps) < 2:
        raise SystemExit(f"{claim}: {len(steps)} undisturbed steps; try again when the machine is quiet")


def kept(claim: str) -> dict[str, Any]:
    """What was measured for `track` before."""
    return json.loads(RESULTS.read_text()).get(claim, {}) if RESULTS.exists() else {}


def keep(claim: str, figures: Any) -> None:
    """Writes what was measured for `track`, with when and where."""
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "backend": "gloo",
    }
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    document[claim] = {"date": date, "machine": machine, **figures}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


def load() -> float:
    """Processes that ran or waited for a core in the last minute, these included."""
    return os.getloadavg()[0]
