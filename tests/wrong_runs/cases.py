"""Jobs that ran to other numbers without a word, one for each way in which a job can go past what a plan splits."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from own_loops import LOOPS
from plain import Case
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import evenly

WIDTH = 6


class Points(torch.utils.data.Dataset):
    """(6 numbers, class of 4)."""

    def __init__(self, count: int = 16) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, WIDTH, generator=draw)
        self.y = torch.randint(0, 4, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(torch.tanh(self.up(x)), self.dropout, self.training))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def class_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    return evenly.Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def job(model: Callable[[], nn.Module] = Net, **changes: Any) -> evenly.Job:
    fields: dict[str, Any] = dict(
        model=model, loss=class_loss, data=Points(), optimizer=sgd, global_batch=8, microbatch=2, steps=3,
        precision="float64", name="wrong",
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


# ------------------------------------------------------------------- parameters reached past the module
class ByList(Net):
    """A plain list of parameters, which are the model's too."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in self.blocks)
        self.at_hand = [*self.scales]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block, scale in zip(self.blocks, self.at_hand, strict=True):
            x = block(x) * scale
        return self.head(x)


class ByClosure(Net):
    """A head that closes over another's weight."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.enter.weight
        self.mirror = lambda x: F.linear(x, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mirror(x))


class ByView(Net):
    """A view of a weight, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = (self.enter.weight.detach().t(),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x @ self.turned[0])


# ------------------------------------------------------------------------ two Parameters, one storage
class TwoOnOne(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out.weight.data = self.enter.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.out(self.blocks[1](self.blocks[0](self.enter(x)))))


class Transposed(TwoOnOne):
    def __init__(self) -> None:
        super().__init__()
        self.out.weight = nn.Parameter(self.enter.weight.data.t())


