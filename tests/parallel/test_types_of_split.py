"""A tensor that takes the type or the shape of a split one does not take its layout: attention under tensor=2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn.functional import cross_entropy

import evenly

T = torch.Tensor
# Of slopes of the heads (4) and scores (b, 4, t, t) a bias that is added to the scores, of positions (t, t).
BIASES: dict[str, Callable[[T, T, T], T]] = {
    "to": lambda slopes, s, at: slopes.to(s)[:, None, None] * at,
    "to by name": lambda slopes, s, at: slopes.to(tensor=s)[:, None, None] * at,
    "type_as": lambda slopes, s, at: slopes.type_as(s).view(-1, 1, 1) * at,
    "type": lambda slopes, s, at: slopes.type(s.dtype)[:, None, None] * at,
    "new_tensor": lambda _, s, at: s.new_tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None] * at,
    "new_full": lambda slopes, s, at: s.new_full((4, 1, 1), 0.5) * at * slopes.double()[:, None, None],
    "new_zeros": lambda slopes, s, at: s.new_zeros(4).add(slopes)[:, None, None] * at,
    "zeros_like": lambda slopes, s, at: torch.zeros_like(s) + slopes[:, None, None] * at,
    "full_like": lambda slopes, s, at: torch.full_like(s, 0.5) * slopes[:, None, None] * at,
    "expand_as": lambda slopes, s, at: (slopes[:, None, None] * at).expand_as(s).type_as(s),
    "positions": lambda slopes, s, at: at.to(s) * slopes[:, None, None].to(s),
    "split to whole": lambda slopes, s, at: s.to(slopes.double()) * 0.1 + slopes[:, None, None] * at,
}


class Block(nn.Module):
    def __init__(self, bias: str) -> None:
        super().__init__()
        self.norm, self.bias = nn.LayerNorm(16), bias
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5))

    def forward(self, x: T) -> T:
        b, t, _ = x.shape
        q, k, v = (m(self.norm(x)).view(b, t, 4, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        s = q @ k.transpose(-2, -1) / 2
        at = torch.arange(t, device=x.device)
        s = s + BIASES[self.bias](self.slopes, s, at[None] - at[:, None])
        return x + self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, 16))


class Net(nn.Module):
    def __init__(self, bias: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layers = nn.ModuleList(Block(bias) for _ in range(2))

    def forward(self, ids: T) -> T:
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.head(x)


IDS = torch.randint(0, 20, (12, 6), generator=torch.Generator().manual_seed(1))


def trained(bias: str) -> list[float]:
    """The losses under tensor=2."""
    job = evenly.Job(
        model=lambda: Net(bias),
        loss=lambda m, b: cross_entropy(m(b).flatten(0, 1), b.flatten()),
        data=IDS,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        global_batch=6,
        microbatch=3,
        shuffle=False,
        steps=3,
        precision="float64",
    )
    with evenly.start(job, plan="tensor=2") as run:
        assert run.composed.sharded > 0
        found = [run.step(batch).loss for batch in run.batches()]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def plain(bias: str) -> list[float]:
    model, found = Net(bias).double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        ids = IDS[6 * (step % 2) :][:6]
        optimizer.zero_grad()
        loss = cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def losses_of(biases: list[str]) -> dict[str, list[float]]:
    return {bias: trained(bias) for bias in biases}


@pytest.mark.parametrize(
    "biases", [["to", "type_as"], pytest.param([*BIASES], marks=pytest.mark.full)], ids=["two", "all"]
)
def test_a_type_of_a_split_tensor_brings_no_layout(biases: list[str], ranks: KeptRanks) -> None:
    for found in ranks.run(losses_of, biases, size=2):
        for bias, losses in found.items():
            assert losses == pytest.approx(plain(bias), rel=1e-9), bias
