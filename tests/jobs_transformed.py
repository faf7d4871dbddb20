"""Code of models that goes through what transforms it: torch.func, functional_call, compilation, own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

T = torch.Tensor
Mix = Callable[[Any, T], T]
MIXES: dict[str, Mix] = {}


def mix(function: Mix) -> Mix:
    MIXES[function.__name__.replace("_", " ")] = function
    return function


class Part(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down, self.mix = nn.Linear(6, 10), nn.Linear(10, 6), mix

    def plain(self, x: T) -> T:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: T) -> T:
        return x + self.plain(x) + 0.1 * self.mix(self, x)


@mix
def vmap_of_detached(part: Any, x: T) -> T:
    return vmap(torch.linalg.vector_norm)(part.down.weight.detach())


@mix
def vmap_of_rows(part: Any, x: T) -> T:
    return vmap(lambda row: (row * row).sum())(part.down.weight) * x


@mix
def vmap_of_closure(part: Any, x: T) -> T:
    return vmap(part.plain)(x)


@mix
def vmap_of_products(part: Any, x: T) -> T:
    return vmap(lambda row: F.linear(row, part.down.weight, part.down.bias))(F.gelu(part.up(x)))


@mix
def vmap_of_detached_products(part: Any, x: T) -> T:
    return vmap(lambda row: F.linear(row, part.down.weight.detach()))(F.gelu(part.up(x)).detach())


@mix
def gradient_of_detached(part: Any, x: T) -> T:
    return grad(lambda w: w.square().sum().sqrt())(part.down.weight.detach()).sum(1) * x


@mix
def gradient_of_products(part: Any, x: T) -> T:
    return grad(lambda z: part.plain(z).square().sum())(x)


@mix
def gradient_of_weight(part: Any, x: T) -> T:
    return grad(lambda w: F.linear(F.gelu(part.up(x)), w).tanh().sum())(part.down.weight).sum(1)


@mix
def tangents(part: Any, x: T) -> T:
    return jvp(part.plain, (x,), (torch.ones_like(x),))[1]


@mix
def tangents_of_detached(part: Any, x: T) -> T:
    weight = part.down.weight.detach()
    return jvp(lambda w: (w * w.norm()).sum(1), (weight,), (torch.ones_like(weight),))[1]


@mix
def jacobian(part: Any, x: T) -> T:
    return jacrev(lambda z: part.plain(z).sum(0))(x).sum((0, 1))


@mix
def called_with_others(part: Any, x: T) -> T:
    scaled = {name: 0.5 * p for name, p in part.up.named_parameters()}
    return part.down(functional_call(part.up, scaled, (x,)))


@mix
def called_with_detached(part: Any, x: T) -> T:
    detached = {name: p.detach() / (1 + p.detach().norm()) for name, p in part.named_parameters()}
    return functional_call(Plain(part), {f"part.{name}": p for name, p in detached.items()}, (x,))


class Plain(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: T) -> T:
        return self.part.plain(x)


@mix
def vmap_of_models(part: Any, x: T) -> T:
    stacked = {name: torch.stack([p, 0.5 * p]) for name, p in part.down.named_parameters()}
    hidden = F.gelu(part.up(x))
    return vmap(lambda given: functional_call(part.down, given, (hidden,)))(stacked).sum(0)


@mix
def recomputed(part: Any, x: T) -> T:
    return checkpoint(part.plain, x, use_reentrant=False)


@mix
def recomputed_of_detached(part: Any, x: T) -> T:
    return checkpoint(lambda w: F.linear(F.gelu(part.up(x)), w), part.down.weight.detach(), use_reentrant=False)


@mix
def recomputed_by_reentry(part: Any, x: T) -> T:
    return checkpoint(part.plain, x, use_reentrant=True)


class Turned(Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: T) -> T:
        return -gradient


class Kept(Turned):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return x


class Normed(Function):
    @staticmethod
    def forward(ctx: Any, x: T, w: T) -> T:
        ctx.save_for_backward(x, w)
        return x / w.norm()

    @staticmethod
    def backward(ctx: Any, gradient: T) -> Any:
        _, w = ctx.saved_tensors
        return gradient / w.norm(), None


@mix
def own_function(part: Any, x: T) -> T:
    return part.down(Turned.apply(F.gelu(part.up(x))))


@mix
def own_function_kept(part: Any, x: T) -> T:
    return part.down(Kept.apply(F.gelu(part.up(x))))


@mix
def own_function_of_detached(part: Any, x: T) -> T:
    return Normed.apply(x, part.down.weight.detach())


@mix
def own_function_of_no_gradient(part: Any, x: T) -> T:
    return Kept.apply(part.down.weight.detach()).norm() * x


@mix
def compiled(part: Any, x: T) -> T:
    return torch.compile(part.plain, backend="eager")(x)


@mix
def compiled_of_detached(part: Any, x: T) -> T:
    return torch.compile(lambda w: w / w.norm(), backend="eager")(part.down.weight.detach()).sum(1)


@mix
def compiled_of_activations(part: Any, x: T) -> T:
    return part.down(torch.compile(lambda h: h * h.norm(), backend="aot_eager")(F.gelu(part.up(x))))


@mix
def compiled_of_detached_activations(part: Any, x: T) -> T:
    return part.down(torch.compile(lambda h: h * h.norm(), backend="eager")(F.gelu(part.up(x)).detach()))
