"""What a module's code finds under the names of its parameters and buffers, where that is not what the engine holds.

Held is what the engine, the optimizer and checkpoints find: what this rank has of the model. *Views* show the module's
code something else while the job computes. What is *hidden* is not held on this rank at all.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import nn

from evenly.torch_private import TensorDict, set_tensor_dict, tensor_dict

View = Callable[[str, torch.Tensor | None], Any]


class ViewedParameters(dict[str, Any]):
    """The parameters, or the buffers, of a module.

    A view is given a name and what is held under it (a placeholder, if it is hidden), and returns what is shown, or
    None to leave that to the next.
    """

    def __init__(self, held: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__(held)
        self._order = [*held]
        self._hidden: dict[str, torch.Tensor] = {}
        self._views: list[View] = []

    def add_view(self, view: View, *, first: bool = False) -> None:
        """From now on `view` is asked, last of all or before all others."""
        self._views.insert(0 if first else len(self._views), view)

    def hide(self, name: str, placeholder: torch.Tensor) -> None:
        """Lets go of what is held under `name`."""
        del self[name]
        self._hidden[name] = placeholder

    def local(self, name: str) -> torch.Tensor | None:
        """What the engine finds under `name`; None where it is hidden."""
        return super().get(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._hidden

    def __getitem__(self, name: str) -> Any:
        held = self._hidden[name] if name in self._hidden else super().__getitem__(name)
        shown = self._viewed(name, held)
        return held if shown is None else shown

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> ItemsView[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(self._visible()).items()

    def values(self) -> ValuesView[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(self._visible()).values()

    def _visible(self) -> Iterator[tuple[str, Any]]:
        """What is held, and of what is hidden that which a view shows; in the order of definition."""
        for name in dict.fromkeys([*self._order, *self]):
            if name in self._hidden:
                if (shown := self._viewed(name, self._hidden[name])) is not None:
                    yield name, shown
            elif super().__contains__(name):
                yield name, self[name]

    def _viewed(self, name: str, held: torch.Tensor | None) -> Any:
        return next((shown for view in self._views if (shown := view(name, held)) is not None), None)


def viewed_tensors(module: nn.Module, kind: TensorDict) -> ViewedParameters:
    """The parameters, or the buffers, of `module`, from now on as its code shall see them."""
    local = tensor_dict(module, kind)
    if not isinstance(local, ViewedParameters):
        local = ViewedParameters(local)
        set_tensor_dict(module, kind, local)
    return local


def local_parameters(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of `modules`, which have names, by name as the engine finds them, even while the job computes."""
    for name, one in modules:
        for own, parameter in dict.items(tensor_dict(one, "_parameters")):
            if parameter is not None:
                yield f"{name}.{own}" if name else own, parameter
