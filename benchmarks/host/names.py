"""What is compared, by name: plans of evenly by their text, and rivals; each group with the loop it is held against.

Pure, so that whoever starts the variants needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

SCHEDULES = {2: ("gpipe", "1f1b", "zero-bubble", "interleaved"), 4: ("gpipe", "1f1b", "zero-bubble")}  # by ranks
LOOPED = {"interleaved": 2}  # stages of a rank, where there are several
ALL_AXES = "data=2 tensor=2 pipeline=2 zero=1"


class Group(NamedTuple):
    """Variants of one share of the work. base: the loop by hand that does it on one device."""

    base: str
    plans: tuple[str, ...]
    rivals: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the base first."""
        return (self.base, *self.plans, *self.rivals)


def plan_of(ranks: int, schedule: str) -> str:
    return f"pipeline={ranks} schedule={schedule}"


def rival_of(ranks: int, schedule: str) -> str:
    return f"torch's pipelining ({ranks} ranks {schedule})"


def _pipelines(base: str, ranks: int, *more: str) -> Group:
    plans, rivals = ([name(ranks, one) for one in SCHEDULES[ranks]] for name in (plan_of, rival_of))
    return Group(base, (*plans, *more), (*rivals,))


LOOP, HALF, QUARTER = "loop by hand", "first half by hand", "first quarter by hand"  # of a pipeline the first stage
DDP, FSDP, MEGATRON, DTENSOR = "DDP by hand", "FSDP2 by hand", "Megatron's layers by hand", "DTensor"

GROUPS = {
    "gpt": (
        Group(
            LOOP,
            (
                *("single", "single recompute=full", "ddp", "ddp exact=bitwise", "zero1", "zero2", "zero3"),
                *("tensor=2", "tensor=2 sequence_parallel=on", "tensor=4"),
            ),
            (DDP, FSDP, MEGATRON, DTENSOR),
        ),
        _pipelines(HALF, 2, ALL_AXES),
        _pipelines(QUARTER, 4),
    ),
    "gpt2": (Group(LOOP, ("single", "ddp", "zero3", "tensor=2"), (DDP, FSDP)),),
}
