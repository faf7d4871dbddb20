"""Running statistics of normalisation layers.

On one device BatchNorm adds the statistics s_1, s_2, ... of one microbatch after the other into its running ones:
r <- (1 - m) r + m s. After a step r_N = (1 - m)^N r_0 + sum_k m (1 - m)^(N - k) s_k, whichever rank has which s_k. With
momentum None the average is a plain one: r_N = (n_0 r_0 + sum_k s_k) / (n_0 + N).

To record s, a call runs with running statistics of its own and momentum 1: what it leaves there is s itself.

In compiled code this stays the same, but what changes the layer runs around the whole graph, which only appends s to a
list. That is part of the layer's forward there: of hooks torch's compiler knows those of one block, and would run these
for all blocks alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from evenly.data.generators import reseed, undisturbed
from evenly.errors import UserError
from evenly.model.norms import BATCH_NORMS, INSTANCE_NORMS, keeps_statistics
from evenly.parallel.core.buffer_rules import BufferRule, Term
from evenly.parallel.core.parameter_views import is_placeholder
from evenly.torch_private import (
    add_to_each,
    copy_to_each,
    divide_each,
    scale_each,
    set_tensor_dict,
    tensor_dict,
    without_dispatch_modes,
)

# What a call runs with: mean and variance together, and each, by `.data`: autograd keeps them for the backward, and of
# views it would find that the other part has changed.
Own = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Saved = tuple[Any, Any, Any, Any, Own]  # running_mean, running_var, num_batches_tracked, momentum; what replaces them
FORWARDS = {nn.BatchNorm1d.forward, nn.InstanceNorm1d.forward}  # the others have the same


class Normalisation(BufferRule):
    """A layer of `BATCH_NORMS` or `INSTANCE_NORMS`."""

    module: Any

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._records: list[tuple[int, int, torch.Tensor]] = []  # (microbatch, call, mean and var)
        self._prepared: Own | None = None  # for the first call of a forward
        self._saved: Saved | None = None  # while a call runs
        self._saved_by_graph: Saved | None = None  # while compiled code runs
        self._in_graph: list[torch.Tensor] = []  # mean | var of each call in it
        self._hooks: list[Any] = []

    @property
    def buffers(self) -> list[str]:
        counter = ["num_batches_tracked"] if self.module.num_batches_tracked is not None else []
        return ["running_mean", "running_var", *counter]

    @property
    def device(self) -> torch.device:
        return self.module.running_mean.device

    @property
    def width(self) -> int:
        return 2 * self.module.num_features

    def attach(self) -> list[Any]:
        self._hooks = [
            self.module.register_forward_pre_hook(self._enter),
            self.module.register_forward_hook(self._leave, always_call=True),
        ]
        return self._hooks

    def detach(self) -> None:
        if not self._hooks:
            vars(self.module).pop("forward", None)

    def prepare_graphs(self) -> bool:
        """Records within the layer's forward from here on; False where it has one that is no method of its class."""
        if not self._hooks:
            return True
        if "forward" in vars(self.module):
            return False
        while self._hooks:
            self._hooks.pop().remove()
        self.module.forward = self._recording_forward()
        return True

    def begin_graph(self) -> None:
        """Before compiled code that may call the layer."""
        self._saved_by_graph = self._swapped(())

    def end_graph(self) -> None:
        """After it, also where it raised."""
        if self._saved_by_graph is not None:
            self._put_back(self._saved_by_graph)
            self._saved_by_graph = None
        for s in self._in_graph:
            self._record(s)
        self._in_graph.clear()

    @classmethod
    def prepare(cls, rules: Sequence[Normalisation]) -> None:
        """Takes memory for a call of each layer, all at once: a GPU's host waits longer for each than for a layer."""
        having = [rule for rule in rules if rule.module.training and not is_placeholder(rule.module.running_mean)]
        for _, group in groupby(having, lambda rule: (rule.module.running_mean.dtype, rule.device)):
            alike = [*group]
            widths = [rule.module.num_features for rule in alike]
            flat = alike[0].module.running_mean.new_zeros(2 * sum(widths))
            whole, parts = flat.split([2 * n for n in widths]), iter(flat.split([n for n in widths for _ in range(2)]))
            for rule, own in zip(alike, whole, strict=True):
                rule._prepared = (own, next(parts).data, next(parts).data)

    def end(self) -> None:
        super().end()
        self._prepared = None

    def calls(self, microbatch: int) -> int:
        return sum(m == microbatch for m, _, _ in self._records)

    def drop(self) -> None:
        self._records.clear()

    def merge(self, other: Normalisation) -> None:
        self._records += [(m, call, s.to(self.device, copy=True)) for m, call, s in other._records]
        other._records.clear()

    def terms(self, calls: Sequence[int]) -> list[Term]:
        total, before = sum(calls), [sum(calls[:j]) for j in range(len(calls))]
        return [
            (_coefficient(self._momentum, before[microbatch] + call, total), s) for microbatch, call, s in self._records
        ]

    @classmethod
    def apply(cls, rules: Sequence[Any], sums: Sequence[torch.Tensor], calls: Sequence[Sequence[int]]) -> None:
        called = [(rule, summed, sum(own)) for rule, summed, own in zip(rules, sums, calls, strict=True) if sum(own)]
        for rule in rules:
            rule._records.clear()
        if not called:
            return
        running = [one for rule, _, _ in called for one in (rule.module.running_mean, rule.module.running_var)]
        sizes = [rule.module.num_features for rule, _, _ in called for _ in range(2)]
        weights = [weights for rule, _, total in called for weights in [rule._weights(total)] * 2]
        new = torch.cat(running).double().split(sizes)
        scale_each(new, [old for old, _ in weights])
        add_to_each(new, torch.cat([summed for _, summed, _ in called]).split(sizes))
        if any(divisor != 1 for _, divisor in weights):
            divide_each(new, [divisor for _, divisor in weights])
        copy_to_each(running, new)
        # InstanceNorm has the counter and does not count.
        counts = [(rule.module.num_batches_tracked, n) for rule, _, n in called if isinstance(rule.module, BATCH_NORMS)]
        if counts := [(counter, n) for counter, n in counts if counter is not None]:
            add_to_each([counter for counter, _ in counts], [n for _, n in counts])

    def _weights(self, total: int) -> tuple[float, float]:
        """Of the running statistics before `total` calls, and what their sum with the terms is divided by."""
        if self._momentum is not None:
            return (1 - self._momentum) ** total, 1.0
        seen = float(self.module.num_batches_tracked)
        return seen, seen + total

    @property
    def _momentum(self) -> float | None:
        """Weight of the newest statistics; None for a plain average, which InstanceNorm does not know."""
        momentum: float | None = self.module.momentum
        return momentum if momentum is not None or isinstance(self.module, BATCH_NORMS) else 0.0

    def _recording_forward(self) -> Callable[..., Any]:
        module, in_graph = self.module, self._in_graph

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                result = type(module).forward(module, *args, **kwargs)
                if module.training:
                    in_graph.append(torch.cat([module.running_mean, module.running_var]))
                return result
            self._enter(module, args)
            try:
                return type(module).forward(module, *args, **kwargs)
            finally:
                self._leave()

        return forward

    def _enter(self, module: Any, given: Any) -> None:
        self._saved = self._swapped(given)

    def _leave(self, *_: Any) -> None:
        if self._saved is None:
            return
        own, self._saved = self._put_back(self._saved), None
        self._record(own)

    def _swapped(self, given: Iterable[Any]) -> Saved | None:
        """Gives the layer statistics of its own; returns what it had, None where it keeps that."""
        module, buffers = self.module, tensor_dict(self.module, "_buffers")
        # A stage may run the code of a layer that is another's, on numbers of its own: these come to nothing.
        if not module.training or any(is_placeholder(one) for one in (buffers["running_mean"], *given)):
            return None
        mean, counter = buffers["running_mean"], buffers["num_batches_tracked"]
        own, self._prepared = self._prepared or _zeros_for(mean), None
        saved = (mean, buffers["running_var"], counter, module.momentum, own)
        # Not by the module's own setattr, which takes longer than the layer.
        _, buffers["running_mean"], buffers["running_var"] = own
        if not is_placeholder(counter):  # which no stage has whose layers do not count
            buffers["num_batches_tracked"] = None
        object.__setattr__(module, "momentum", 1.0)
        return saved

    def _put_back(self, saved: Saved) -> torch.Tensor:
        """The inverse; returns mean and variance that the layer had meanwhile, one after the other."""
        buffers = tensor_dict(self.module, "_buffers")
        *before, momentum, (own, *parts) = saved
        left = (buffers["running_mean"], buffers["running_var"])
        buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"] = before
        object.__setattr__(self.module, "momentum", momentum)
        # A forward of the layer's own may have assigned other tensors.
        return own if left[0] is parts[0] and left[1] is parts[1] else torch.cat(left)

    def _record(self, s: torch.Tensor) -> None:
        if self.microbatch is not None and self.microbatch >= 0:
            self._records.append((self.microbatch, self.calls(self.microbatch), s))


