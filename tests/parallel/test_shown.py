"""What a module's code sees of its parameters, and what the engine holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from evenly.parallel.core.parameter_views import ViewedParameters, local_parameters, plain_dicts, viewed_tensors


def module() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(3)


def hidden(*names: str) -> tuple[nn.BatchNorm1d, ViewedParameters]:
    made = module()
    shown = viewed_tensors(made, "_parameters")
    for name in names:
        held = shown.local(name)
        assert held is not None
        shown.hide(name, torch.empty_like(held, device="meta"))
    return made, shown


def names(made: nn.Module) -> list[str]:
    return [name for name, _ in made.named_parameters()]


def test_without_views_nothing_changes() -> None:
    made, plain = module(), module()
    parameter = made.weight
    assert viewed_tensors(made, "_parameters") is viewed_tensors(made, "_parameters")
    assert made.weight is parameter and made._parameters["weight"] is parameter
    assert names(made) == names(plain) == ["weight", "bias"]
    assert [*made.state_dict()] == [*plain.state_dict()]
    made(torch.randn(4, 3)).sum().backward()
    assert made.weight.grad is not None
    made.double()
    assert made.weight.dtype == torch.float64 and isinstance(made._parameters, ViewedParameters)


def test_a_view_shows_something_else_to_the_modules_code() -> None:
    made, shown = hidden()
    held = made.weight
    views: dict[str, Any] = {"weight": torch.full((3,), 2.0)}
    shown.add_view(lambda name, _: views.get(name))
    assert made.weight is views["weight"] and made.bias is shown.local("bias")
    assert [tensor for name, tensor in made.named_parameters() if name == "weight"] == [views["weight"]]
    assert shown.local("weight") is held
    assert dict(local_parameters(made.named_modules(prefix="norm")))["norm.weight"] is held
    views.clear()
    assert made.weight is held


def test_of_several_views_the_first_that_shows_something_counts() -> None:
    made, shown = hidden()
    one, other = torch.ones(3), torch.zeros(3)
    shown.add_view(lambda name, _: one if name == "weight" else None)
    shown.add_view(lambda name, _: other)
    assert made.weight is one and made.bias is other
    shown.add_view(lambda name, _: other if name == "weight" else None, first=True)
    assert made.weight is other


def test_what_is_hidden_is_not_there_for_the_engine() -> None:
    made, shown = hidden("weight")
    assert names(made) == ["bias"] and next(iter(made.state_dict())) == "bias" and "weight" not in made.state_dict()
    assert shown.local("weight") is None and [name for name, _ in local_parameters(made.named_modules())] == ["bias"]
    assert sum(parameter.numel() for parameter in made.parameters()) == 3
    assert made.weight.is_meta and "weight" in made._parameters and made._parameters.get("weight") is made.weight
    assert made._parameters.get("none", "default") == "default"
    assert made.zero_grad() is None and made.requires_grad_(True) is made


def test_what_is_hidden_is_seen_in_its_place_where_a_view_shows_it() -> None:
    """A loss that looks at all parameters finds all, in their order."""
    made, shown = hidden("weight")
    held: list[Any] = []
    instead = torch.full((3,), 5.0)

    def view(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        held.append(tensor)
        return instead if name == "weight" else None

    shown.add_view(view)
    assert names(made) == ["weight", "bias"]
    assert next(made.parameters()) is instead and held[0].is_meta
    assert next(iter(shown.values())) is instead and len([*shown.items()]) == 2


def test_a_missing_parameter_stays_missing() -> None:
    linear = nn.Linear(2, 2, bias=False)
    shown = viewed_tensors(linear, "_parameters")
    shown.add_view(lambda name, held: None)
    assert linear.bias is None and shown["bias"] is None and shown.local("bias") is None
    assert [name for name, _ in local_parameters(linear.named_modules())] == ["weight"]


def test_a_parameter_that_comes_later_is_shown_behind_the_others() -> None:
    made, shown = hidden("weight")
    shown.add_view(lambda name, held: held)
    made.register_parameter("late", nn.Parameter(torch.ones(1)))
    made.bias = nn.Parameter(torch.ones(3))
    assert names(made) == ["weight", "bias", "late"]
    with pytest.raises(KeyError):
        shown["never"]


def test_buffers_are_shown_and_hidden_too() -> None:
    made = module()
    shown = viewed_tensors(made, "_buffers")
    held = shown.local("running_var")
    assert held is not None
    shown.hide("running_var", torch.empty_like(held, device="meta"))
    assert [name for name, _ in made.named_buffers()] == ["running_mean", "num_batches_tracked"]
    assert "running_var" not in made.state_dict()
    shown.add_view(lambda name, _: torch.ones(3) if name == "running_var" else None)
    assert made.running_var is not None and made.running_var.tolist() == [1.0] * 3


def test_for_a_while_there_are_plain_dicts_of_what_is_seen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    views = viewed_tensors(model[0], "_buffers")
    seen, placeholder = torch.ones(2), torch.empty(2, device="meta")
    views.add_view(lambda name, _: seen if name == "running_mean" else None)
    views.hide("running_var", placeholder)
    before = views.local("running_mean")
    with plain_dicts(model.modules()):
        assert type(model[0]._buffers) is dict and model[0].running_mean is seen
        assert "running_var" not in model[0]._buffers
        model[0].num_batches_tracked = torch.tensor(7)
    assert model[0]._buffers is views and views.local("running_mean") is before
    assert views.placeholder("running_var") is placeholder and views["num_batches_tracked"] == 7