# ---------------------------------------------------------------------------- optimizers and their hooks
def with_clipping_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)

    def clip(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def with_rows_of_norm_one(parameters: Any) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)

    @torch.no_grad()
    def normalize(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    parameter.div_(parameter.norm(dim=0, keepdim=True))

    optimizer.register_step_post_hook(normalize)
    return optimizer


def with_patched_step(parameters: Any) -> torch.optim.Optimizer:
    optimizer = adamw(parameters)
    before = optimizer.step

    def step(closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm() + 1e-3
        return before(closure)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


class Trusting(torch.optim.AdamW):
    """Scales each gradient by a ratio of the whole tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad * (p.detach().norm() / (p.grad.norm() + 1)) + p.grad.mean() * p.grad.sign()
        return super().step(closure)


class Lars(torch.optim.Optimizer):
    """LARS as it is commonly written: it asks tensors for numbers."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, gradient = p.norm().item(), p.grad.norm().item()
                ratio = 0.1 * weight / (gradient + 1e-9) if weight > 0 and gradient > 0 else 1.0
                most = p.grad.abs().max().item()
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad / (most + 1e-9), alpha=ratio)
                p.add_(state["momentum"], alpha=-group["lr"])


class Lamb(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                ratio = torch.where(p.norm() > 0, p.norm() / update.norm(), torch.ones((), dtype=p.dtype))
                p.sub_(group["lr"] * ratio * update)


class Together(torch.optim.SGD):
    """Scales by the norm of all gradients together."""

    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.grad = p.grad / norm
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """SGLD."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-2)


def with_hooks_of_its_parameters(params: Any) -> torch.optim.Optimizer:
    """The hooks find parameters by a list of their own."""
    held = list(params)
    optimizer = torch.optim.SGD(held, lr=0.1)

    def clip(*_: Any) -> None:
        for parameter in held:
            if parameter.grad is not None:
                parameter.grad.div_(1 + parameter.grad.norm())

    @torch.no_grad()
    def shrink(*_: Any) -> None:
        for parameter in held:
            parameter.mul_(1 / (1 + 0.1 * parameter.norm()))

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(shrink)
    return optimizer


def grouped_by_size(params: Any) -> torch.optim.Optimizer:
    """What is large as a whole is stepped otherwise."""
    held = list(params)
    large = [p for p in held if p.numel() > 40]
    small = [p for p in held if p.numel() <= 40]
    return torch.optim.Adagrad([{"params": large, "lr": 0.1 * float(len(large))}, {"params": small}], lr=0.01)


def optimizers() -> dict[str, evenly.Job]:
    two_dims = {"Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim > 1], lr=1e-2)}
    makers: dict[str, Any] = {
        "pre_hook": with_clipping_hook,
        "post_hook": with_rows_of_norm_one,
        "hooks of a list": with_hooks_of_its_parameters,
        "by size": grouped_by_size,
        "patched_step": with_patched_step,
        "trusting": lambda ps: Trusting(ps, lr=1e-2),
        "lars": Lars,
        "lamb": Lamb,
        "together": lambda ps: Together(ps, lr=0.05),
        "sgld": lambda ps: Noisy(ps, lr=0.05),
        "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
        "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
        **two_dims,
    }
    return {f"optimizer {name}": job(optimizer=make) for name, make in makers.items()}


# --------------------------------------------------------------------------------- checkpointing of one's own
class Checkpointed(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class CheckpointedTogether(Net):
    """Two blocks and what lies between are recomputed together."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def part(self, first: int, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[first](F.dropout(x, 0.1, self.training))
        return self.blocks[first + 1](F.dropout(x, 0.1, self.training))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for first in (0, 2):
            x = checkpoint(self.part, first, x, use_reentrant=False)
        return self.head(x)


class KeptTogether(CheckpointedTogether):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(2, self.part(0, self.enter(x))))


# ---------------------------------------------------------------------------------------- schedules that draw
def by_chance(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: random.uniform(0.5, 1.5))


# ------------------------------------------------------------------------------------------ data with a memory
class OwnGenerator(Points):
    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + torch.randn(WIDTH, generator=self.draw), self.y[index]


class OwnNumpyGenerator(Points):
    def __init__(self) -> None:
        super().__init__()
        self.draw = np.random.default_rng(1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + torch.from_numpy(self.draw.normal(size=WIDTH)).float(), self.y[index]


class CountsCalls(Points):
    calls = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return self.x[index] * (1 + 0.1 * self.calls), self.y[index]


def cost_by_chance() -> evenly.Job:
    draw = random.Random(1)
    return job(cost=lambda i: 1 + draw.random())


# ---------------------------------------------------------------------------------------- models with a memory
class DrawsByItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.draw, dtype=x.dtype))


class DrawsFrom(Net):
    """From a generator of Python's or numpy's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + 0.1 * self.draw()))


class Remembers(Net):
    """Hidden state in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last:
            x = x + 0.1 * self.last[0]
        self.last = [x.detach().mean(0)]
        return super().forward(x)


class Begins(Net):
    """Its first call computes something else."""

    called = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, self.called = (x if self.called else x * 0.5), True
        return super().forward(x)


class SetOnce(Net):
    """Its first call finds a number, and notes that it has."""

    factor, is_found = 0.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_found:
            self.factor, self.is_found = 0.5 * x.shape[1], True
        return super().forward(x * self.factor)


FOUND: dict[str, bool] = {}
FACTOR = 0.0


def forgetting() -> Net:
    global FACTOR
    FACTOR = 0.0
    FOUND.clear()
    return Net()


def loss_of_first_call(model: nn.Module, batch: Any) -> evenly.Loss:
    """Its first call finds a number for all, as `SetOnce`."""
    global FACTOR
    if not FOUND:
        FOUND["factor"], FACTOR = True, 0.5 * batch[0].shape[1]
    found = class_loss(model, batch)
    return evenly.Loss(found.total * FACTOR, found.weight)