def _zeros_for(mean: torch.Tensor) -> Own:
    # Unseen by modes of operations: a block does the same ones when it is computed again, and nothing was prepared.
    with without_dispatch_modes():
        own = mean.new_zeros(2 * len(mean))
        return (own, own[: len(mean)].data, own[len(mean) :].data)


def check_normalisation(name: str, module: nn.Module) -> None:
    """Raises `UserError` for a normalisation layer whose statistics follow another rule."""
    if isinstance(module, nn.SyncBatchNorm):
        raise UserError(
            f"layer {name} is a SyncBatchNorm",
            "it takes its statistics over all ranks at once, so that a run would follow from their number; one rank "
            "alone would compute what no other plan could go on with",
            "use BatchNorm, which it is on one rank: its statistics are those of a microbatch, on any number of ranks",
        )
    own = "forward" in vars(module) or type(module).forward not in FORWARDS
    if keeps_statistics(module) and own and not keeps_torch_s_rule(module):
        raise UserError(
            f"layer {name} is a {type(module).__name__} with a forward of its own",
            "tried on random numbers, it uses its running statistics, or changes them otherwise than torch's does",
            "derive it from nn.Module, or leave the forward as torch has it",
        )


def keeps_torch_s_rule(module: Any) -> bool:
    """Whether a forward of its own changes the statistics of `module` as torch's does, and uses none in training.

    Both run on random numbers, from several statistics: as they come, and as `Normalisation` records them.
    """
    if any(True for child in module.children() for _ in child.buffers()):
        return False  # which trying would change
    forward = getattr(module.forward, "__func__", None)
    if getattr(module.forward, "__self__", None) is not module or forward is None:
        return False  # a function of its own, which cannot run on another module
    kind = next(kind for kind in BATCH_NORMS + INSTANCE_NORMS if isinstance(module, kind))
    dims = 1 + (BATCH_NORMS + INSTANCE_NORMS).index(kind) % len(BATCH_NORMS)
    draw = torch.Generator().manual_seed(0)
    x, *starts = (
        torch.rand(shape, dtype=torch.float64, generator=draw)
        for shape in ((3, module.num_features, *[4] * dims), *[(2, module.num_features)] * 2)
    )
    states = [(module.momentum, count, start) for count, start in enumerate(starts, 3)]
    results: list[torch.Tensor] = []
    try:
        with undisturbed(), torch.no_grad():
            for state in (*states, (1.0, None, torch.zeros_like(starts[0]))):
                own, torch_s = _statistics_twin(module, *state), _statistics_twin(module, *state)
                reseed(0)
                results.append(forward(own, x.clone()))
                kind.forward(torch_s, x.clone())
                pairs = zip(own.buffers(), torch_s.buffers(), strict=True)
                if not all(torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12) for mine, theirs in pairs):
                    return False
        return all(torch.equal(result, results[0]) for result in results)
    except Exception:  # what it needs cannot be known here
        return False


def _statistics_twin(module: Any, momentum: float | None, counter: int | None, start: torch.Tensor) -> Any:
    """A copy of `module` in training with tensors of its own: weights of 1, and `start`, its mean and variance."""
    twin: Any = copy.copy(module)
    weights = {name: torch.ones_like(start[0]) if module.affine else None for name in ("weight", "bias")}
    counted = None if counter is None else torch.tensor(counter)
    statistics = {"running_mean": start[0].clone(), "running_var": start[1].clone(), "num_batches_tracked": counted}
    set_tensor_dict(twin, "_parameters", weights)
    set_tensor_dict(twin, "_buffers", statistics)
    twin.training, twin.momentum = True, momentum
    return twin


def _coefficient(momentum: float | None, position: int, total: int) -> float:
    """Weight of the call at `position` (from 0) of `total` in the running statistics after all."""
    return 1.0 if momentum is None else momentum * (1 - momentum) ** (total - 1 - position)
