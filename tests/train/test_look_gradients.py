"""Whether backwards run code of the job's own, as the look before the first step finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenly.train.look_gradients import BackwardLook


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return 2 * gradient


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(torch.tanh(self.first(x))))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x


def plain() -> Chain:
    return Chain()


def with_hook_of_parameter() -> Chain:
    model = Chain()
    model.first.bias.register_hook(torch.clone)
    return model


def with_hook_of_module() -> Chain:
    model = Chain()
    model.second.register_full_backward_hook(lambda *_: None)
    return model


def with_middle(middle: Callable[[torch.Tensor], torch.Tensor]) -> Chain:
    model = Chain()
    model.middle = middle  # pyright: ignore
    return model


def hook(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda g: 2 * g)
    return x


def repeated(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.sin, x, use_reentrant=False)  # pyright: ignore


def repeated_by_reentry(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.sin, x, use_reentrant=True)  # pyright: ignore


def look_at(model: nn.Module) -> BackwardLook:
    look = BackwardLook()
    with look.watching():
        look.see([model(torch.ones(2, 3)).sum()])
    return look


@pytest.mark.parametrize(
    "model",
    [with_hook_of_parameter, with_hook_of_module, lambda: with_middle(Doubled.apply), lambda: with_middle(hook)],
    ids=["parameter", "module", "function", "tensor"],
)
def test_code_of_the_jobs_own_is_found(model: Callable[[], nn.Module]) -> None:
    assert look_at(model()).finds_code


@pytest.mark.parametrize("model", [plain, lambda: with_middle(repeated)], ids=["plain", "checkpoint"])
def test_torchs_own_is_none(model: Callable[[], nn.Module]) -> None:
    look = look_at(model())
    assert not look.finds_code and not look.is_reentrant


def test_reentrant_checkpoints_are_known() -> None:
    assert look_at(with_middle(repeated_by_reentry)).is_reentrant


def test_tensors_have_their_own_method_again() -> None:
    before = torch.Tensor.register_hook
    look_at(with_middle(hook))
    assert torch.Tensor.register_hook is before
