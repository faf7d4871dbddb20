"""Optimizers and schedules that were made for another copy of a model, made again by the names of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def rebuilt_optimizer(
    made: torch.optim.Optimizer, model: nn.Module
) -> Callable[[Iterator[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """What builds an optimizer like `made`, which holds parameters of `model`, for parameters of the same names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [_as_given(group) for group in made.param_groups]
    members = [[names[id(parameter)] for parameter in group["params"]] for group in made.param_groups]

    def build(named_parameters: Iterator[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        found = dict(named_parameters)
        kind: Any = type(made)
        return kind(
            [{**group, "params": [found[name] for name in own]} for group, own in zip(groups, members, strict=True)]
        )

    return build


def rebuilt_schedule(made: Any) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    def build(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, made.lr_lambdas)

    return build


def _as_given(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group as they were before a schedule has moved them."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    return {**options, **({"lr": group["initial_lr"]} if "initial_lr" in group else {})}
