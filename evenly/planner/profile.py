"""The profile of a model that was run once on fake tensors: what each part computes, saves and needs for a while.

The job's own loss runs forward and backward on tensors that have shapes and no numbers. Every storage that an operation
makes is followed from then until it is freed, and every operation's cost is counted, each with the part of the model to
which it belongs: what comes *before* the first call of a block, each call of a block, the code *between* one and the
next, and what comes *after* the last.

An *interval* is what happens between two *events*: the begin or end of a call's forward or backward, or a parameter's
gradient being there. It records how far memory rose in it and what it left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from evenly.model.parts import BlockCost, Collective, ModelCosts, OpCost

Pass = Literal["forward", "backward"]
AFTER = 1 << 30  # added to a call's number, the place after it
MODEL = -1  # in the place of a call's number, that of the model itself


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that the forward pass has made, and that the backward pass has made."""

    activations: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.temporaries

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.activations + other.activations, self.temporaries + other.temporaries)


@dataclass(frozen=True, slots=True)
class Event:
    """What ends an interval.

    what: "begin" or "end" of the call's pass; "gradient": that of the parameter is there, and "freed" again; "" the
          end of a pass.
    call: number of the call of a block, in the order of the forward pass; -1 for the model's own.
    """

    what: Literal["begin", "end", "gradient", "freed", ""]
    stage: Pass
    call: int = -1
    parameter: str = ""


@dataclass(frozen=True, slots=True)
class Interval:
    """What happens up to `event`: `peak` is the highest above the begin of the interval, `left` what it leaves."""

    peak: Bytes
    left: Bytes
    event: Event


@dataclass(frozen=True)
class ProfiledCall:
    """One call of a block: its name, and bytes of the tensors with a gradient that it is given and that it returns."""

    block: str
    input_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank holds it; `names` are all that it has."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Profile:
    """One forward and backward of a microbatch.

    intervals:  in the order of time; both passes end with an event of their own.
    calls:      of blocks, in the order of the forward pass.
    parameters: by first name. buffer_bytes: of all buffers.
    used:       for each place (a call's number, -1 before the first, number of calls after the last) the parameters
                that it uses.
    works:      operations by pass and place.
    branch_bytes: by place, of the results of operations on parameters: a backward pass that leaves the gradients of
                parameters for later keeps the gradients of these.
    collectives: of the tensor axis, by pass and place.
    output_bytes: of what the model returned to the loss. elements: of the batch's tensors.
    """

    intervals: tuple[Interval, ...]
    calls: tuple[ProfiledCall, ...]
    parameters: dict[str, Parameter]
    buffer_bytes: int
    used: dict[int, frozenset[str]]
    works: dict[tuple[Pass, int], tuple[OpCost, ...]]
    branch_bytes: dict[int, int]
    collectives: dict[tuple[Pass, int], tuple[Collective, ...]] = field(
        default_factory=dict[tuple[Pass, int], tuple[Collective, ...]]
    )
    output_bytes: int = 0
    elements: int = 0

    @property
    def forward(self) -> tuple[Interval, ...]:
        return tuple(one for one in self.intervals if one.event.stage == "forward")

    @property
    def backward(self) -> tuple[Interval, ...]:
        return tuple(one for one in self.intervals if one.event.stage == "backward")


def between(few: Profile, many: Profile, elements: int) -> Profile:
    """The profile of a batch of `elements`, from those of a smaller and a larger one: costs are linear between them.

    Where these two did not do the same, the larger one's, scaled.
    """
    if elements == many.elements:
        return many
    if few.elements == many.elements or [one.event for one in few.intervals] != [one.event for one in many.intervals]:
        few = many
    at = (elements - few.elements) / (many.elements - few.elements) if few is not many else elements / many.elements
    return _blended(few, many, at, elements)


def scaled(profile: Profile, elements: int) -> Profile:
    return _blended(profile, profile, elements / profile.elements, elements)


def blended(one: Profile, other: Profile, at: float) -> Profile:
    """The part `at` of the way from `one` to `other`, which have as many elements; `other` where these do not do the
    same.
    """
    if [each.event for each in one.intervals] != [each.event for each in other.intervals]:
        return other
    return _blended(one, other, at, other.elements)


