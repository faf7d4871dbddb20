"""What a module's code finds under the names of its parameters and buffers, where that is not what the engine finds.

*Local* is what this rank has of the model: the engine, the optimizer and checkpoints find it. A *view* has the module's
code find something else while the job computes. What is *hidden* is not on this rank; a placeholder has its name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, ItemsView, Iterable, Iterator, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import nn

from evenly.errors import PlanError
from evenly.torch_private import TensorDict, is_fake, set_tensor_dict, tensor_dict

View = Callable[[str, torch.Tensor | None], Any]

_KINDS: tuple[TensorDict, ...] = get_args(TensorDict)  # asked for often


class ViewedParameters(dict[str, Any]):
    """The parameters, or the buffers, of a module.

    A view is given a name and the local tensor (a placeholder, if it is hidden), and returns what the module's code
    finds, or None to leave that to the next view.

    """

    def __init__(self, local: Mapping[str, torch.Tensor | None]) -> None:
        super().__init__(local)
        self._hidden: set[str] = set()
        self._views: list[View] = []
        self.kept_as: Callable[[Any], Any] = lambda value: value  # of what is set, what is kept
        self.strict = False  # whether what stands in for a parameter may take the place of that alone

    def add_view(self, view: View, *, first: bool = False) -> None:
        """From now on `view` is asked, last of all or before all others."""
        self._views.insert(0 if first else len(self._views), view)
        self.asked = True

    @property
    def viewers(self) -> int:
        return len(self._views)

    def hide(self, name: str, placeholder: torch.Tensor) -> None:
        """Lets go of the local tensor."""
        super().__setitem__(name, placeholder)
        self._hidden.add(name)

    def is_hidden(self, name: str) -> bool:
        """Whether this rank has a placeholder of it alone."""
        return name in self._hidden

    def placeholder(self, name: str) -> torch.Tensor | None:
        """What has the place of a hidden tensor; None where it is not hidden."""
        return super().get(name) if name in self._hidden else None

    def local(self, name: str) -> torch.Tensor | None:
        """What the engine finds under `name`; None where it is hidden."""
        return None if name in self._hidden else super().get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets the local tensor; what stands in for a tensor leaves it as it is."""
        if name not in self or not is_placeholder(value):
            super().__setitem__(name, self.kept_as(value))
            self.asked = True
        elif self.strict and not isinstance(value, nn.Parameter) and value is not self[name]:
            raise PlanError(  # as `torch.func.functional_call` does; a new parameter has the type of it alone
                f"a call of the model with another tensor in place of parameter {name} under pipeline",
                "a stage computes with the parameters that it has",
                "use plan zero2 or ddp",
            )

    @property
    def asked(self) -> bool:
        """Whether views are, where code looks a name up; not while they are known to leave it to the local tensor."""
        return self.__class__ is ViewedParameters

    @asked.setter
    def asked(self, asked: bool) -> None:
        self.__class__ = ViewedParameters if asked else _Unasked  # pyright: ignore[reportAttributeAccessIssue]

    def __getitem__(self, name: str) -> Any:
        local = dict.__getitem__(self, name)
        for view in self._views:
            if (viewed := view(name, local)) is not None:
                return viewed
        return local

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> ItemsView[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(self._visible()).items()

    def values(self) -> ValuesView[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dict(self._visible()).values()

    def _visible(self) -> Iterator[tuple[str, Any]]:
        """What views return, and all other local tensors; in the order of definition."""
        for name, local in super().items():
            viewed = self._viewed(name, local)
            if viewed is not None or name not in self._hidden:
                yield name, local if viewed is None else viewed

    def _viewed(self, name: str, local: torch.Tensor | None) -> Any:
        for view in self._views:
            if (viewed := view(name, local)) is not None:
                return viewed
        return None


class _Unasked(ViewedParameters):
    """What `ViewedParameters` are while their views are not asked: code looks names up as fast as in a dict."""

    __getitem__ = dict.__getitem__  # pyright: ignore[reportAssignmentType]


def is_placeholder(value: Any) -> bool:
    return is_fake(type(value)) or not getattr(value, "arrived", True)


def viewed_tensors(module: nn.Module, kind: TensorDict, *, strict: bool = False) -> ViewedParameters:
    """The parameters, or the buffers, of `module`, from now on as its code shall find them."""
    local = tensor_dict(module, kind)
    if not isinstance(local, ViewedParameters):
        local = ViewedParameters(local)
        set_tensor_dict(module, kind, local)
    local.strict |= strict and kind == "_parameters"
    return local


def dicts_in(module: nn.Module) -> set[int]:
    return {id(tensor_dict(one, kind)) for one in module.modules() for kind in _KINDS}


def leave_unasked(dicts: Iterable[ViewedParameters]) -> None:
    """From here on code finds what `dicts` have as it is, where their one view is known to leave that to the tensor."""
    for views in dicts:
        if views.viewers < 2:
            views.__class__ = _Unasked


def ask_again(dicts: Iterable[ViewedParameters]) -> None:
    """Undoes `leave_unasked`."""
    for views in dicts:
        views.__class__ = ViewedParameters


@contextmanager
def plain_dicts(modules: Iterable[nn.Module]) -> Generator[None]:
    """Within, `modules` have plain dicts of what their code finds: compiled code reads dicts past their methods.

    What the code sets meanwhile is set afterwards.
    """
    found: list[tuple[nn.Module, TensorDict, ViewedParameters, dict[str, Any]]] = []
    for module in modules:
        for kind in get_args(TensorDict):
            views = tensor_dict(module, kind)
            if isinstance(views, ViewedParameters):
                found.append((module, kind, views, dict(views.items())))
    for module, kind, _, seen in found:
        set_tensor_dict(module, kind, {**seen})
    try:
        yield
    finally:
        for module, kind, views, seen in found:
            now = tensor_dict(module, kind)
            set_tensor_dict(module, kind, views)
            for name in [name for name, value in now.items() if value is not seen.get(name, seen)]:
                views[name] = now[name]


def local_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer `name` of `module` as the engine finds it, even while the job computes."""
    for kind in _KINDS:
        tensors = tensor_dict(module, kind)
        if name in tensors:
            return tensors.local(name) if isinstance(tensors, ViewedParameters) else tensors[name]
    return None


def local_parameters(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of `modules`, which have names, by name as the engine finds them, even while the job computes."""
    for name, one in modules:
        tensors = tensor_dict(one, "_parameters")
        for own in tensors:
            parameter: Any = tensors.local(own) if isinstance(tensors, ViewedParameters) else tensors[own]
            if parameter is not None:
                yield f"{name}.{own}" if name else own, parameter
