"""What `fully_shard` would go wrong on without a word.

Parameters that are gathered for a forward are freed, and what it changed of them would be lost: it is refused. The
backward of a unit whose results are views that were changed in place would begin without being seen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evenly.data.nest import tensors_by_path
from evenly.errors import RunError
from evenly.parallel.core.mutation_guard import changed_error, fingerprint
from evenly.parallel.core.parameter_views import local_parameters
from evenly.torch_private import begin_sharded_backward, next_node_number, node_of_base, version


class GatheredGuard:
    """Compares gathered parameters before and after the forward of their unit, and gathers for backwards behind views.

    stepped: whether a step was done: numbers that are written past autograd are looked for before that alone.

    A parameter that is written with its own numbers, as where a forward registers a parametrization and removes it, has
    not changed; it is looked at in every forward.
    """

    def __init__(self) -> None:
        self.stepped = False
        self._rewritten: set[str] = set()
        self._before: dict[str, tuple[int, int | None, torch.dtype]] = {}
        self._first_nodes: dict[nn.Module, int] = {}  # of units, in the graph of their last forward
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

    def begin(self, unit: nn.Module, _: Any = None) -> None:
        """A forward pre-hook: notes that a forward of `unit` begins."""
        self._first_nodes[unit] = next_node_number()

    def note(self, name: str, parameter: torch.Tensor) -> None:
        """Remembers a gathered parameter before the forward."""
        looked_at = name in self._rewritten or not (self.stepped or parameter.requires_grad)
        self._before[name] = version(parameter), fingerprint(parameter) if looked_at else None, parameter.dtype

    def after_unit(self, modules: Sequence[tuple[str, nn.Module]]) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook for a unit of these modules, which raises where a parameter of theirs has changed."""

        def compare(unit: nn.Module, __: Any, output: Any) -> None:
            for _, result in tensors_by_path(output):
                if result.requires_grad:
                    result.register_hook(_refuse_graph)
                    self._begin_backward_of_view(unit, result)
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

    def _begin_backward_of_view(self, unit: nn.Module, result: torch.Tensor) -> None:
        """Gathers for the backward where a result that is a view has been changed in place.

        autograd leaves its node out of the graph then, and with it the hook that would gather; that of its base stays.
        """

        def begin(gradients: tuple[torch.Tensor, ...]) -> None:
            _refuse_graph(*gradients)
            begin_sharded_backward(unit)

        node = node_of_base(result, self._first_nodes[unit])
        if node is not None:
            node.register_prehook(begin)


def _refuse_graph(*_: torch.Tensor) -> None:
    """Raises `RunError` in a backward that keeps a graph: its own backward would find parameters that are gone."""
    if torch.is_grad_enabled():
        raise RunError(
            "a gradient of a gradient (create_graph=True) under zero=3",
            "parameters are gathered for one backward and then freed",
            "use plan zero2 or ddp",
        )
