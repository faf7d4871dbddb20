"""Spectral norm: vectors u, v that every forward in training brings one power iteration nearer to a weight's.

What an iteration gives follows from the weight, which a step does not change, and from how many went before it: on one
device those of all microbatches before. So a call knows its *ordinal*, the number of calls before it in the step, and
iterates for those that other ranks run. The last call of the step leaves the vectors that one device would have.

How often other microbatches call the module is taken to be as often as in the look at the start, and is held against
what they did at the end of the step. A call that is computed again in the backward has its ordinal again: of which call
it is one, the seed of the generator tells (`calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from evenly.data.generators import last_seed
from evenly.errors import RunError
from evenly.parallel.core.buffer_rules import LOOK, BufferRule, Term
from evenly.parallel.core.parameter_views import is_placeholder
from evenly.torch_private import (
    ORIGINAL,
    SPECTRAL_VECTORS,
    SpectralNormOfWeight,
    backward_number,
    forward_hooks,
    tensor_dict,
)

Vectors = list[torch.Tensor]


class CallCounts:
    """How often each microbatch of a step calls a module; the replicas of a process share one.

    expected: of a microbatch that another rank runs; None if it is not known.
    """

    def __init__(self) -> None:
        self.expected: int | None = None
        self.of: dict[int, int] = {}

    def before(self, microbatch: int) -> int:
        """Calls of all microbatches before, as far as is known."""
        return sum(self.of.get(one, self.expected or 0) for one in range(microbatch))


class PowerIteration(BufferRule):
    """The vectors of a spectral norm of torch, in either form.

    shared: whether other devices run some of the microbatches. form: the hook of `torch.nn.utils.spectral_norm`, or
    None for a parametrization.
    """

    module: Any

    def __init__(self, name: str, module: nn.Module, *, shared: bool, form: SpectralNorm | None = None) -> None:
        super().__init__(name, module)
        self._shared, self._form = shared, form
        self.counts = CallCounts()
        self._bases: dict[int, int] = {}  # microbatch -> what was taken for the calls before it
        self._states: dict[int, Vectors] = {}  # ordinal -> vectors before the call, 0 the step's first
        self._called: dict[int, list[int]] = {}  # seed -> the ordinals of the calls under it
        self._repeats: dict[int, tuple[int, int]] = {}  # seed -> (backward, how many of those were called again)
        self._running: int | None = None  # ordinal of the call that runs

    @property
    def buffers(self) -> list[str]:
        return [*SPECTRAL_VECTORS] if self._form is None else [f"{self._form.name}_{one}" for one in "uv"]

    @property
    def device(self) -> torch.device:
        return self._vectors[0].device

    @property
    def width(self) -> int:
        return sum(one.numel() for one in self._vectors)

    def attach(self) -> list[Any]:
        return [
            self.module.register_forward_pre_hook(self._enter, prepend=True),
            self.module.register_forward_hook(self._leave, always_call=True),
        ]

    def calls(self, microbatch: int) -> int:
        return self.counts.of.get(microbatch, 0)

    def share(self, first: PowerIteration) -> None:
        self.counts = first.counts

    def drop(self) -> None:
        if self._states:
            self._set(self._states[0])
        self._clear()

    def merge(self, other: PowerIteration) -> None:
        for ordinal, vectors in other._states.items():
            self._states.setdefault(ordinal, [one.to(self.device, copy=True) for one in vectors])
        self._bases |= other._bases
        other._clear()

    def terms(self, calls: Sequence[int]) -> list[Term]:
        self._check(calls)
        last = max((number for number, count in enumerate(calls) if count), default=None)
        mine = last is not None and last in self._bases
        return [(1.0, torch.cat([*self._states[sum(calls)]]))] if mine else []

    @classmethod
    def apply(cls, rules: Sequence[Any], sums: Sequence[torch.Tensor], calls: Sequence[Sequence[int]]) -> None:
        for rule, summed, own in zip(rules, sums, calls, strict=True):
            if sum(own):
                parts = summed.split([one.numel() for one in rule._vectors])
                for vector, part in zip(rule._vectors, parts, strict=True):
                    vector.copy_(part)
            rule._clear()

    def _clear(self) -> None:
        for kept in (self.counts.of, self._bases, self._states, self._called, self._repeats):
            kept.clear()

    def _check(self, calls: Sequence[int]) -> None:
        """Raises `RunError`, on all ranks alike, where calls of other microbatches were not those expected."""
        for microbatch in range(len(calls)) if self._shared else self._bases:
            taken = microbatch * (self.counts.expected or 0) if self._shared else self._bases[microbatch]
            if calls[microbatch] and taken != sum(calls[:microbatch]):
                raise RunError(
                    f"the spectral norm of {self.name}",
                    "each call iterates, and not every microbatch calls it equally often: "
                    f"{min(calls)} to {max(calls)} times"
                    if min(calls) != max(calls)
                    else "each call iterates, and several stages call it for one microbatch",
                    "have each microbatch call it equally often and in one stage, or run on one device",
                )

    # ------------------------------------------------------------------------------------------------ a call
    @property
    def _vectors(self) -> Vectors:
        return [getattr(self.module, name) for name in self.buffers]

    def _enter(self, module: Any, given: Any) -> None:
        weight = getattr(module, self._form.name + ORIGINAL) if self._form is not None else given[0]
        if not module.training or weight.ndim == 1 or is_placeholder(weight):
            return
        if not self._bases:
            self._states = {0: [one.clone() for one in self._vectors]}
        self._running = self._ordinal()
        nearest = max(known for known in self._states if known <= self._running)
        self._set(self._states[nearest])
        with torch.no_grad():
            for ordinal in range(nearest, self._running):
                self._iterate(given)
                if ordinal + 1 == self._running:
                    self._states[ordinal + 1] = [one.clone() for one in self._vectors]

    def _iterate(self, given: Any) -> None:
        if self._form is None:
            self.module.forward(*given)
        else:
            self._form.compute_weight(self.module, do_power_iteration=True)

    def _leave(self, *_: Any) -> None:
        """After the call the vectors are those that the step began with."""
        if self._running is None:
            return
        self._states.setdefault(self._running + 1, [one.clone() for one in self._vectors])
        self._set(self._states[0])
        self._running = None

    @torch.no_grad()
    def _set(self, vectors: Vectors) -> None:
        for mine, value in zip(self._vectors, vectors, strict=True):
            mine.copy_(value)

    def _ordinal(self) -> int:
        if backward_number() != -1:
            return self._repeated()
        if self.microbatch is None:  # of a filler, which leaves no trace and may be computed again too
            self._called.setdefault(last_seed(), []).append(0)
            return 0
        number = self.calls(self.microbatch)
        self.counts.of[self.microbatch] = number + 1
        if self.microbatch == LOOK:
            return number
        base = self._bases.setdefault(self.microbatch, self.counts.before(self.microbatch))
        self._called.setdefault(last_seed(), []).append(base + number)
        return base + number

    def _repeated(self) -> int:
        under, backward = last_seed(), backward_number()
        ordinals = self._called.get(under)
        if ordinals is None:
            raise RunError(
                f"computing the spectral norm of {self.name} again in the backward",
                "it is not known which call is repeated: the random state is not that of the forward",
                "leave preserve_rng_state to checkpoint, or checkpointing to the plan (recompute=full)",
            )
        known, done = self._repeats.get(under, (backward, 0))
        done = done if known == backward else 0
        self._repeats[under] = backward, done + 1
        return ordinals[done % len(ordinals)]

    def end(self) -> None:
        """Of a look only how often it called the module is kept."""
        if self.microbatch == LOOK:
            found = self.calls(LOOK)
            self._clear()
            self.counts.expected = found or self.counts.expected
        super().end()


def power_iterations(name: str, module: nn.Module, *, shared: bool) -> list[PowerIteration]:
    if isinstance(module, SpectralNormOfWeight):
        has_vectors = SPECTRAL_VECTORS[0] in tensor_dict(module, "_buffers")  # a weight of one dim has none
        return [PowerIteration(name, module, shared=shared)] if has_vectors else []
    return [PowerIteration(name, module, shared=shared, form=hook) for hook, _ in forward_hooks(module)[0] if _is(hook)]


def _is(hook: Callable[..., Any]) -> bool:
    return isinstance(hook, SpectralNorm)