class Queue(Net):
    """A queue of keys in a buffer that is not saved."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(3, WIDTH), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x + self.keys.mean(0))
        self.keys = torch.cat([self.keys[1:], x.detach().mean(0, keepdim=True)])
        return out


def counting_loss() -> Callable[..., evenly.Loss]:
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> evenly.Loss:
        calls[0] += 1
        found = class_loss(model, batch)
        return evenly.Loss(found.total * (1 + 0.1 * calls[0]), found.weight)

    return loss


# ---------------------------------------------------------------------- what a forward writes into the model
class Codebook(Net):
    """A moving average that is written past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x + self.codes)
        self.codes.data.copy_(0.9 * self.codes + 0.1 * x.detach().mean(0))
        return out


class Watched(Net):
    """Keeps moving averages and a counter of what it sees, and uses none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("size", torch.ones(()))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.blocks[1].register_buffer("seen", torch.full((10,), 0.5))
        self.blocks[1].register_forward_hook(keep_seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach()
        self.mean.mul_(0.9).add_(given.mean(0), alpha=0.1)
        self.size = 0.99 * self.size + 0.01 * given.square().mean()
        self.last.copy_(given[-1])
        self.calls += len(x)
        return super().forward(x)


class OwnBuffers(Net):
    """Blocks that use what they have seen, and keep it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_buffer("scale", torch.ones(()))
            block.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            block.forward = types.MethodType(scaled_by_what_was_seen, block)


def scaled_by_what_was_seen(block: Any, x: torch.Tensor) -> torch.Tensor:
    out = x + block.down(torch.tanh(block.up(x))) * block.scale
    block.scale = 0.9 * block.scale + 0.1 * x.detach().abs().mean()
    block.calls += 1
    return out


def keep_seen(block: Any, given: Any, _: torch.Tensor) -> None:
    block.seen.lerp_(block.up(given[0]).detach().mean(0), 0.25)


class MomentumHead(Net):
    """A head that follows another by a moving average."""

    def __init__(self, *, past_autograd: bool) -> None:
        super().__init__()
        self.slow, self.past_autograd = nn.Linear(WIDTH, 4), past_autograd
        self.slow.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        target = self.slow(x).detach()
        with torch.no_grad():
            for mine, theirs in zip(self.slow.parameters(), self.head.parameters(), strict=True):
                if self.past_autograd:
                    mine.data = 0.8 * mine.data + 0.2 * theirs.data
                else:
                    mine.mul_(0.8).add_(theirs, alpha=0.2)
        return self.head(x) + target


class Retyped(Net):
    """A head that the forward casts for good."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        self.head = self.head.to(torch.float32)
        return self.head(x.float())


class Normed(nn.Module):
    """Words whose vectors are shortened where they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH, max_norm=0.7)
        self.net = Net()
        self.blocks = self.net.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x + self.embed((x[:, 0].abs() * 3).long().clamp(max=8)))


# -------------------------------------------------------------------------------------------- own loops
@torch.no_grad()
def normalized(model: nn.Module) -> None:
    weight = model.blocks[0].up.weight
    weight.div_(weight.norm(dim=1, keepdim=True))
    weight.div_(weight.norm())


@torch.no_grad()
def noisy_loop(model: nn.Module) -> None:
    """By numbers of Python's and numpy's generators."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.mul_(FACTORS[0])


def factors_drawn(model: nn.Module) -> None:
    FACTORS[0] = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
    noisy_loop(model)


FACTORS = [1.0]


# ------------------------------------------------------------------------------------- gradients of gradients
def penalized(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    x = x.clone().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return evenly.Loss(F.cross_entropy(out, y, reduction="sum") + 0.1 * gradient.square().sum(), len(y))


class Attending(Net):
    """Norms, attention and an embedding, whose gradients have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(len(x), 2, 3) for t in self.mix(self.norm(x)).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return super().forward(F.gelu(mixed.flatten(1)) * x)


