"""Metrics of a pass: of each name the sums of what the losses of all microbatches give, on all ranks.

Names are known only once a loss has returned, and never to ranks that compute none: a stage of a pipeline without the
loss, a rank without a microbatch. So each rank puts one number into the totals of the pass, its *mark*: which names its
losses gave. Where all marks say that there are no metrics, that is all. Otherwise names that are not known are
gathered, and the pairs are added in one all-reduce of float64 numbers, each filled by one rank only: the sum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from evenly.comm.collectives import all_reduce, gather_values
from evenly.comm.host_numbers import on_device
from evenly.comm.world import World
from evenly.errors import RunError
from evenly.job import Loss

NO_LOSS, NO_METRICS, UNLIKE, FIRST_MARK = 0.0, 1.0, 2.0, 3
ASKED = "the metrics of a loss must be pairs of numbers or scalar tensors by name, the sum and what it is divided by"


@dataclass(frozen=True)
class MetricSums:
    """A metric of a pass, by microbatch: its sums, and the counts that they are divided by."""

    sums: list[float]
    counts: list[float]

    @property
    def value(self) -> float | None:
        """sum(sums) / sum(counts), both exactly rounded; None where the counts are 0."""
        count = math.fsum(self.counts)
        add = math.fsum if all(map(math.isfinite, self.sums)) else sum  # fsum knows no sum of both infinities
        return None if count == 0 else add(self.sums) / count

    def check(self, name: str, asked: str) -> None:
        """Raises `RunError`, on all ranks alike, where a count cannot divide."""
        for number, count in enumerate(self.counts):
            if not math.isfinite(count) or count < 0:
                raise RunError(
                    f"{asked}: the count of a metric must be finite and not negative",
                    f"in microbatch {number} {name} has the count {count:g}",
                    "count what the metric covers: samples, tokens",
                )


def joined_metrics(passes: Sequence[Mapping[str, MetricSums]]) -> dict[str, MetricSums]:
    names = dict.fromkeys(name for metrics in passes for name in metrics)
    having = {name: [metrics[name] for metrics in passes if name in metrics] for name in names}
    return {
        name: MetricSums([one for part in parts for one in part.sums], [one for part in parts for one in part.counts])
        for name, parts in having.items()
    }


def as_metrics(found: Any) -> dict[str, tuple[Any, Any]]:
    """The metrics of a loss, detached; raises `RunError` for what are none."""
    if not isinstance(found, Mapping):
        raise _not_metrics(f"metrics is a {type(found).__name__}")
    metrics: dict[str, tuple[Any, Any]] = {}
    for name, pair in found.items():
        if not isinstance(name, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise _not_metrics(f"{name!r} is {pair!r:.80}")
        metrics[name] = (_as_number(name, pair[0]), _as_number(name, pair[1]))
    return metrics


def _as_number(name: str, value: Any) -> Any:
    """A number, or a tensor without dims; not read from its device."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise _not_metrics(f"{name} has a tensor of shape {tuple(value.shape)} and type {value.dtype}")
        return value.detach().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _not_metrics(f"{name} has a {type(value).__name__}") from None


def _not_metrics(found: str) -> RunError:
    return RunError(ASKED, found, 'return Loss(total, weight, metrics={"accuracy": (correct, count)})')


class MetricCells:
    """What the losses of this rank give in one pass, by microbatch."""

    def __init__(self) -> None:
        self._rows: dict[int, Mapping[str, tuple[Any, Any]]] = {}

    def add(self, number: int, loss: Loss) -> None:
        """Adds the metrics of microbatch `number`."""
        self._rows[number] = loss.metrics

    @property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Of each microbatch with a loss on this rank, in the order of the loss."""
        return {number: tuple(row) for number, row in self._rows.items()}

    @property
    def mark(self) -> float:
        """A whole number that stands for the names, below 2**53: the same on any rank, in whatever order they are."""
        marks = {mark_of(names) for names in self.names.values()}
        return NO_LOSS if not marks else marks.pop() if len(marks) == 1 else UNLIKE

    def vector(self, names: Sequence[str], microbatches: int, device: str) -> torch.Tensor:
        """Of each microbatch the pairs of all `names`; float64, 1D, zero where another rank fills it."""
        values = [0.0] * (microbatches * 2 * len(names))
        elsewhere: dict[int, torch.Tensor] = {}
        for number, row in self._rows.items():
            for place, value in enumerate((one for name in names for one in row[name]), number * 2 * len(names)):
                put(values, elsewhere, place, value)
        return joined(values, elsewhere, device)


def put(values: list[float], elsewhere: dict[int, torch.Tensor], place: int, value: torch.Tensor | float) -> None:
    """Puts a number into `values`, or `elsewhere` where it is on a GPU: those are not read one by one."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        elsewhere[place] = value
    else:
        values[place] = float(value)


def joined(values: list[float], elsewhere: Mapping[int, torch.Tensor], device: str) -> torch.Tensor:
    vector = on_device(values, device)
    if elsewhere:
        places = on_device([*elsewhere], vector.device, torch.int64)
        vector[places] = torch.stack([value.double().to(vector.device) for value in elsewhere.values()])
    return vector


def mark_of(names: Iterable[str]) -> float:
    ordered = sorted(names)
    if not ordered:
        return NO_METRICS
    return float(FIRST_MARK + int.from_bytes(blake2b(repr(ordered).encode(), digest_size=6).digest(), "little"))


class MetricNames:
    """The names of the job's metrics that have been seen so far, by mark; the same on all ranks of `world`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[float, tuple[str, ...]] = {}

    def sum(self, cells: MetricCells, marks: Sequence[float], microbatches: int) -> dict[str, MetricSums]:
        """The metrics of a pass of so many `microbatches`, of which this rank has `cells`; called by all ranks.

        marks: of all ranks. Raises `RunError`, on all ranks alike, where microbatches have metrics of different names.
        """
        given = {mark for mark in marks if mark != NO_LOSS}
        if given <= {NO_METRICS}:
            return {}
        names = self._names(cells, given)
        vector = cells.vector(names, microbatches, self._world.device)
        values = all_reduce(vector, self._world.group("world"), label="metrics").tolist()
        columns = [values[place :: 2 * len(names)] for place in range(2 * len(names))]
        return {name: MetricSums(columns[2 * n], columns[2 * n + 1]) for n, name in enumerate(names)}

    def _names(self, cells: MetricCells, given: set[float]) -> tuple[str, ...]:
        """Those of all microbatches, in the order of the first."""
        if len(given) == 1 and (names := self._known.get(next(iter(given)))) is not None:
            return names
        by_microbatch: dict[int, tuple[str, ...]] = {}
        for found in gather_values(cells.names, self._world.group("world")):
            by_microbatch |= found
        first = min(by_microbatch)
        for number, names in sorted(by_microbatch.items()):
            if mark_of(names) != mark_of(by_microbatch[first]):
                raise unlike_metrics(first, by_microbatch[first], number, names)
        return self._known.setdefault(mark_of(by_microbatch[first]), by_microbatch[first])


def unlike_metrics(first: int, names: Sequence[str], number: int, others: Sequence[str]) -> RunError:
    return RunError(
        "the metrics of a loss must have the same names in every microbatch of a batch",
        f"microbatch {first} has {', '.join(names) or 'none'}, microbatch {number} {', '.join(others) or 'none'}",
        "where there is nothing to count, give (0, 0)",
    )
