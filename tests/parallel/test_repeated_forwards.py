"""A block that is computed a second time has what it was given at first, and draws what it drew."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evenly.data.generators import DrawnNumbers, drawn_past_torch, seeded
from evenly.errors import PlanError
from evenly.model.blocks import find_blocks
from evenly.parallel.core.calls import WrappedForwards
from evenly.parallel.core.recompute import RecomputedBackward, recomputing

Act = Callable[[torch.Tensor], Any]


class Layer(nn.Module):
    """(B, 5) -> (B, 5), times what `draw` gives and what it is given besides."""

    def __init__(self, draw: Act) -> None:
        super().__init__()
        self.draw, self.a, self.b = draw, nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        h = torch.tanh(self.a(x)) * self.draw(x)
        return x + self.b(h * factor(given))


def factor(given: Any) -> Any:
    if isinstance(given, dict | list):
        return given[0]
    return getattr(given, "value", 1 if given is None else given)


class Layers(nn.Module):
    """Calls its blocks by `call`: (block, x) -> its result."""

    def __init__(self, draw: Act, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call, self.blocks = call, nn.ModuleList(Layer(draw) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def gradients(draw: Act, call: Callable[..., torch.Tensor], recompute: str, device: str = "cpu") -> list[torch.Tensor]:
    """Of the weights, in float64; recompute: none, selective or full."""
    torch.manual_seed(3)
    model = Layers(draw, call).double().to(device)
    x = torch.randn(7, 5, dtype=torch.float64).to(device)
    if recompute != "none":
        WrappedForwards(
            find_blocks(model), [recomputing(selective=recompute == "selective", device=device)], asked="recompute"
        )
    with seeded(11, device):
        loss = model(x).square().sum()
    with RecomputedBackward(recompute, nullcontext()):
        loss.backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def positional(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def named(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x=x)


def one(x: torch.Tensor) -> float:
    return 1.0


def after_a_normal_number(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """numpy and Python make normal numbers in pairs, and keep the second."""
    np.random.standard_normal(), random.gauss(0, 1)
    return block(x)


DRAWS: dict[str, tuple[Act, Callable[..., torch.Tensor]]] = {
    "Python's": (lambda x: 1 + random.random(), positional),
    "Python's, in pairs": (lambda x: random.gauss(0, 1), after_a_normal_number),
    "numpy's": (lambda x: torch.from_numpy(np.random.rand(*x.shape)), positional),
    "numpy's, in pairs": (lambda x: torch.from_numpy(np.random.standard_normal(x.shape)), after_a_normal_number),
    "torch's": (lambda x: torch.rand(x.shape, dtype=x.dtype), positional),
    "torch's, called by names": (lambda x: torch.rand(x.shape, dtype=x.dtype), named),
}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("whose", DRAWS)
def test_it_draws_the_same_numbers(whose: str, recompute: str) -> None:
    draw, call = DRAWS[whose]
    plain, found = (gradients(draw, call, how) for how in ("none", recompute))
    assert len(plain) == 12
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_all_generators_go_on_where_they_were() -> None:
    def drawn_after(recompute: str) -> tuple[float, float, float]:
        gradients(lambda x: random.random() + np.random.rand() + torch.rand(()), positional, recompute)
        return random.random(), np.random.rand(), float(torch.rand(()))

    assert drawn_after("full") == drawn_after("none")


@dataclass
class Value:
    """What a block is given."""

    value: Any


def set_item(nest: Any) -> None:
    nest[0] = nest[0] + 1


def set_attribute(nest: Value) -> None:
    nest.value = nest.value + 1


CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], None]]] = {
    "list": (lambda x: [x], set_item),
    "dict": (lambda x: {0: x}, set_item),
    "defaultdict": (lambda x: defaultdict(list, {0: x}), set_item),
    "dataclass": (Value, set_attribute),
}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_containers_may_change_after_the_block(kind: str, by_name: bool) -> None:
    make, change = CHANGES[kind]

    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nest = make(x.detach())
        result = block(x, given=nest) if by_name else block(x, nest)
        change(nest)
        return result

    torch.testing.assert_close(gradients(one, call, "full"), gradients(one, call, "none"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make", [torch.Tensor.clone, *(make for make, _ in CHANGES.values())])
def test_a_tensor_that_changes_in_place_after_the_block_is_refused(make: Any, by_name: bool) -> None:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nest = make(x.detach().clone())
        result = block(x, given=nest) if by_name else block(x, nest)
        factor(nest).add_(1)
        return result

    with pytest.raises(PlanError, match="a tensor that a block is given is changed in place"):
        gradients(one, call, "full")


@dataclass
class Once:
    """Cannot be made again of its fields alone."""

    value: Any
    start: InitVar[float]

    def __post_init__(self, start: float) -> None:
        self.value = self.value + start


def test_what_cannot_be_made_again_is_given_again() -> None:
    def call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x, Once(x.detach(), 1.0))

    torch.testing.assert_close(gradients(one, call, "full"), gradients(one, call, "none"), rtol=1e-12, atol=1e-12)


def test_it_is_still_known_whether_a_microbatch_has_drawn() -> None:
    with seeded(3):
        numbers = DrawnNumbers("cpu")
        random.random()
        numbers.end()
        with seeded(4):
            with numbers.again():
                random.random()
            assert not drawn_past_torch()
            random.random()
            assert drawn_past_torch()


def test_a_block_changes_the_containers_of_its_caller() -> None:
    seen: list[Any] = []

    class Appends(Layer):
        def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
            given.append(x.detach())
            return super().forward(x)

    model = Appends(one).double()
    WrappedForwards(
        find_blocks(nn.ModuleList([model, Appends(one).double()])), [recomputing(selective=False)], asked=""
    )
    model(torch.ones(2, 5, dtype=torch.float64), seen).sum().backward()
    assert len(seen) == 1  # the second forward changes a list of its own
