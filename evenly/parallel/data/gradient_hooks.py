"""What autograd calls with the gradient of a parameter, each time that it has added to it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evenly.errors import RunError
from evenly.torch_private import without_subclasses


class GradientHook:
    """A hook of `parameter`, which can be paused while the gradient is small and autograd adds it up by itself."""

    def __init__(self, parameter: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
        self._handle, self._call = parameter.register_post_accumulate_grad_hook(call), call
        hooks = self._handle.hooks_dict_ref()
        assert hooks is not None  # the parameter keeps them alive
        self._hooks = hooks

    def pause(self) -> None:
        """Autograd no longer calls it."""
        self._hooks.pop(self._handle.id, None)

    def resume(self) -> None:
        """Autograd calls it again."""
        self._hooks[self._handle.id] = self._call

    def remove(self) -> None:
        self._handle.remove()


def check_gradient(name: str, gradient: torch.Tensor, *, sent: bool) -> None:
    """Raises `RunError` for a gradient that cannot be accumulated; sent: whether its bucket is already sent."""
    if gradient.layout is not torch.strided:
        raise RunError(f"gradient of {name}", f"its layout is {gradient.layout}", "use dense gradients")
    if sent:
        raise RunError(
            f"gradient of {name}",
            "it arrived a second time within one backward",
            "checkpoint with use_reentrant=False, and leave calling backward to evenly",
        )


def check_dtype(name: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    """Raises `RunError` where a gradient is of another type than the parameter had before the forward."""
    if dtype is not expected:
        raise RunError(
            f"gradient of {name}",
            f"it is of {dtype}, and the parameter was of {expected}: the forward has changed its type",
            "let the model cast what it computes, not its parameters; or train in the type that it casts them to",
        )


def taken(parameter: torch.Tensor) -> torch.Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None  # autograd calls hooks with it in place
    return gradient


def taken_of_part(parameter: torch.Tensor) -> torch.Tensor:
    with without_subclasses():
        return taken(parameter)
