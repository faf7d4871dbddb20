"""Stages as data: which calls of the model's blocks each runs, what it holds, and what it receives.

The cost of a call of a block covers all that the model's code computes from there to the next call; that of the first
call has what comes before it too. A *stage* is a run of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

CallOf = tuple[str, int]  # a block, and how often the microbatch called it before
BEGIN = ""  # in the place of a block, the model's forward itself


@dataclass(frozen=True)
class TensorSite:
    """Where a tensor is met on its way through the blocks, the same on all stages.

    call: None for the first call that a stage runs; BEGIN and how often for the begin of the model's forward.
    side: among its arguments ("in"), its results ("out"), or what the model's code makes after it ("between").
    path: where among them; for what the code makes, its number.
    """

    call: CallOf | None
    side: str
    path: str

    def __str__(self) -> str:
        """`argument 0`, of the stage's first block, or `result 1 of blocks.3`."""
        # Arguments by position are the first of two, those by name the second.
        path = self.path.partition(".")[2] if self.side == "in" else self.path
        what = f"{'argument' if self.side == 'in' else 'result'} {path}".strip()
        if self.side == "between":
            assert self.call is not None
            return f"tensor {path} after {self.call[0] or 'the begin'}"
        return what if self.call is None else f"{what} of {self.call[0]}"


@dataclass(frozen=True)
class CallCost:
    """What one call of a block takes, with what follows it up to the next.

    call:     that it begins with.
    tensors:  names of the parameters, and of the buffers of its own, that it uses.
    flops, moved_bytes: of its forward.
    weight_bytes, kept_bytes: of its parameters, and of what its forward keeps for the backward.
    """

    call: CallOf
    tensors: frozenset[str]
    flops: float
    moved_bytes: float
    weight_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class StagePlan:
    """A model in stages.

    counts:   how many call_costs each stage has.
    calls:    the calls of a forward in their order, in training and in evaluation.
    stage_of: the stage of each call.
    owners:   name of a parameter, or of a buffer that belongs to call_costs -> the stages that hold it, ascending.
    needs:    per stage what it receives from the one before, in training and in evaluation.
    """

    counts: tuple[int, ...]
    calls: Mapping[bool, tuple[CallOf, ...]]
    stage_of: Mapping[CallOf, int]
    owners: Mapping[str, tuple[int, ...]]
    stage_inputs: Mapping[bool, tuple[tuple[TensorSite, ...], ...]]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.counts)

    @property
    def cut(self) -> str:
        """As a plan has it: the numbers of the calls at which stages begin."""
        return "|".join(map(str, accumulate(self.counts[:-1])))

    def receives_between(self, *, training: bool) -> bool:
        """Whether a stage receives what the model's code makes between blocks."""
        return any(place.side == "between" for needs in self.stage_inputs[training] for place in needs)

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The tensors that several stages hold."""
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}


def stage_of_calls(calls: Sequence[CallOf], counts: Sequence[int]) -> dict[CallOf, int]:
    """The stage of each call, where `counts` calls make a stage."""
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return dict(zip(calls, stages, strict=True))


def owners_of(
    names: Sequence[str], call_costs: Sequence[CallCost], stage_of: Mapping[CallOf, int]
) -> dict[str, tuple[int, ...]]:
    """The stages that use each of `names`; the first where none does."""
    found: dict[str, set[int]] = {name: set() for name in names}
    for call_cost in call_costs:
        for name in call_cost.tensors:
            found[name].add(stage_of[call_cost.call])
    return {name: tuple(sorted(stages or {0})) for name, stages in found.items()}