# --------------------------------------------------------------------------------------- modes of the builder
class WithNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.add_(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def with_frozen_norm() -> nn.Module:
    model = WithNorm()
    model.norm.eval()
    model.blocks[1] = Block(dropout=0.5).eval()
    return model


# ------------------------------------------------------------------------------------- blocks chosen by data
class Chosen(Net):
    """A microbatch whose first number is small leaves out a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large, x = bool(x[0, 0] > 1), self.enter(x)
        for number, block in enumerate(self.blocks):
            if number != 2 or large:
                x = block(x)
        return self.head(x)


# --------------------------------------------------------------------- refused in the past, or by some plans
class AuxiliaryLoss(Net):
    """A loss of its own, kept as an attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.enter(x))
        self.auxiliary = x.square().sum()
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


def with_auxiliary(model: nn.Module, batch: Any) -> evenly.Loss:
    loss = class_loss(model, batch)
    return evenly.Loss(loss.total + 0.01 * model.auxiliary, loss.weight)


class LearnedWeight(Net):
    """The weight of its loss is learned, and read by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(1))


def with_learned_weight(model: nn.Module, batch: Any) -> evenly.Loss:
    loss = class_loss(model, batch)
    total = loss.total * (-model.log_variance).exp().sum() + model.log_variance.sum() * loss.weight
    return evenly.Loss(total, loss.weight)


def sometimes_nothing(model: nn.Module, batch: Any) -> evenly.Loss:
    """A constant where a microbatch has nothing that counts."""
    loss = class_loss(model, batch)
    return loss if batch[0][0, 0] > 0 else evenly.Loss(torch.zeros(()), 0)


def with_gradient_hooks() -> nn.Module:
    model = Net()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g / (1 + g.norm()))
    return model


def with_activation_hooks() -> nn.Module:
    model = Net()
    model.blocks[1].register_forward_hook(lambda _, __, out: out * 0.9)
    model.blocks[2].register_forward_pre_hook(lambda _, given: (given[0] + 0.1,))
    model.blocks[1].up.register_forward_hook(lambda _, __, out: out.clamp(-1, 1))
    model.blocks[1].register_full_backward_hook(lambda _, into, out: (into[0] * 0.5,))
    return model


class Noised(torch.autograd.Function):
    """Its backward draws."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return gradient * (1 + 0.1 * torch.randn_like(gradient))


class HookedBlock(Block):
    """`change` of the gradient that comes back to it."""

    change: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        if isinstance(self.change, type):
            return self.change.apply(found)  # pyright: ignore
        if found.requires_grad:
            found.register_hook(self.change)
        return found


def hooked(change: Any) -> Net:
    model = Net(dropout=0.3)
    model.blocks = nn.ModuleList(HookedBlock(0.3) for _ in range(4))
    for block in model.blocks:
        block.change = change
    return model


def with_noise_on_parameters() -> nn.Module:
    model = Net(dropout=0.3)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g + 0.1 * torch.randn_like(g))
    return model


class MeanNorm:
    """Divides by a moving average of the norms of gradients; first: by that of the first for ever."""

    def __init__(self, *, first: bool) -> None:
        self.first, self.mean = first, 0.0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if not (self.first and self.mean):
            self.mean = 0.9 * self.mean + 0.1 * float(gradient.norm())
        return gradient / (1 + self.mean)


def with_mean_norms(*, first: bool = False) -> nn.Module:
    model = Net()
    for parameter in model.parameters():
        parameter.register_hook(MeanNorm(first=first))
    return model


def with_counted_backwards() -> nn.Module:
    model, counts = Net(), [0]

    def count(_: Any, into: Any, __: Any) -> Any:
        counts[0] += 1
        return (into[0] / counts[0],)

    model.blocks[2].register_full_backward_hook(count)
    return model


def with_noted_norms() -> nn.Module:
    """Notes in a buffer what its backwards come to."""
    model = Net()
    model.register_buffer("noted", torch.zeros(()))
    note = lambda g: model.noted.add_(g.norm())  # noqa: E731
    model.enter.weight.register_hook(lambda g: (note(g), g)[1])
    return model


