"""Stages as data: which calls of the model's blocks each runs, which parameters it owns, and what it receives.

The cost of a block call covers all that the model's code computes from there to the next call; that of the first call
includes what comes before it. A *stage* is a sequence of consecutive calls.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

CallId = tuple[str, int]  # name of a block, and how many times the microbatch called it before
BEGIN = ""  # instead of a block's name: the model's forward itself


@dataclass(frozen=True)
class TensorSite:
    """Identifies a tensor of the model's forward, in the same way on all stages.

    call: the block call it belongs to; None for the first call that the stage runs; (BEGIN, count) before any call.
    side: whether it is among the call's arguments ("in"), its results ("out"), or computed in it ("inside") or after it
          ("between").
    path: its path in the arguments or results; else the function that returned it, and a count.
    """

    call: CallId | None
    side: str
    path: str

    def __str__(self) -> str:
        """`argument 0`, of the stage's first block, or `result 1 of blocks.3`."""
        # Arguments by position are the first of two, those by name the second.
        path = self.path.partition(".")[2] if self.side == "in" else self.path
        what = f"{'argument' if self.side == 'in' else 'result'} {path}".strip()
        if self.side in ("between", "inside"):
            assert self.call is not None
            return f"tensor {path} {'after' if self.side == 'between' else 'in'} {self.call[0] or 'the begin'}"
        return what if self.call is None else f"{what} of {self.call[0]}"


@dataclass(frozen=True)
class CallCost:
    """The cost of one block call, including what the model's code computes up to the next.

    call:     the call itself.
    tensors:  names of the parameters, and of the buffers of its own, that it uses.
    flops, moved_bytes: of its forward.
    weight_bytes, saved_bytes: of its parameters, and of what its forward saves for the backward.
    """

    call: CallId
    tensors: frozenset[str]
    flops: float
    moved_bytes: float
    weight_bytes: int
    saved_bytes: int


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut into stages.

    counts:       number of block calls per stage.
    calls:        training (True) or evaluation (False) -> the calls of a forward, in order.
    stage_of:     the stage of each call.
    owners:       name of a parameter, or of a buffer of a block -> the stages that use it, ascending.
    stage_inputs: training or evaluation -> per stage, what it receives from the stage before.
    mixed_draws:  training or evaluation, where random numbers for tensors of other stages come before others between
                  the same two blocks: every stage then draws both.
    paths_differ: training or evaluation, where microbatches take several paths through the code, by random numbers or
                  by their own: each is looked at before it runs.
    runs_through: training or evaluation, where blocks have hooks, or leave behind what they do not return: the code of
                  skipped ones runs on remote tensors every time.
    shapes_vary:  whether shapes in the model follow from numbers of the batch, and not from its shapes alone.
    written:      what the code makes on every stage, and writes tensors of other stages into.
    early:        what a stage needs the numbers of before its first block.
    phase:        of the job, whose loss these stages run; '' for the job itself.
    """

    counts: tuple[int, ...]
    calls: Mapping[bool, tuple[CallId, ...]]
    stage_of: Mapping[CallId, int]
    owners: Mapping[str, tuple[int, ...]]
    stage_inputs: Mapping[bool, tuple[tuple[TensorSite, ...], ...]]
    mixed_draws: frozenset[bool] = frozenset()
    paths_differ: frozenset[bool] = frozenset()
    runs_through: frozenset[bool] = frozenset()
    shapes_vary: bool = False
    written: frozenset[TensorSite] = frozenset()
    early: frozenset[TensorSite] = frozenset()
    phase: str = ""

    @property
    def stages(self) -> int:
        return len(self.counts)

    @property
    def cut(self) -> str:
        return "|".join(map(str, accumulate(self.counts[:-1])))

    def records_results(self, *, training: bool) -> bool:
        """Whether a stage receives a tensor that is computed between blocks, or in one that does not return it."""
        return bool(self.written) or any(
            site.side in ("between", "inside") for inputs in self.stage_inputs[training] for site in inputs
        )

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}


def stage_of_calls(calls: Sequence[CallId], counts: Sequence[int]) -> dict[CallId, int]:
    """The stage of each call; counts: number of calls per stage."""
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return dict(zip(calls, stages, strict=True))


BEGIN_CALL, END_CALL = ("", 0), ("", 1)  # what no block comes before, or after


@dataclass(frozen=True)
class FoundCalls:
    """The block calls of forwards.

    costs:     of every call that a forward may make, in order.
    paths:     by the number of the first microbatch that takes it, the calls of each path through the code.
    by_chance: whether random numbers that the code draws between blocks may decide which are called.
    between:   by name, the calls after which a parameter is used outside of blocks; "" for the begin and the end.
    """

    costs: list[CallCost]
    paths: Mapping[int, tuple[CallId, ...]]
    by_chance: bool
    between: Mapping[str, Collection[CallId]]

    @property
    def differ(self) -> bool:
        return self.by_chance or len({*self.paths.values()}) > 1

    def owners(self, stage_of: Mapping[CallId, int]) -> dict[str, set[int]]:
        """The stages that may use each tensor: of what lies between blocks also earlier ones, where a path leaves out
        all blocks from their own to there. The end is of the last stage, and so is all of a path that calls no block.
        """
        owners: dict[str, set[int]] = {}
        for call_cost in self.costs:
            for name in call_cost.tensors:
                owners.setdefault(name, set()).add(stage_of[call_cost.call])
        last = max(stage_of.values())
        empty = self.by_chance or () in self.paths.values()
        ends = {BEGIN_CALL: {0, last} if empty else {0}, END_CALL: {last}}
        for name, calls in self.between.items() if self.differ else ():
            for call in calls:
                owners.setdefault(name, set()).update(ends.get(call) or range(stage_of[call] + 1))
        return owners


def joined_owners(
    names: Sequence[str], phases: Sequence[tuple[FoundCalls, Sequence[int]]]
) -> dict[str, tuple[int, ...]]:
    """The stages that may use each of `names` in any of `phases`; where none does, the last one that uses the name
    before: a head that only later paths use lies behind the blocks.

    phases: the calls of each, and how many of them each stage has.
    """
    owners = [calls.owners(stage_of_calls([one.call for one in calls.costs], counts)) for calls, counts in phases]
    found: dict[str, tuple[int, ...]] = {}
    before = 0
    for name in names:
        found[name] = tuple(sorted(set().union(*(one.get(name, ()) for one in owners)) or {before}))
        before = found[name][-1]
    return found
