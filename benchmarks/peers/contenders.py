"""Who is compared: how each contender is started, where it takes part, who is interleaved with whom."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Not resolved: the interpreter of a virtual environment is a link, and its folder is what counts.
BIN = Path(os.environ.get("PEERS_BIN", Path(sys.executable).parent)).absolute()
BASELINE = "ddp"

PYTHON = (str(BIN / "python"),)
TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2")
TORCHRUN_STATIC = (str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", "{port}")
DEEPSPEED = (str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", "{port}")
EVENLY = (str(BIN / "evenly"), "run", "--devices", "2", "--")
# Launchers that are the first rank themselves take their port from the environment.
OWN_LAUNCHER = {"MASTER_PORT": "{port}"}


@dataclass(frozen=True)
class Contender:
    """One way to train the workloads.

    launcher: command before the script; `{port}` stands for a free port, in `env` too.
    ranks:    processes that record; the speed benchmark waits for each of them.
    threads:  OMP_NUM_THREADS of each.
    only:     workloads it takes part in; None: all.
    float64:  whether it can train in float64; if not, equality is judged in float32.
    """

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    threads: int = 1
    only: Collection[str] | None = None
    float64: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def takes_part(self, workload: str) -> bool:
        return self.only is None or workload.removesuffix("f") in self.only


RAGGED = {"W2", "W2s", "W2p21"}
REBALANCE = ("--strategy", "batch_rebalance")
CONTENDERS = {
    "single1": Contender(PYTHON, "single.py", ranks=1),
    "single2": Contender(PYTHON, "single.py", ranks=1, threads=2),
    "ddp": Contender(TORCHRUN, "ddp.py"),
    "evenly": Contender(EVENLY, "evenly_.py"),
    # Gradients summed in a wider type: float64 has none.
    "evenly_bitwise": Contender(EVENLY, "evenly_.py", float64=False, env={"EVENLY_EXACT": "bitwise"}),
    "evenly_zero2": Contender(EVENLY, "evenly_.py", env={"EVENLY_PLAN": "zero2"}),
    "evenly_zero3": Contender(EVENLY, "evenly_.py", env={"EVENLY_PLAN": "zero3"}),
    "evenly_count": Contender(EVENLY, "evenly_.py", ("--count",), only=RAGGED),
    "fsdp2": Contender(TORCHRUN, "fsdp2.py"),
    # `accelerate launch --cpu --num_processes 2` starts one process; its CPU guide uses torchrun or mpirun.
    "accelerate": Contender(TORCHRUN, "accelerate_ddp.py"),
    "accelerate_exact": Contender(TORCHRUN, "accelerate_exact.py", only={*RAGGED, "W1p5", "W1p21"}),
    "accelerate_fsdp2": Contender(TORCHRUN, "accelerate_ddp.py", ("--fsdp2",), only={"W1s"}),
    "fabric": Contender(PYTHON, "fabric.py", env=OWN_LAUNCHER),
    "lightning": Contender(PYTHON, "lightning_trainer.py", env=OWN_LAUNCHER),
    "lightning_bare": Contender(PYTHON, "lightning_trainer.py", ("--bare",), only={"W4"}, env=OWN_LAUNCHER),
    "hf": Contender(TORCHRUN, "hf_trainer.py"),
    "hf_rebalance": Contender(TORCHRUN, "hf_trainer.py", REBALANCE, only={"W2", "W2s"}),
    # Only for the faults.
    "ddp_snapshot": Contender(TORCHRUN, "ddp_snapshot.py", only=()),
    "hf_save": Contender(TORCHRUN, "hf_trainer.py", ("--every", "5"), only=()),
    **{
        f"zero{stage}": Contender(DEEPSPEED, "deepspeed_zero.py", ("--stage", str(stage)), float64=False)
        for stage in range(4)
    },
}

# All contenders of a group are in memory at once, hence small groups; each holds the baseline.
# The rest run in pairs with the baseline.
GROUPS = [
    ["single1", "single2", "ddp", "fsdp2"],
    ["ddp", "accelerate", "fabric", "lightning", "lightning_bare"],
    ["ddp", "hf", "accelerate_exact"],
    ["ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "evenly_zero2", "evenly_zero3"],
    ["ddp", "evenly", "evenly_bitwise", "hf_rebalance"],
]


def pick(workload: str, only: Collection[str] | None, among: Collection[str] = tuple(CONTENDERS)) -> list[str]:
    """Those `among` that take part in `workload`, cut down to `only` and the baseline."""
    names = [name for name in among if CONTENDERS[name].takes_part(workload)]
    return [name for name in names if not only or name in only or name == BASELINE]


def groups(workload: str, only: Collection[str] | None) -> list[list[str]]:
    """The groups of the speed benchmark; their numbers do not depend on `only`, empty ones stay."""
    grouped = {name for group in GROUPS for name in group}
    pairs = [[BASELINE, name] for name in CONTENDERS if name not in grouped]
    return [pick(workload, only, group) for group in [*GROUPS, *pairs]]
