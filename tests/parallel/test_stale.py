"""What is kept of a parameter past its module raises once the parameter is elsewhere."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from evenly.errors import RunError
from evenly.parallel.core.stale import mark_stale, memory_of


def moved(model: nn.Linear) -> None:
    """What cutting a model does."""
    model.weight = nn.Parameter(model.weight.detach()[:2].clone())


def test_lists_closures_and_views_of_what_was_a_parameter_raise() -> None:
    model = nn.Linear(3, 4)
    weight, kept, view = model.weight, [model.weight], model.weight.detach().t()
    before = memory_of(model)
    moved(model)
    mark_stale(before, [model])
    for use in (
        lambda: kept[0] * 2,
        lambda: torch.ones(1, 3) @ view,
        lambda: nn.functional.linear(torch.ones(3), weight),
    ):
        with pytest.raises(RunError, match="using weight past its module"):
            use()
    assert model.weight.sum().isfinite() and model.bias.sum().isfinite()


def test_what_was_imported_before_ranks_were_forked_raises_as_well() -> None:
    model = nn.Linear(3, 4)
    kept, before = [model.weight], memory_of(model)
    gc.freeze()
    try:
        moved(model)
        mark_stale(before, [model])
    finally:
        gc.unfreeze()
    with pytest.raises(RunError, match="using weight past its module"):
        kept[0].sum()


def test_nothing_is_marked_where_nothing_is_left_behind() -> None:
    model = nn.Linear(3, 4)
    bias, copy = model.bias, model.weight.detach().clone()
    before = memory_of(model)
    moved(model)
    mark_stale(before, [model])
    assert type(bias) is nn.Parameter and (copy + 1).isfinite().all()


def test_tensors_without_memory_are_passed_over() -> None:
    model = nn.Linear(3, 4)
    kept, others = model.weight, [torch.eye(3).to_sparse(), torch.ones(3, 4).to_mkldnn()]
    before = memory_of(model)
    moved(model)
    mark_stale(before, [model])
    with pytest.raises(RunError, match="using weight past its module"):
        kept.sum()
    assert [type(other) for other in others] == [torch.Tensor, torch.Tensor]
