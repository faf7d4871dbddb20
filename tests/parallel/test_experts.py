"""Mixtures of experts under the tensor axis, in the forms that libraries have, held against one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.parallel.tensor.indexing import Item, items_of, sources_of
from evenly.parallel.tensor.splits import derive, select
from evenly.parallel.tensor.trace import trace

EXPERTS, WIDTH, INNER = 4, 8, 16


class Mixture(nn.Module):
    """Two experts of four for every token, and a loss that balances them.

    how: `modules` in a list; one weight of all for a `loop` over the experts that were hit, for `batched` products of
    the weights of every token, for `grouped` ones of the tokens of every weight.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Linear(WIDTH, EXPERTS)
        if how == "modules":
            layers = [(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)]
            self.experts = nn.ModuleList(nn.Sequential(*three) for three in layers)
        else:
            self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * INNER, WIDTH))
            self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        often = F.one_hot(chosen, EXPERTS).sum((0, 1)).to(x.dtype) / len(x)
        ways = {"modules": self._looped, "loop": self._looped, "batched": self._batched, "grouped": self._grouped}
        return ways[self.how](x, weights, chosen), (often * scores.mean(0)).sum()

    def _expert(self, which: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.how == "modules":
            return self.experts[which](x)
        gate, up = F.linear(x, self.up[which]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[which])

    def _looped(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for (which,) in mask.sum((-1, -2)).gt(0).nonzero():
            place, token = torch.where(mask[which])
            out.index_add_(0, token, self._expert(which, x[token]) * weights[token, place, None])
        return out

    def _batched(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        each = chosen.reshape(-1)
        tokens = x.repeat_interleave(2, 0).unsqueeze(-1)
        gate, up = torch.bmm(self.up[each], tokens).squeeze(-1).chunk(2, -1)
        down = torch.bmm(self.down[each], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (down * weights.reshape(-1, 1)).view(-1, 2, WIDTH).sum(1)

    def _grouped(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        each, order = chosen.reshape(-1).sort(stable=True)
        ends = torch.histc(each.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // 2], self.up.transpose(-2, -1), offs=ends).chunk(2, -1)
        down = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)
        return torch.zeros_like(x).index_add(0, order // 2, down * weights.reshape(-1)[order, None])


def job_of(how: str) -> evenly.Job:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        out, balance = model(x)
        return (out - x.roll(1, 1)).square().mean() + 0.1 * balance

    return evenly.Job(
        model=partial(Mixture, how), loss=loss, data=torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3)),
        optimizer=partial(torch.optim.SGD, lr=0.3), global_batch=6, microbatch=3, steps=4,
        precision="float32" if how == "grouped" else "float64",  # grouped products take no float64
    )  # fmt: skip


def trained(how: str, plan: str) -> tuple[dict[str, torch.Tensor], float]:
    """The parameters after four steps, and the share that is split."""
    with evenly.start(job_of(how), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        full = {name: run.composed.full_view(name, p.detach()).clone() for name, p in run.model.named_parameters()}
        return full, run.composed.sharded


@pytest.mark.parametrize("how", ["modules", "loop", "batched", "grouped"])
def test_experts_are_split_and_compute_what_one_device_does(how: str, ranks: KeptRanks) -> None:
    ((expected, _),) = ranks.run(trained, how, "single", size=1)
    close = 1e-5 if how == "grouped" else 1e-12
    for found, share in ranks.run(trained, how, "tensor=2"):
        assert share > 0.85
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() < close, name


def test_an_expert_that_no_token_chose_is_split_as_another_is() -> None:
    model = Mixture("modules")
    traced = trace(model, lambda m, x: sum(one.sum() for one in m(x)), torch.randn(3, WIDTH))
    taken = {index for call in traced.calls for index in call.inputs}
    assert any(index not in taken for index in traced.parameters.values())
    wanted = {f"experts.{n}.{at}.weight" for n in range(EXPERTS) for at in (0, 2)}
    assert select(derive(traced), 2, ()).splits.keys() >= wanted


# -------------------------------------------------------------------------------------------------------------- indices
IDS, MASK = torch.tensor([2, 0, 1, 1]), torch.tensor([[True, False, True], [False, True, False]])
INDICES: dict[str, Any] = {
    "number": (1,),
    "slices": (slice(1, None), slice(None), None, ..., 2),
    "ids": IDS,
    "ids behind": (slice(None), IDS),
    "ids last": (..., IDS),
    "number and ids": (1, slice(None), IDS),
    "ids twice": (slice(None), IDS, IDS),
    "ids apart": (IDS, slice(None), IDS),
    "ids apart at the end": (slice(None), IDS, slice(None), IDS),
    "ids of two dims": (slice(None), slice(None), IDS.view(2, 2)),
    "ids and none": (IDS, None, IDS),
    "mask": MASK,
    "mask behind": (..., MASK.T),
    "mask and ids": (slice(None), slice(None), MASK[0], IDS[:2]),
    "one id": (torch.tensor(1), slice(None), IDS),
}


@pytest.mark.parametrize("name", INDICES)
def test_where_dims_go_under_an_index(name: str) -> None:
    index, shape = INDICES[name], (2, 3, 3, 4) if "behind" not in name else (4, 3, 3, 2)
    shape = (3, 3, 3, 3) if name not in ("mask", "mask behind") else shape

    def tensor_item(one: torch.Tensor) -> Item:
        mask = one.dtype == torch.bool
        return Item("tensor", one.dim() if mask else 1, one) if one.dim() else Item("number", 1, one)

    items = items_of(index, len(shape), tensor_item)
    assert items is not None
    result = torch.zeros(shape)[index]
    places = sources_of(items, result.dim() - sum(item.kind in ("slice", "new") for item in items))
    at = 0
    for item in items:
        if item.kind == "slice" and item.value == slice(None):
            ruler = torch.arange(shape[at]).view([-1 if dim == at else 1 for dim in range(len(shape))])
            found, place = ruler.expand(shape)[index], places.index(at)
            assert torch.equal(found.movedim(place, -1), torch.arange(shape[at]).expand(found.movedim(place, -1).shape))
        at += item.takes
    assert len(places) == result.dim()
