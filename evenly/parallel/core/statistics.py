"""Running statistics of normalisation layers, the same on every rank as on one device.

On one device BatchNorm adds the statistics s_1, s_2, ... of one microbatch after the other into its running ones:
r <- (1 - m) r + m s. A rank sees only its own microbatches, so during a step nothing is added up: each call's s is
recorded, and afterwards every rank computes r_N = (1 - m)^N r_0 + sum_k m (1 - m)^(N - k) s_k from the one sum over
ranks that this needs. With momentum None the average is a plain one: r_N = (n_0 r_0 + sum_k s_k) / (n_0 + N).

To record s, a call runs with running statistics of its own and momentum 1: what it leaves there is s itself.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evenly.comm.collectives import all_reduce
from evenly.comm.exact_reduce import begin_exact_all_reduce
from evenly.comm.exact_sum import ExactSum
from evenly.comm.groups import Group
from evenly.errors import UserError
from evenly.parallel.core.mutation_guard import MutationGuard
from evenly.torch_private import is_fake

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
FORWARDS = {nn.BatchNorm1d.forward, nn.InstanceNorm1d.forward}  # the others have the same


@dataclass(eq=False)
class _Layer:
    """One normalisation layer and what its calls in this step left."""

    name: str
    module: Any  # one of BATCH_NORMS or INSTANCE_NORMS
    records: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)  # (microbatch, call, mean | var)
    saved: Any = None  # (running_mean, running_var, num_batches_tracked, momentum) while a call runs

    @property
    def channels(self) -> int:
        return self.module.num_features

    @property
    def counts(self) -> bool:
        """Whether the layer counts its calls; InstanceNorm has the counter and does not."""
        return isinstance(self.module, BATCH_NORMS) and self.module.num_batches_tracked is not None

    @property
    def momentum(self) -> float | None:
        """Weight of the newest statistics; None for a plain average, which InstanceNorm does not know."""
        momentum: float | None = self.module.momentum
        return momentum if momentum is not None or isinstance(self.module, BATCH_NORMS) else 0.0


class RunningStatistics:
    """Keeps the running statistics of `model` those of one device, over the ranks of `group`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        group: Group,
        alone: bool | None = None,
        whole: bool = True,
        elsewhere: Container[str] = (),
        exact: bool = False,
    ) -> None:
        """alone: whether no other copy of `model` shares a step; by default, whether `group` is of one rank.

        whole: whether the rank holds all parameters as they are. elsewhere: names of layers' buffers that other ranks
        hold; their layers are counted and not kept. exact: whether the bits must not depend on which rank calls what.
        """
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"layer {name} is a SyncBatchNorm",
                    "its statistics depend on how many ranks there are",
                    "use BatchNorm: its statistics are those of a microbatch, on any number of ranks",
                )
            if keeps_statistics(module) and type(module).forward not in FORWARDS:
                raise UserError(
                    f"layer {name} is a {type(module).__name__} with a forward of its own",
                    "its running statistics are known from torch's only",
                    "derive it from nn.Module, or leave the forward as torch has it",
                )
        self._group, self._exact = group, exact
        self._all = [_Layer(name, module) for name, module in model.named_modules() if keeps_statistics(module)]
        self._layers = [layer for layer in self._all if f"{layer.name}.running_mean".lstrip(".") not in elsewhere]
        own = {id(b) for layer in self._layers for b in layer.module.buffers()}
        shared = group.size > 1 if alone is None else not alone
        self._others = MutationGuard(model, but=own, parameters=whole) if shared else None
        self._microbatch = -1
        self._handles: list[Any] = []
        for layer in self._layers:
            self._handles.append(layer.module.register_forward_pre_hook(self._enter(layer)))
            self._handles.append(layer.module.register_forward_hook(self._leave(layer), always_call=True))

    @property
    def layers(self) -> int:
        """How many layers keep running statistics, here or on other ranks."""
        return len(self._all)

    def recording(self, microbatch: int) -> AbstractContextManager[None]:
        """Around the forward of `microbatch`; calls outside (recomputation) leave no trace."""
        return self._recording(microbatch) if self._layers or self._others else nullcontext()

    @contextmanager
    def _recording(self, microbatch: int) -> Generator[None]:
        self._microbatch = microbatch
        try:
            with nullcontext() if self._others is None else self._others.watching():
                yield
        finally:
            self._microbatch = -1

    def calls(self, microbatch: int) -> list[int]:
        """How often each layer was called in the forward of `microbatch`; of those elsewhere, never."""
        return [sum(m == microbatch for m, _, _ in layer.records) for layer in self._all]

    def merge(self, other: RunningStatistics) -> None:
        """Takes over what the layers of `other`, of a copy of the model on another device, left in this step."""
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            device = mine.module.running_mean.device
            mine.records += [(microbatch, call, s.to(device, copy=True)) for microbatch, call, s in theirs.records]
            theirs.records.clear()

    def sync(self, calls: Sequence[Sequence[int]]) -> None:
        """Ends a step. calls[j][l]: how often layer l was called in microbatch j, over all microbatches of the step."""
        if not self._layers:
            return
        columns = {id(layer): [row[number] for row in calls] for number, layer in enumerate(self._all)}
        parts = [self._weighted(layer, columns[id(layer)]) for layer in self._layers]
        flat = self._exactly_summed(parts) if self._exact else self._summed(parts)
        start = 0
        for layer in self._layers:
            _apply(layer, flat[start : start + 2 * layer.channels], sum(columns[id(layer)]))
            start += 2 * layer.channels
            layer.records.clear()

    def close(self) -> None:
        """Takes the hooks off the layers."""
        for handle in self._handles:
            handle.remove()

    def _weighted(self, layer: _Layer, calls: list[int]) -> list[torch.Tensor]:
        """The terms of the sum over s_k that this rank has, in float64, each of shape (2 x features,); zeros first."""
        total, before = sum(calls), [sum(calls[:j]) for j in range(len(calls))]
        zeros = torch.zeros(2 * layer.channels, dtype=torch.float64, device=layer.module.running_mean.device)
        return [zeros] + [
            _coefficient(layer.momentum, before[microbatch] + call, total) * s.double()
            for microbatch, call, s in layer.records
        ]

    def _summed(self, parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The sums over ranks of the terms of each layer, one layer after the other."""
        for total, *terms in parts:
            for term in terms:
                total += term
        return all_reduce(torch.cat([total for total, *_ in parts]), self._group, label="running statistics")

    def _exactly_summed(self, parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The same, rounded once."""
        sums, start = ExactSum(torch.cat([zeros for zeros, *_ in parts])), 0
        for zeros, *terms in parts:
            for term in terms:
                sums.add(term, start)
            start += len(zeros)
        begin_exact_all_reduce(sums, self._group, label="running statistics")()
        return sums.rounded()

    def _enter(self, layer: _Layer) -> Any:
        def enter(module: Any, given: Any) -> None:
            if not module.training or any(is_fake(type(one)) or not getattr(one, "arrived", True) for one in given):
                return
            layer.saved = (module.running_mean, module.running_var, module.num_batches_tracked, module.momentum)
            module.running_mean = torch.zeros_like(module.running_mean)
            module.running_var = torch.zeros_like(module.running_var)
            module.num_batches_tracked = None
            module.momentum = 1.0

        return enter

    def _leave(self, layer: _Layer) -> Any:
        def leave(module: Any, _: Any, __: Any) -> None:
            if layer.saved is None:
                return
            s = torch.cat([module.running_mean, module.running_var])
            module.running_mean, module.running_var, module.num_batches_tracked, module.momentum = layer.saved
            layer.saved = None
            if self._microbatch >= 0:
                call = sum(m == self._microbatch for m, _, _ in layer.records)
                layer.records.append((self._microbatch, call, s))

        return leave


def keeps_statistics(module: nn.Module) -> bool:
    """Whether `module` is a layer whose running statistics follow what it sees."""
    return isinstance(module, BATCH_NORMS + INSTANCE_NORMS) and module.running_mean is not None


def _coefficient(momentum: float | None, position: int, total: int) -> float:
    """Weight of the call at `position` (from 0) of `total` in the running statistics after all."""
    return 1.0 if momentum is None else momentum * (1 - momentum) ** (total - 1 - position)


def _apply(layer: _Layer, summed: torch.Tensor, total: int) -> None:
    if not total:
        return
    module = layer.module
    for running, part in (
        (module.running_mean, summed[: layer.channels]),
        (module.running_var, summed[layer.channels :]),
    ):
        if layer.momentum is None:
            seen = float(module.num_batches_tracked)
            running.copy_((seen * running.double() + part) / (seen + total))
        else:
            running.copy_((1 - layer.momentum) ** total * running.double() + part)
    if layer.counts:
        module.num_batches_tracked += total