def _blended(few: Profile, many: Profile, at: float, elements: int) -> Profile:
    pairs = zip(few.intervals, many.intervals, strict=True)

    def middle(a: int, b: int) -> int:
        return round(b * at) if few is many else round(a + (b - a) * at)

    def middle_bytes(a: Bytes, b: Bytes) -> Bytes:
        return Bytes(middle(a.activations, b.activations), middle(a.temporaries, b.temporaries))

    intervals = tuple(Interval(middle_bytes(a.peak, b.peak), middle_bytes(a.left, b.left), b.event) for a, b in pairs)
    calls = tuple(
        ProfiledCall(b.block, middle(a.input_bytes, b.input_bytes), middle(a.output_bytes, b.output_bytes))
        for a, b in zip(few.calls, many.calls, strict=True)
    )
    branches = {place: middle(few.branch_bytes.get(place, 0), size) for place, size in many.branch_bytes.items()}
    works = {key: _between_works(few.works.get(key, ()), many.works[key], at, few is many) for key in many.works}
    grown = elements / many.elements
    collectives = {
        key: tuple(one._replace(bytes=round(one.bytes * grown)) for one in found)
        for key, found in many.collectives.items()
    }
    return replace(
        many,
        intervals=intervals,
        calls=calls,
        branch_bytes=branches,
        works=works,
        collectives=collectives,
        output_bytes=middle(few.output_bytes, many.output_bytes),
        elements=elements,
    )


def _between_works(few: Sequence[OpCost], many: Sequence[OpCost], at: float, scaled: bool) -> tuple[OpCost, ...]:
    if scaled or [(one.kind, one.times) for one in few] != [(one.kind, one.times) for one in many]:
        part = at if scaled else 1.0
        return tuple(replace(one, flops=one.flops * part, moved_bytes=one.moved_bytes * part) for one in many)
    return tuple(_between_two(a, b, at) for a, b in zip(few, many, strict=True))


def _between_two(few: OpCost, many: OpCost, at: float) -> OpCost:
    def middle(name: str) -> float:
        a, b = getattr(few, name), getattr(many, name)
        return a + (b - a) * at

    sizes = {name: round(middle(name)) for name in ("rows", "inner", "columns")}
    return replace(many, flops=middle("flops"), moved_bytes=middle("moved_bytes"), **sizes)


# ---------------------------------------------------------------------------------------------- as parts of a model


def parts_of(profile: Profile) -> ModelCosts:
    """The parts of a model; what they keep is in the intervals."""
    calls = profile.calls
    before, *blocks, after = (_part(profile, place) for place in range(MODEL, len(calls) + 1))
    blocks = [
        replace(block, name=call.block, input_bytes=call.input_bytes) for block, call in zip(blocks, calls, strict=True)
    ]
    if calls:
        after = replace(after, input_bytes=calls[-1].output_bytes)
    return ModelCosts(before=replace(before, name="before"), blocks=blocks, after=replace(after, name="after"))


def _part(profile: Profile, place: int) -> BlockCost:
    return BlockCost(
        name="",
        parameters=sum(profile.parameters[one].elements for one in profile.used.get(place, ())),
        forward=profile.works.get(("forward", place), ()),
        backward=profile.works.get(("backward", place), ()),
        input_bytes=0,
        collectives=profile.collectives.get(("forward", place), ()),
        collectives_backward=profile.collectives.get(("backward", place), ()),
    )


def stage_profile(profile: Profile, begin: int, end: int) -> Profile:
    """Of a profile what the calls from `begin` to before `end` do, with the code after each; the first has all before.

    Its events of the model's own passes are left out.
    """
    found: list[Interval] = []
    at, last = 0, len(profile.calls)
    for one in profile.intervals:
        event = one.event
        if event.stage == "forward" and event.what == "begin" and event.call >= 0:
            before, at = at, event.call
        elif event.stage == "backward" and event.what == "end" and event.call >= 0:
            before, at = event.call, max(0, event.call - 1)
        else:
            before = at
        if begin <= before < end or not last:
            found.append(one)
    return replace(profile, intervals=tuple(map(_without_model, found)))


def _without_model(interval: Interval) -> Interval:
    of_model = interval.event.call == MODEL and interval.event.what in ("begin", "end")
    return replace(interval, event=Event("", interval.event.stage)) if of_model else interval