def with_listed_norms() -> nn.Module:
    """Lists what its backwards come to, of which nothing follows."""
    model, seen = Net(), list[float]()
    for parameter in model.parameters():
        parameter.register_hook(lambda g: seen.append(float(g.norm())))
    return model


class CountingBlock(Block):
    """`factor` of how often it has run."""

    factor: Callable[[int], float] = float
    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return super().forward(x) * self.factor(self.times)


class KeepingCount(Block):
    """Halves what it is given from its seventh forward on, which it counts in what it keeps."""

    def __init__(self, keep: Callable[[], Any], count: Callable[[Any], int]) -> None:
        super().__init__()
        self.kept, self.count = keep(), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1.0 if self.count(self.kept) < 7 else 0.5))


def first_element(kept: Any) -> int:
    kept[0] += 1
    return int(kept[0])


def attribute(kept: Any) -> int:
    kept.times += 1
    return kept.times


def length(kept: list[int]) -> int:
    kept.append(len(kept))
    return len(kept)


ALL_TIMES = 0


def variable(_: Any) -> int:
    global ALL_TIMES
    ALL_TIMES += 1
    return ALL_TIMES // 4  # blocks


class Tally:
    times = 0


def of_class(_: Any) -> int:
    Tally.times += 1
    return Tally.times // 4


COUNTS: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "in a list": (lambda: [0], first_element),
    "in a dict": (lambda: {0: 0}, first_element),
    "in an array": (lambda: np.zeros(1), first_element),
    "in a tensor": (lambda: torch.zeros(1), first_element),
    "in an object": (lambda: types.SimpleNamespace(times=0), attribute),
    "by entries": (list, length),
    "in a variable": (lambda: None, variable),
    "by a class": (lambda: None, of_class),
}


def keeping_counts(keep: Callable[[], Any], count: Callable[[Any], int]) -> Net:
    global ALL_TIMES
    ALL_TIMES = Tally.times = 0
    model = Net()
    model.blocks = nn.ModuleList(KeepingCount(keep, count) for _ in range(4))
    return model


LOSSES = 0


def counted_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    global LOSSES
    LOSSES += 1
    found = class_loss(model, batch)
    return evenly.Loss(found.total * (1.0 if LOSSES < 8 else 0.5), found.weight)


def counting_losses() -> Net:
    global LOSSES
    LOSSES = 0
    return Net()


class CountingWatched(Watched):
    """Keeps moving averages, for which steps look again, and counts its forwards."""

    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return super().forward(x) * (1.0 if self.times < 11 else 0.5)


class ReversedBlock(Block):
    """Its gradient, and not its result, follows from how often it has run."""

    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        found = super().forward(x)
        return found.detach() + (found - found.detach()) * (1.0 if self.times < 7 else -1.0)


def reversing() -> Net:
    model = Net()
    model.blocks = nn.ModuleList(ReversedBlock() for _ in range(4))
    return model


def counting(factor: Callable[[int], float]) -> Net:
    model = Net()
    model.blocks = nn.ModuleList(CountingBlock() for _ in range(4))
    for block in model.blocks:
        block.factor = factor
    return model


class Telling(Block):
    """Leaves behind what the loss needs, without returning it."""

    told: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.told = F.dropout(x, 0.5).square().mean()
        return super().forward(x)


