"""Where a number that is not finite comes from: the step runs once more, and every operation is watched.

A number is *bad* if it is NaN or infinite. An operation *makes* bad numbers of good ones; those that it is given, it
passes on. Infinities may be meant (a mask, whose -inf a softmax ends), so what counts is what ends as the loss or a
gradient: every bad tensor carries its *origin*, the operation that made the first bad number that led to it.

The backward of an operation belongs to the module whose forward has called the operation: autograd numbers its nodes,
and the forward notes who runs under which number. What a rank receives from another has no origin there; all ranks
put together what they have found, and the first origin in the order of one device is the cause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenly.data.loader import Microbatch
from evenly.data.nest import tensors_by_path, tensors_in
from evenly.errors import is_users
from evenly.parallel.core.memory import of_subclasses
from evenly.torch_private import (
    TorchDispatchMode,
    autograd_node,
    has_memory,
    is_fake,
    memory_key,
    next_node_number,
    without_subclasses,
)

CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
UNFILLED = ("empty", "new_empty", "resize", "set_")  # beginnings of operations whose results are not numbers yet
RECEIVING = ("c10d", "_c10d_functional")

# How sure it is that a finding is the cause: the smallest of all ranks is.
PARAMETER, LED_TO, MADE_NAN, MADE_INFINITY, RECEIVED = range(5)


@dataclass(frozen=True)
class Site:
    """What runs: the innermost module, the user's line, and the microbatch (None outside of any)."""

    module: str | None
    place: str
    microbatch: int | None


@dataclass(frozen=True)
class Origin:
    """An origin, or what was bad before the step began.

    sureness:  see `PARAMETER` and the others.
    operation: what made it; '' for what was not made here.
    result:    'nan' or 'inf'. backward: whether it was made there. samples: positions in the microbatch, where known.
    """

    sureness: int
    site: Site
    operation: str = ""
    result: str = "nan"
    backward: bool = False
    samples: tuple[int, ...] = ()
    then: str = ""

    @property
    def order(self) -> tuple[int, int, bool]:
        microbatch = self.site.microbatch
        return self.sureness, -1 if microbatch is None else microbatch, self.backward


