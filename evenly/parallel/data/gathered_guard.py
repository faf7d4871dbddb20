"""Refusing a forward that changes parameters which were gathered for it: they are freed, and the change is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evenly.data.nest import tensors_in
from evenly.errors import RunError
from evenly.parallel.core.mutation_guard import changed_error, fingerprint
from evenly.parallel.core.parameter_views import local_parameters
from evenly.torch_private import version


class GatheredGuard:
    """Compares gathered parameters before and after the forward of their unit.

    stepped: whether a step was done: numbers that are written past autograd are looked for before that alone.

    A parameter that is written with its own numbers, as where a forward registers a parametrization and removes it, has
    not changed; it is looked at in every forward.
    """

    def __init__(self) -> None:
        self.stepped = False
        self._rewritten: set[str] = set()
        self._before: dict[str, tuple[int, int | None, torch.dtype]] = {}

    def note(self, name: str, parameter: torch.Tensor) -> None:
        """Remembers a gathered parameter before the forward."""
        looked_at = name in self._rewritten or not (self.stepped or parameter.requires_grad)
        self._before[name] = version(parameter), fingerprint(parameter) if looked_at else None, parameter.dtype

    def after_unit(self, modules: Sequence[tuple[str, nn.Module]]) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook for a unit of these modules, which raises where a parameter of theirs has changed."""

        def compare(_: nn.Module, __: Any, output: Any) -> None:
            for result in tensors_in(output):
                if result.requires_grad:
                    result.register_hook(_refuse_graph)
            for name, parameter in local_parameters(modules):
                before = self._before.pop(name, None)
                if before is None or isinstance(parameter, DTensor):
                    continue
                count, printed, dtype = before
                written = version(parameter) != count
                same = not written if printed is None else printed == fingerprint(parameter)
                if parameter.dtype != dtype or not same:
                    raise changed_error(name, parameter=True)
                if written:
                    self._rewritten.add(name)

        return compare


def _refuse_graph(_: torch.Tensor) -> None:
    """Raises `RunError` in a backward that keeps a graph: its own backward would find parameters that are gone."""
    if torch.is_grad_enabled():
        raise RunError(
            "a gradient of a gradient (create_graph=True) under zero=3",
            "parameters are gathered for one backward and then freed",
            "use plan zero2 or ddp",
        )
