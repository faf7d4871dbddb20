"""A forward that changes the model is refused where ranks share a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from evenly.errors import RunError
from evenly.parallel.core.mutation_guard import MutationGuard
from evenly.parallel.data.gathered_guard import GatheredGuard


class Changes(nn.Module):
    def __init__(self, change: Callable[[Changes], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) + self.mean + self.frozen
        self.change(self)
        return y


def in_place(model: Changes) -> None:
    model.mean += 1


def replaced(model: Changes) -> None:
    model.mean = model.mean + 1


def past_autograd(model: Changes) -> None:
    model.mean.data.add_(1)


def frozen(model: Changes) -> None:
    with torch.no_grad():
        model.frozen.mul_(0.9)


def frozen_past_autograd(model: Changes) -> None:
    model.frozen.data = model.frozen.data * 0.9


def trained(model: Changes) -> None:
    with torch.no_grad():
        model.inner.weight.clamp_(max=0.1)


def cast(model: Changes) -> None:
    model.inner.double()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (cast, "parameter inner.weight"),
        (in_place, "buffer mean"),
        (replaced, "buffer mean"),
        (past_autograd, "buffer mean"),
        (frozen, "parameter frozen"),
        (frozen_past_autograd, "parameter frozen"),
        (trained, "parameter inner.weight"),
    ],
)
def test_what_changes_is_named(change: Callable[[Changes], object], name: str) -> None:
    model = Changes(change)
    unchanged = MutationGuard(model)
    with pytest.raises(RunError, match=rf"^{name} changes in the forward pass"), unchanged.watching():
        model(torch.randn(2, 3))


def test_what_may_change() -> None:
    def fill(model: Changes) -> None:
        model.cache = torch.ones(5)

    model = Changes(fill)
    with MutationGuard(model).watching():
        model(torch.randn(2, 3))
    assert model.cache.shape == (5,)
    counting = Changes(in_place)
    with MutationGuard(counting, but={id(counting.mean)}).watching():
        counting(torch.randn(2, 3))
    assert counting.mean.eq(1).all()


def test_where_a_rank_holds_parts_only_buffers_are_watched() -> None:
    model = Changes(trained)
    with MutationGuard(model, parameters=False).watching():
        model(torch.randn(2, 3))
    model = Changes(replaced)
    with pytest.raises(RunError), MutationGuard(model, parameters=False).watching():
        model(torch.randn(2, 3))


def test_another_failure_is_raised_as_it_is() -> None:
    def fail(_: Changes) -> None:
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model"), MutationGuard(model := Changes(fail)).watching():
        model(torch.randn(2, 3))


def test_a_gathered_parameter_that_is_written_with_its_own_numbers_has_not_changed() -> None:
    """As where a forward registers a parametrization of a frozen weight, and removes it."""
    part, guard = nn.Linear(2, 2).requires_grad_(False), GatheredGuard(nn.Module())
    compare = guard.after_unit([("part", part)])

    def forward(change: Callable[[torch.Tensor], object]) -> None:
        guard.begin(part)
        guard.note("part.weight", part.weight)
        change(part.weight)
        compare(part, (), torch.ones(1))

    for guard.stepped in (False, True):
        forward(lambda weight: weight.set_(weight))  # pyright: ignore
        with pytest.raises(RunError, match=r"^parameter part.weight changes in the forward pass"):
            forward(lambda weight: weight.mul_(2))
    with pytest.raises(RunError, match=r"^parameter part.bias changes in the forward pass"):
        guard.note("part.bias", part.bias)
        part.bias.set_(part.bias)  # pyright: ignore
        compare(part, (), torch.ones(1))
