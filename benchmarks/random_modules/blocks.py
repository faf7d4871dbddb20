"""Blocks of random modules: each takes a hidden state x (B, L, W) and the tokens (B, L), and gives a hidden state back.

What they return differs: a tensor, a tuple, a dict, or a tuple with None. `plain` takes the hidden state out of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOKENS, HEADS = 13, 3
T = torch.Tensor


class Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: T, tokens: T) -> Any:
        return x + torch.tanh(self.linear(x))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """Gate and value are halves of one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * width + 2, bias=False), nn.Linear(width + 1, width)

    def forward(self, x: T, tokens: T) -> Any:
        gate, value = self.both(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Attention(nn.Module):
    """Its heads are written into `view`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: T, tokens: T) -> Any:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.packed(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(width, HEADS, batch_first=True)

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.mix(x, x, x, key_padding_mask=None, need_weights=False)[0]


class Norm(nn.Module):
    """One of torch's norms, over the last dim or over channels."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(width, width)
        self.norm: Any = {
            "layer": lambda: nn.LayerNorm(width),
            "rms": lambda: nn.RMSNorm(width),
            "group": lambda: nn.GroupNorm(HEADS, width),
            "batch": lambda: nn.BatchNorm1d(width),
            "instance": lambda: nn.InstanceNorm1d(width, affine=True),
        }[kind]()

    def forward(self, x: T, tokens: T) -> Any:
        y = self.linear(x)
        return x + (self.norm(y) if self.kind in ("layer", "rms") else self.norm(y.transpose(1, 2)).transpose(1, 2))


class Dropped(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.drop(F.relu(self.linear(x)))


class Recurrent(nn.Module):
    def __init__(self, width: int, kind: type[nn.Module]) -> None:
        super().__init__()
        self.read: Any = kind(width, width, batch_first=True)

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.read(x)[0]


class Convolution(nn.Module):
    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=groups)

    def forward(self, x: T, tokens: T) -> Any:
        return x + F.silu(self.conv(x.transpose(1, 2))).transpose(1, 2)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> T:
        return gradients[0]


class StraightThrough(nn.Module):
    """A function of its own, whose backward is not its derivative."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: T, tokens: T) -> Any:
        rounded: T = _Straight.apply(x)  # type: ignore[assignment]
        return x + 0.1 * self.linear(rounded - x.detach() + x)


class InPlace(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: T, tokens: T) -> Any:
        y = self.linear(x)
        y.mul_(2).add_(0.5)
        return x + F.relu(y) * self.scale


class Views(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: T, tokens: T) -> Any:
        y = x.unflatten(-1, (HEADS, -1)).transpose(-1, -2).flatten(2).roll(1, dims=-1)
        return x + self.linear(y.flip(-1).contiguous().view_as(x))


class Indexed(nn.Module):
    """Positions with the largest scores get a change, those of token 1 another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score, self.linear = nn.Linear(width, 1), nn.Linear(width, width)

    def forward(self, x: T, tokens: T) -> Any:
        scores = self.score(x).squeeze(-1)
        best = scores.topk(min(2, x.shape[1]), dim=1).indices[..., None].expand(-1, -1, x.shape[-1])
        changed = self.linear(x.gather(1, best)) * torch.sigmoid(scores.amax())
        return x.scatter_add(1, best, changed.to(x.dtype)).masked_fill((tokens == 1)[..., None], 0.25)


class Checkpointed(nn.Module):
    """Recomputes itself, dropout included."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.2)

    def _inside(self, x: T) -> T:
        return self.down(self.drop(torch.tanh(self.up(x))))

    def forward(self, x: T, tokens: T) -> Any:
        return x + checkpoint(self._inside, x, use_reentrant=False)


class Buffered(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("shift", torch.linspace(-1, 1, width), persistent=False)

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.linear(x * self.scale + self.shift)


class Experts(nn.Module):
    """Each position goes to the expert of its largest score; those that nobody goes to do not run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 3), nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: T, tokens: T) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number in chosen.unique().tolist():
            (rows,) = torch.where(chosen == number)
            update = self.experts[number](flat[rows]) * weight[rows, None]
            out = out.index_add(0, rows, update.to(out.dtype))
        return x + out.view_as(x)


class Embedded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.never = nn.Embedding(TOKENS, width), nn.Parameter(torch.ones(2, width))

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.embed(tokens)


class Frozen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.adapter = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.linear.requires_grad_(False)

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.linear(x) + self.adapter(x)


class Parametrized(nn.Module):
    """Its weight is computed: a direction times a length, or divided by its largest singular value."""

    def __init__(self, width: int, how: Any) -> None:
        super().__init__()
        self.linear = how(nn.Linear(width, width))

    def forward(self, x: T, tokens: T) -> Any:
        return x + torch.tanh(self.linear(x))


class Averaged(nn.Module):
    """Keeps a moving average of what it sees, and counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: T, tokens: T) -> Any:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
                self.calls += 1
        return x + torch.tanh(self.linear(x))


class Image(nn.Module):
    """Sees the hidden state as a picture of one channel: a convolution, its norm, and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.back = nn.ConvTranspose2d(4, 1, 3, padding=1)

    def forward(self, x: T, tokens: T) -> Any:
        return x + self.back(F.relu(self.norm(self.into(x[:, None])))).squeeze(1)


class Returning(nn.Module):
    """Returns its hidden state in a tuple, a dict, or next to None."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(width, width)

    def forward(self, x: T, tokens: T) -> Any:
        y = x + torch.sin(self.linear(x))
        return {"tuple": (y, x.mean()), "dict": {"hidden": y, "first": x[:, :1]}, "none": (y, None)}[self.how]


KINDS: dict[str, Any] = {
    "linear": Linear, "mlp": Mlp, "gated": Gated, "attention": Attention, "multihead": Multihead, "dropped": Dropped,
    "straight": StraightThrough, "in-place": InPlace, "views": Views, "indexed": Indexed,
    "checkpointed": Checkpointed, "buffered": Buffered, "experts": Experts, "embedded": Embedded, "frozen": Frozen,
    **{f"{kind} norm": lambda width, kind=kind: Norm(width, kind) for kind in ("layer", "rms", "group", "instance")},
    "batch norm": lambda width: Norm(width, "batch"),
    "gru": lambda width: Recurrent(width, nn.GRU),
    "lstm": lambda width: Recurrent(width, nn.LSTM),
    "conv": lambda width: Convolution(width, 1),
    "grouped conv": lambda width: Convolution(width, HEADS),
    "weight norm": lambda width: Parametrized(width, nn.utils.parametrizations.weight_norm),
    "spectral norm": lambda width: Parametrized(width, nn.utils.parametrizations.spectral_norm),
    "average": Averaged,
    "image": Image,
    **{f"returns {how}": lambda width, how=how: Returning(width, how) for how in ("tuple", "dict", "none")},
}  # fmt: skip


def plain(returned: Any) -> T:
    """The hidden state among what a block returned."""
    if isinstance(returned, dict):
        return returned["hidden"]
    return returned[0] if isinstance(returned, tuple) else returned
