"""Blocks that change lists and dicts which they are given, under zero3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import losses_of
from kept_ranks import KeptRanks
from torch import nn

from evenly.parallel.core.argument_containers import ArgumentContainers


class Caching(nn.Module):
    """Reads and writes a cache at a place that it moves, as the causal convolutions of video autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: list[Any], place: list[int], seen: dict[str, Any]) -> torch.Tensor:
        before = cache[place[0]]
        cache[place[0]] = x
        place[0] += 1
        seen.setdefault("deep", [[]])[0].append(len(cache))
        seen["last"] = x.mean()
        return x + self.linear(x if before is None else x + before)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[Any] = [None] * 3
        seen: dict[str, Any] = {"first": x}
        for piece in x.split(2, dim=1):
            place = [0]
            for block in self.blocks:
                piece = block(piece, cache, place=place, seen=seen)
            cache.append(piece)
        assert place == [3] and len(seen["deep"][0]) == 9 and seen["first"] is x
        return torch.stack(cache[3:]) * seen["last"]


def losses(plan: str) -> list[float]:
    torch.manual_seed(1)
    data = [torch.randn(6, 6) for _ in range(10)]
    return losses_of(Model, data, plan, global_batch=5, microbatch=1, precision="float32")


@pytest.mark.parametrize("plan", ["zero3", "zero3 exact=bitwise"])
def test_what_a_block_changes_in_its_containers_reaches_its_caller(plan: str, ranks: KeptRanks) -> None:
    (expected,) = ranks.run(losses, "single", size=1)
    for found in ranks.run(losses, plan, size=2):
        assert found == pytest.approx(expected, rel=1e-5)


class Broken(nn.Module):
    def forward(self, given: list[int]) -> None:
        given.append(1)
        raise ValueError("broken off")


def test_a_forward_that_is_broken_off_is_not_under_way() -> None:
    unit = Broken()
    containers = ArgumentContainers(unit)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken off"):
            unit([])
    assert containers._pairs == [] and containers._given == []