class Telltale(Net):
    """Its loss wants what blocks have left behind, and what hooks in them have collected."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Telling() for _ in self.blocks)
        self.seen: list[torch.Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda _, __, out: self.seen.append(out.square().mean()))
            block.register_forward_hook(lambda _, __, out: self.seen.append(out.abs().mean()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        return super().forward(x)


def with_what_was_told(model: nn.Module, batch: Any) -> evenly.Loss:
    loss = class_loss(model, batch)
    told = [block.told for block in model.blocks]  # pyright: ignore
    collected = sum((n + 1) * one for n, one in enumerate([*told, *model.seen]))  # pyright: ignore
    return evenly.Loss(loss.total + 0.01 * collected, loss.weight)


class Collecting(Block):
    """Leaves numbers and a tensor in what it is given."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:  # pyright: ignore
        given["calls"] += 1
        given["squares"].append(x.square().mean())
        return super().forward(x * (1 + 0.1 * given["calls"]))


class Collected(Net):
    """Uses what its blocks have left in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collecting(dropout=0.3) for _ in self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"calls": 0, "squares": []}
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, given)
        return self.head(x) * (1 + sum(given["squares"]) / given["calls"])


class WrittenProduct(torch.autograd.Function):
    """A linear layer whose backward writes the gradient of the weight to `grad`, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:  # pyright: ignore
        ctx.save_for_backward(x, layer.weight)
        ctx.layer = layer
        return x @ layer.weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        mine, kept = gradient.t() @ x, ctx.layer.weight
        kept.grad = mine if kept.grad is None else kept.grad + mine
        return gradient @ weight, None


class WritesGradients(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(WrittenProduct.apply(x, self.up)))  # pyright: ignore


def with_written_gradients() -> nn.Module:
    model = Net()
    model.blocks[1], model.blocks[2] = WritesGradients(), WritesGradients()
    for block in (model.blocks[1], model.blocks[2]):
        block.up.bias = None  # pyright: ignore
    return model


def with_spectral_norm() -> nn.Module:
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.enter, dim=1)
    nn.utils.parametrizations.spectral_norm(model.blocks[1].up)
    nn.utils.spectral_norm(model.blocks[2].down)
    nn.utils.parametrizations.spectral_norm(model.head, n_power_iterations=2)
    return model


def with_spectral_norm_of_frozen() -> nn.Module:
    model = with_spectral_norm()
    model.blocks[1].eval()
    return model


def compared(model: nn.Module, batch: Any) -> evenly.Loss:
    """Calls the model twice."""
    loss = class_loss(model, batch)
    return evenly.Loss(loss.total + (model(batch[0]) - model(batch[0] * 0.5)).square().sum(), loss.weight)


class Pictures(nn.Module):
    """A convolution whose weight lies in channels-last order, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.net = Net()
        self.blocks = self.net.blocks
        self.net.enter = nn.Linear(8, WIDTH)
        self.net.enter.weight = nn.Parameter(torch.randn(8, WIDTH).t() * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.look(torch.cat([x, x], 1).view(-1, 2, 2, 3)).flatten(1))


def writing_into_its_batch(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    x.mul_(2.0).add_(1.0)
    y.add_(1).remainder_(4)
    return class_loss(model, batch)


class ViewBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(len(x), 2, -1)


class ChangesResults(Net):
    """Blocks and model return views; the former are changed in place between blocks, the latter by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ViewBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            seen = block(x)
            seen *= 0.5
            seen += x.view(seen.shape)
            x = seen.flatten(1)
        return self.head(x).unsqueeze(0)


