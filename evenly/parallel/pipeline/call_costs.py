"""What each block call of a forward costs, recorded while the model's code runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evenly.model.costs import CostCounter
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.stages import CallCost, CallId
from evenly.torch_private import TorchDispatchMode, memory_bytes, memory_key


@dataclass(eq=False)
class CallRecord:
    """Collects the cost of a call; `saved` are the bytes saved for the backward, by memory."""

    call: CallId
    tensors: set[str] = field(default_factory=set[str])
    saved: dict[int, int] = field(default_factory=dict[int, int])
    counter: CostCounter = field(default_factory=CostCounter)

    def cost(self, model: StagedModel) -> CallCost:
        fakes = [model.stage_tensors[name].fake for name in self.tensors]
        return CallCost(
            call=self.call,
            tensors=frozenset(self.tensors),
            flops=self.counter.flops,
            moved_bytes=self.counter.moved_bytes,
            weight_bytes=sum(fake.nbytes for fake in fakes),
            saved_bytes=sum(self.saved.values()),
        )


def merged_calls(
    records: Sequence[CallRecord], others: Sequence[CallRecord], places: Mapping[str, int]
) -> list[CallRecord]:
    """All of both, in order. places: of each block in the model's definition, which decides where the orders of calls
    do not.
    """
    if not records:
        return [*others]
    merged = [*records]
    index = {one.call: number for number, one in enumerate(merged)}
    for number, record in enumerate(others):
        if record.call in index:
            merged[index[record.call]].tensors |= record.tensors
            continue
        least = index[others[number - 1].call] + 1 if number else 0
        at = next((index[one.call] for one in others[number:] if one.call in index), len(merged))
        while at > least and places[merged[at - 1].call[0]] > places[record.call[0]]:
            at -= 1
        merged.insert(at, record)
        index = {one.call: number for number, one in enumerate(merged)}
    return merged


class CostRecorder:
    """Around one function: adds its cost and saved tensors to `record`."""

    def __init__(self, record: CallRecord, weights: set[int]) -> None:
        self._record, self._weights = record, weights
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> None:
        self._hooks.__enter__()
        self._record.counter.__enter__()

    def __exit__(self, *problem: Any) -> None:
        self._record.counter.__exit__(*problem)
        self._hooks.__exit__(*problem)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = memory_key(tensor)
        if key not in self._weights:
            self._record.saved[key] = memory_bytes(tensor)
        return tensor


class CurrentCost(TorchDispatchMode):
    """Within, adds the cost of every operation to the record that is `current`."""

    def __init__(self, current: Callable[[], CallRecord]) -> None:
        super().__init__()
        self._current = current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._current().counter.add(func, args, kwargs or {}, result)
        return result