class NonFiniteWatch(TorchDispatchMode):
    """A context manager for a step of `models`; `origins` then says where bad numbers came from on this rank."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        models = list(models)
        self._names = {id(module): name or "the model" for one in models for name, module in one.named_modules()}
        self._site = Site(None, "", None)
        self._sites: dict[int, tuple[Site, str]] = {}  # by number of the node: who has called the operation, and it
        self._origins: dict[int, Origin] = {}  # by memory
        self._first: dict[tuple[int, int | None], Origin] = {}  # by sureness and microbatch
        for model in models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                with without_subclasses():
                    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
                    if (bad := _bad(local)) is not None:
                        sureness = PARAMETER if tensor.requires_grad else LED_TO
                        found = Origin(sureness, self._site, f"{_kind(tensor)} {name}", bad)
                        self._origins[memory_key(local)] = found
                        if sureness == PARAMETER:
                            self._note(found)

    # -------------------------------------------------------------------------------- called by the executor
    def begin(self, microbatch: Microbatch) -> None:
        """Before the forward of a microbatch."""
        self._site = Site(None, "", microbatch.number)
        for path, tensor in tensors_by_path(microbatch.batch):
            if (bad := _bad(tensor)) is not None:
                rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)
                fits = tensor.dim() > 0 and len(tensor) == microbatch.samples
                samples = (~rows.isfinite().all(1)).nonzero().flatten().tolist() if fits else ()
                where = f"the batch{f' ({path})' if path else ''}"
                self._origins[memory_key(tensor)] = Origin(LED_TO, self._site, where, bad, samples=tuple(samples))

    def end(self, total: torch.Tensor) -> None:
        """After it, with its loss."""
        with without_subclasses():
            if (bad := _bad(total.detach())) is not None:
                unknown = Origin(RECEIVED, self._site, result=bad)
                self._note(_led(self._origins.get(memory_key(total), unknown)))

    @property
    def origins(self) -> list[Origin]:
        return [*self._first.values()]

    # ---------------------------------------------------------------------------------------- operations
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (other := of_subclasses(func, types, args, kwargs)) is not None:
            return other
        with without_subclasses():
            given = [memory_key(one) for one in tensors_in((args, kwargs or {})) if _bad(one) is not None]
            node = autograd_node()
            recorded = node is None or torch.is_grad_enabled()  # a recomputation in the backward is a forward
            site = self._called(func) if recorded else None
            results = func(*args, **(kwargs or {}))
            for result in tensors_in(results):
                self._look(func, given, result, site, node)
            return results

    def _called(self, func: Any) -> Site:
        """Notes who calls an operation of the forward."""
        site = self._where()
        self._sites.setdefault(next_node_number() - 1, (site, _name(func)))
        return site

    def _look(self, func: Any, given: Sequence[int], result: torch.Tensor, site: Site | None, node: Any) -> None:
        bad = None if _name(func).startswith(UNFILLED) or func.namespace in RECEIVING else _bad(result)
        if bad is None:
            if has_memory(result):
                self._origins.pop(memory_key(result), None)
            return
        known = [origin for key in given if (origin := self._origins.get(key)) is not None]
        operation = _name(func)
        if site is None:
            site, operation = self._sites.get(node[1], (self._site, node[0]))
        backward = node is not None
        if known:
            origin = known[0]
            if bad == "nan" and origin.result == "inf" and not origin.then:
                origin = replace(origin, then=_words(site, operation, backward=backward))
        else:
            sureness = RECEIVED if given else MADE_NAN if bad == "nan" else MADE_INFINITY
            origin = Origin(sureness, site, operation, bad, backward)
            if not given:
                self._note(origin)
        self._origins[memory_key(result)] = origin
        if backward and not torch.is_grad_enabled():  # what a backward computes is a gradient
            self._note(_led(origin))

    def _note(self, found: Origin) -> None:
        self._first.setdefault((found.sureness, found.site.microbatch), found)

    def _where(self) -> Site:
        module, place, frame = None, "", sys._getframe(3)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and not (module and place):
            code = frame.f_code
            if not place and is_users(code.co_filename):
                place = f" ({Path(code.co_filename).name}:{frame.f_lineno})"
            if not module and code.co_varnames[:1] == ("self",):
                module = self._names.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return Site(module, place, self._site.microbatch)


def describe_origin(found: Origin, samples: Sequence[int], rank: int) -> str:
    """In one sentence; samples: indices of those of its microbatch."""
    if found.sureness == PARAMETER:
        return f"{found.operation} is {found.result} before the step, first on rank {rank}: an update has made it so"
    read = tuple(samples[one] for one in found.samples) or samples
    whose = f"microbatch {found.site.microbatch} (samples {', '.join(map(str, read))}) on rank {rank}"
    if found.sureness == RECEIVED:
        return f"{found.result} in {whose}, among numbers that no operation watched has made"
    if found.operation.startswith(("the batch", "parameter ", "buffer ")):
        return f"{found.operation} has {found.result}, in {whose}" + (f"; then {found.then}" if found.then else "")
    made = _words(found.site, found.operation, backward=found.backward)
    then = f", of which nan came in {found.then}" if found.then else ""
    return f"{made} made {found.result} of finite numbers{then}, in {whose}"


def _led(origin: Origin) -> Origin:
    return replace(origin, sureness=LED_TO) if origin.sureness in (MADE_NAN, MADE_INFINITY) else origin


def _words(site: Site, operation: str, *, backward: bool) -> str:
    where = site.module or "the loss"
    return f"{operation} in the {'backward' if backward else 'forward'} of {where}{site.place}"


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _kind(tensor: torch.Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _bad(tensor: torch.Tensor) -> str | None:
    """'nan' or 'inf' where a tensor has such a number; None also for those that have no floating numbers here."""
    if tensor.is_meta or is_fake(type(tensor)) or tensor.dtype not in CHECKED or not has_memory(tensor):
        return None
    if tensor.layout is not torch.strided or bool(tensor.isfinite().all()):
        return None
    return "nan" if bool(tensor.isnan().any()) else "inf"


def cause_of(ranks: Sequence[Sequence[Origin]], failing: Sequence[int]) -> tuple[int, Origin] | None:
    """(rank, finding): the first in the order of one device; None where no rank has found any.

    failing: the microbatches whose loss is bad, where any is: another's infinities may be meant.
    """

    def counts(found: Origin) -> bool:
        return found.sureness <= LED_TO or not failing or found.site.microbatch in failing

    every = [(rank, found) for rank, one in enumerate(ranks) for found in one if counts(found)]
    return min(every, key=lambda pair: pair[1].order, default=None)