def changing_results(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    result = model(x)
    result -= F.one_hot(y, 4)
    return evenly.Loss((result**2).sum(), len(y))


class Result:
    """No nest: torch does not look into it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden, self.size = hidden, hidden.square().mean()


class ObjectBlock(Block):
    def forward(self, given: Result) -> Result:  # pyright: ignore
        return Result(super().forward(given.hidden))


class ReturnsObjects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ObjectBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Result:  # pyright: ignore
        given = Result(self.enter(x))
        for block in self.blocks:
            given = block(given)
        return Result(self.head(given.hidden) * (1 + given.size))


def of_an_object(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    result = model(x)
    return evenly.Loss(F.cross_entropy(result.hidden, y, reduction="sum") + len(y) * result.size, len(y))


class Keeps(Net):
    """Returns nothing, but keeps its result."""

    def forward(self, x: torch.Tensor) -> None:  # pyright: ignore
        self.result = super().forward(x)


def of_what_is_kept(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    model(x)
    return evenly.Loss(F.cross_entropy(model.result, y, reduction="sum"), len(y))  # pyright: ignore


class Generates(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return iter([super().forward(x)])


def of_an_iterator(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    return evenly.Loss(F.cross_entropy(next(model(x)), y, reduction="sum"), len(y))


def of_other_weights(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    weights = {name: parameter * 1.1 for name, parameter in model.named_parameters()}
    result = torch.func.functional_call(model, weights, (x,))
    return evenly.Loss(F.cross_entropy(result, y, reduction="sum"), len(y))


class OwnForwards(Net):
    """Each block has a forward of its own, which returns more than that of its class."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.blocks):
            block.forward = self.with_penalty(block.forward, 0.01 * number)

    @staticmethod
    def with_penalty(forward: Callable[..., torch.Tensor], weight: float) -> Callable[..., Any]:
        return lambda x: (forward(x), weight * x.square().mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, penalty = self.enter(x), x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            penalty = penalty + more
        return self.head(x) + penalty


class OwnForwardOfNorm(Net):
    """Its running statistics move faster than the layer says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = nn.BatchNorm1d(WIDTH)

        def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, own.running_mean, own.running_var, own.weight, own.bias, own.training, 0.5)

        self.norm.forward = types.MethodType(forward, self.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


CASES: dict[str, Callable[[], Case]] = {
    "none": lambda: Case(job()),
    "list": lambda: Case(job(ByList)),
    "closure": lambda: Case(job(ByClosure)),
    "view": lambda: Case(job(ByView, precision="float32")),
    "two on one": lambda: Case(job(TwoOnOne)),
    "two on one float32": lambda: Case(job(TwoOnOne, precision="float32")),
    "transposed": lambda: Case(job(Transposed)),
    **{name: (lambda found=found: Case(found)) for name, found in optimizers().items()},
    "checkpoint": lambda: Case(job(Checkpointed), twin=lambda: Net(dropout=0.3)),
    "checkpoint of two": lambda: Case(job(CheckpointedTogether), twin=KeptTogether),
    "schedule": lambda: Case(job(schedule=by_chance)),
    "data generator": lambda: Case(job(data=OwnGenerator())),
    "data numpy": lambda: Case(job(data=OwnNumpyGenerator())),
    "data counts": lambda: Case(job(data=CountsCalls())),
    "cost": lambda: Case(cost_by_chance()),
    "model generator": lambda: Case(job(DrawsByItself)),
    "model generator of Python": lambda: Case(job(lambda: DrawsFrom(random.Random(1).random))),
    "model generator of numpy": lambda: Case(job(lambda: DrawsFrom(np.random.default_rng(1).random))),
    "hidden state": lambda: Case(job(Remembers)),
    "first call": lambda: Case(job(Begins)),
    "number of the first call": lambda: Case(job(SetOnce)),
    "number of the first loss": lambda: Case(job(forgetting, loss=loss_of_first_call)),
    "queue": lambda: Case(job(Queue)),
    "saved queue": lambda: Case(job(lambda: Queue(persistent=True))),
    "loss counts": lambda: Case(job(loss=counting_loss())),
    "own forwards": lambda: Case(job(OwnForwards)),
    "own forward of a norm": lambda: Case(job(OwnForwardOfNorm)),
    "moving averages": lambda: Case(job(Watched)),
    "own buffers": lambda: Case(job(OwnBuffers)),
    "codebook": lambda: Case(job(Codebook)),
    "momentum head": lambda: Case(job(lambda: MomentumHead(past_autograd=False))),
    "momentum head data": lambda: Case(job(lambda: MomentumHead(past_autograd=True))),
    "max_norm": lambda: Case(job(Normed)),
    "retyped": lambda: Case(job(Retyped)),
    "own loop": lambda: Case(job(), after=normalized),
    "own loop draws": lambda: Case(job(), after=factors_drawn),
    **{f"own loop {name}": (lambda loop=loop: Case(job(), loop=loop)) for name, loop in LOOPS.items()},
    "double backward": lambda: Case(job(loss=penalized)),
    "double backward of norms": lambda: Case(job(Attending, loss=penalized)),
    "frozen norm": lambda: Case(job(with_frozen_norm, data=Points(16))),
    "chosen blocks": lambda: Case(job(Chosen)),
    "auxiliary loss": lambda: Case(job(AuxiliaryLoss, loss=with_auxiliary)),
    "learned weight": lambda: Case(job(LearnedWeight, loss=with_learned_weight)),
    "constant of weight 0": lambda: Case(job(loss=sometimes_nothing)),
    "gradient hooks": lambda: Case(job(with_gradient_hooks)),
    "activation hooks": lambda: Case(job(with_activation_hooks)),
    "noise on gradients": lambda: Case(job(lambda: hooked(lambda g: g * (1 + 0.1 * torch.randn_like(g))))),
    "noise by Python": lambda: Case(job(lambda: hooked(lambda g: g * (1 + random.random())))),
    "noise by numpy": lambda: Case(job(lambda: hooked(lambda g: g * (1 + np.random.rand())))),
    "noise of a function": lambda: Case(job(lambda: hooked(Noised))),
    "noise on parameters": lambda: Case(job(with_noise_on_parameters)),
    "norms averaged": lambda: Case(job(with_mean_norms)),
    "first norms": lambda: Case(job(lambda: with_mean_norms(first=True))),
    "backwards counted": lambda: Case(job(with_counted_backwards)),
    "norms noted": lambda: Case(job(with_noted_norms)),
    "counted in the first steps": lambda: Case(job(lambda: counting(lambda times: 1.0 if times < 7 else 0.5))),
    "counted for long": lambda: Case(job(lambda: counting(lambda times: 1.0 if times < 4000 else 0.5))),
    "counted up to an end": lambda: Case(job(lambda: counting(([1.0] * 2000).__getitem__))),
    **{f"counted {where}": (lambda how=how: Case(job(lambda: keeping_counts(*how)))) for where, how in COUNTS.items()},
    "counted by the loss": lambda: Case(job(counting_losses, loss=counted_loss)),
    "counted for gradients": lambda: Case(job(reversing)),
    "counted and averaged": lambda: Case(job(CountingWatched)),
    "counted in vain": lambda: Case(job(lambda: counting(lambda _: 1.0))),
    "norms listed": lambda: Case(job(with_listed_norms)),
    "left behind": lambda: Case(job(Telltale, loss=with_what_was_told)),
    "left in a dict": lambda: Case(job(Collected)),
    "written gradients": lambda: Case(job(with_written_gradients)),
    "spectral norm": lambda: Case(job(with_spectral_norm)),
    "spectral norm in evaluation": lambda: Case(job(with_spectral_norm_of_frozen)),
    "spectral norm called twice": lambda: Case(job(with_spectral_norm, loss=compared)),
    "batch in place": lambda: Case(job(loss=writing_into_its_batch)),
    "batch in place float32": lambda: Case(job(loss=writing_into_its_batch, precision="float32")),
    "results in place": lambda: Case(job(ChangesResults, loss=changing_results)),
    "results in objects": lambda: Case(job(ReturnsObjects, loss=of_an_object)),
    "result kept": lambda: Case(job(Keeps, loss=of_what_is_kept)),
    "other weights": lambda: Case(job(loss=of_other_weights)),
    "iterator": lambda: Case(job(Generates, loss=of_an_iterator)),
    "channels last": lambda: Case(job(Pictures)),
}


def case(name: str) -> Case:
    """A fresh one of that name: some have a memory."""
    return CASES[name]()
