"""What `fully_shard` would go wrong on without a word.

Parameters that are gathered for a forward are freed, and what it changed of them would be lost: it is refused. The
backward of a unit whose results are in an object, or views that were changed in place, would begin unseen.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evenly.data.nest import hidden_in, tensors_by_path
from evenly.errors import ContractError, PlanError
from evenly.parallel.core.mutation_guard import changed_error, fingerprint
from evenly.parallel.core.parameter_views import local_parameters
from evenly.torch_private import begin_sharded_backward, next_node_number, nodes_of, version


class GatheredGuard:
    """Compares gathered parameters before and after the forward of their unit, and gathers for the backward.

    stepped: whether a step was done: numbers that are written past autograd are looked for before that alone.

    A parameter that is written with its own numbers, as where a forward registers a parametrization and removes it, has
    not changed; it is looked at in every forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stepped = False
        self._rewritten: set[str] = set()
        self._known = {id(p) for p in model.parameters()}  # whatever stands for a parameter, sharded or gathered
        self._before: dict[str, tuple[int, int | None, torch.dtype]] = {}
        self._first_nodes: dict[nn.Module, int] = {}  # of units, in the graph of their last forward
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

    def watch(
        self, unit: nn.Module, modules: Sequence[tuple[str, nn.Module]], gathered: Callable[..., None]
    ) -> list[Any]:
        """Handles of what runs around the forwards of a unit of these modules; gathered: once its parameters are."""
        return [
            unit.register_forward_pre_hook(self._before_unit(modules), prepend=True),
            unit.register_forward_pre_hook(self.begin),
            unit.register_forward_pre_hook(gathered),
            unit.register_forward_hook(self.after_unit(modules), prepend=True),
        ]

    def _before_unit(self, modules: Sequence[tuple[str, nn.Module]]) -> Callable[..., None]:
        """A forward pre-hook for a unit of these modules, before it is gathered: what is there are its parameters.

        `torch.func.functional_call` puts other tensors in their place, which gathering would replace without a word.
        """

        def compare(*_: Any) -> None:
            found: Iterator[tuple[str, Any]] = local_parameters(modules)
            for name, parameter in found:
                if id(parameter) in self._known:
                    continue
                if not (isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor)):
                    raise PlanError(
                        f"a call of the model with another tensor in place of parameter {name} under zero=3",
                        "parameters are gathered when a block is called, and would take its place",
                        "use plan zero2 or ddp",
                    )
                self._known.add(id(parameter))

        return compare

    def begin(self, unit: nn.Module, _: Any = None) -> None:
        self._first_nodes[unit] = next_node_number()

    def note(self, name: str, parameter: torch.Tensor) -> None:
        """Remembers a gathered parameter before the forward."""
        self._known.add(id(parameter))
        looked_at = name in self._rewritten or not (self.stepped or parameter.requires_grad)
        self._before[name] = version(parameter), fingerprint(parameter) if looked_at else None, parameter.dtype

    def after_unit(self, modules: Sequence[tuple[str, nn.Module]]) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook for a unit of these modules, which raises where a parameter of theirs has changed."""

        def compare(unit: nn.Module, __: Any, output: Any) -> None:
            self._watch_backward(unit, output)
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

    def _watch_backward(self, unit: nn.Module, output: Any) -> None:
        """Gathers for the backward of `unit` before it comes to what computed its results.

        `fully_shard` does so by hooks on the results themselves. Where one is a view and is changed in place, autograd
        leaves the view's node and its hooks out of the graph, but not the node of its base; and attributes of objects
        are not looked into.
        """

        def begin(_: object) -> None:
            _refuse_graph()
            begin_sharded_backward(unit)

        hidden = [*hidden_in(output)]
        if any(not isinstance(one, torch.Tensor) for one in hidden):
            raise PlanError(
                f"what {type(unit).__bases__[-1].__name__} returns under zero=3",
                "it is, or has in it, an iterator, whose tensors may not be there yet",
                "return a tuple or a list, or use plan zero2 or ddp",
            )
        for result in (*(tensor for _, tensor in tensors_by_path(output)), *hidden):
            for node in nodes_of(result, self._first_nodes[unit]):
                node.register_prehook(begin)


def _refuse_graph() -> None:
    """Raises `ContractError` in a backward that keeps a graph: its own backward would find no parameters."""
    if torch.is_grad_enabled():
        raise ContractError(
            "a gradient of a gradient (create_graph=True) under zero=3",
            "parameters are gathered for one backward and then freed",
            "use plan zero2 or ddp",
        )
