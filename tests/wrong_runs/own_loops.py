"""What own loops do to a model between its steps, from what whole tensors say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__.replace("_", " ")] = torch.no_grad()(function)
    return function


def up(model: Any) -> nn.Parameter:
    return model.blocks[0].up.weight


def down(model: Any) -> nn.Parameter:
    return model.blocks[0].down.weight


@loop
def norm_as_number(model: nn.Module, _: Any) -> None:
    for weight in (up(model), down(model)):
        weight.mul_(1 / weight.norm().item())


@loop
def norm_of_data(model: nn.Module, _: Any) -> None:
    up(model).data.div_(up(model).data.norm())
    down(model).data = down(model).data / down(model).data.std()


@loop
def sums_and_means(model: nn.Module, _: Any) -> None:
    weight = up(model)
    weight.sub_(weight.mean()).add_(0.1 * float(weight.sum()) / weight.numel()).mul_(1 / len(weight))
    down(model).sub_(down(model).mean(1, keepdim=True) * down(model).shape[1] / 20)


@loop
def largest(model: nn.Module, _: Any) -> None:
    up(model).div_(up(model).abs().max())
    down(model).clamp_(-down(model).quantile(0.9), down(model).quantile(0.9))


@loop
def products(model: nn.Module, _: Any) -> None:
    weight = up(model)
    weight.sub_(0.1 * (weight @ weight.T @ weight))
    down(model).div_(torch.linalg.matrix_norm(down(model), 2))


@loop
def as_lists(model: nn.Module, _: Any) -> None:
    weight = up(model)
    largest = max(max(row) for row in weight.tolist())
    weight.mul_(1 / (1 + abs(largest)))
    weight.mul_(1 + 0.01 * float(weight.cpu().numpy()[-1, -1]))


@loop
def by_index(model: nn.Module, _: Any) -> None:
    weight = up(model)
    weight.mul_(1 + 0.01 * float(weight[5, 1]) + 0.01 * weight[-1].sum())
    weight[3] = weight[0] * 0.5
    weight[weight > 0.4] = 0.4
    down(model)[:, 3] = 0.25


@loop
def drawn(model: nn.Module, _: Any) -> None:
    torch.manual_seed(5)
    up(model).add_(0.1 * torch.randn_like(up(model)))
    down(model).normal_(std=0.1)
    nn.init.kaiming_uniform_(model.blocks[1].up.weight)
    nn.init.orthogonal_(model.blocks[1].down.weight)


@loop
def lists_of_tensors(model: nn.Module, _: Any) -> None:
    weights = [up(model), down(model)]
    norms = torch._foreach_norm(weights)
    torch._foreach_div_(weights, norms)
    torch._foreach_add_(weights, 0.01)


@loop
def whole_norm(model: nn.Module, _: Any) -> None:
    total = torch.stack([p.square().sum() for p in model.parameters()]).sum().sqrt()
    for parameter in model.parameters():
        parameter.mul_(3 / total)


@loop
def by_the_optimizer(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(1 / (1 + parameter.norm()))


@loop
def by_gradients(model: nn.Module, _: Any) -> None:
    for weight in (up(model), down(model)):
        weight.sub_(0.1 * weight.grad / (1 + weight.grad.norm()))


@loop
def by_functions(model: nn.Module, _: Any) -> None:
    weight = up(model)
    weight.mul_(1 / (1 + torch.func.vmap(torch.norm)(weight)).unsqueeze(1))
    weight.sub_(0.1 * torch.func.grad(lambda w: w.norm())(weight))


@loop
def average(model: nn.Module, _: Any) -> None:
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.lerp_(kept[name] / (1 + kept[name].norm()), 0.3)


@loop
def by_state(model: nn.Module, _: Any) -> None:
    state = {name: tensor / (1 + tensor.norm()) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


@loop
def copies(model: Any, _: Any) -> None:
    block = copy.deepcopy(model.blocks[0].up)
    block.weight.div_(block.weight.norm())
    up(model).copy_(block.weight)


@loop
def predicted(model: Any, _: Any) -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    model.head.bias.sub_(0.1 * model(x).mean(0))
    hidden = model.blocks[0](torch.ones(2, 6, dtype=torch.float64))
    up(model).mul_(1 / (1 + hidden.norm()))
