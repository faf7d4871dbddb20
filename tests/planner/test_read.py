"""Reading models by a run without numbers: what is kept, what is passed on, and what cannot be read."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from evenly.data.nest import tensors_in
from evenly.errors import UserError
from evenly.model.parts import OpCost
from evenly.parallel.core.memory import MemoryCounter
from evenly.planner.optimizer_costs import optimizer_costs
from evenly.planner.profile import Profile, between, blended, parts_of, scaled
from evenly.planner.profile_recorder import profile_module
from evenly.planner.sample_line import SampleLine

WIDTH, SAMPLES = 8, 4


class Tower(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class TwoTowers(nn.Module):
    """Without an order among their blocks, and with a buffer and a head that is tied to what both begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.right.enter.weight = self.left.enter.weight
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x) + self.right(x)) * self.scale


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * 2 if y.sum() > 0 else y


class OfLengths(nn.Module):
    """Its shapes follow from numbers of the batch: packed sequences, a mask as index, one number."""

    def __init__(self) -> None:
        super().__init__()
        self.states = nn.GRU(5, WIDTH, bidirectional=True)
        self.leave = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed, _ = self.states(pack_padded_sequence(x, lengths, enforce_sorted=False))
        states, _ = pad_packed_sequence(packed)
        there = torch.arange(int(lengths.max()))[:, None] < lengths
        return torch.cat(
            [self.leave(states[there]), self.leave(states.masked_select(there[..., None]).view(-1, 2 * WIDTH))]
        )


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().sum()


def read(model: nn.Module, samples: int = SAMPLES, **how: Any) -> Profile:
    return profile_module(model, loss, torch.empty(samples, 5), **how)


def most(profile: Profile) -> int:
    now = peak = 0
    for one in profile.intervals:
        peak, now = max(peak, now + one.peak.total), now + one.left.total
    assert now == 0, "all that was made is freed"
    return peak


def counted(model: nn.Module, loss: Callable[..., torch.Tensor] = loss, batch: Any = None) -> int:
    """The most that forward and backward really hold beside parameters, each gradient freed when it is there."""
    batch = torch.randn(SAMPLES, 5) if batch is None else batch
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    with MemoryCounter() as counter:
        counter.track((*model.parameters(), *model.buffers(), *tensors_in(batch)), "parameters")
        held = counter.now[0, "parameters"]
        loss(model, batch).backward()
    return counter.peak_bytes(0) - held


@pytest.mark.parametrize("build", [Tower, TwoTowers, lambda: nn.Linear(5, 3)])
def test_a_reading_holds_what_a_run_holds(build: Callable[[], nn.Module]) -> None:
    profile = read(build())
    assert most(profile) == counted(build())


def test_shapes_may_follow_from_numbers_of_the_batch() -> None:
    lengths = torch.tensor([2, 5, 3, 0])
    x = torch.randn(int(lengths.max()), len(lengths), 5)

    def summed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"], batch["lengths"].clamp_(min=1)).square().sum()

    batch = {"x": x, "lengths": lengths.clone()}
    profile = profile_module(OfLengths(), summed, batch)
    products = [one for works in profile.works.values() for one in works if one.inner == 2 * WIDTH]
    assert {one.rows for one in products} == {int(lengths.sum()) + 1}
    assert torch.equal(batch["lengths"], lengths)
    assert most(profile) == counted(OfLengths(), summed, batch)


def test_a_model_on_the_meta_device_is_read_alike() -> None:
    with torch.device("meta"):
        model = Tower()
    assert read(model) == read(Tower())


def test_every_parameter_belongs_to_one_part() -> None:
    parts = parts_of(read(Tower()))
    assert [block.parameters for block in parts.blocks] == [WIDTH * WIDTH + WIDTH] * 3
    assert parts.before.parameters == 5 * WIDTH + WIDTH
    assert parts.after.parameters == WIDTH * 3 + 3
    assert {block.input_bytes for block in parts.blocks} == {SAMPLES * WIDTH * 4}


def test_products_are_known_by_their_sizes() -> None:
    block = parts_of(read(Tower())).blocks[1]
    (product,) = [work for work in block.forward if work.kind == "matmul"]
    assert (product.rows, product.inner, product.columns) == (SAMPLES, WIDTH, WIDTH)
    assert product.flops == 2 * SAMPLES * WIDTH * WIDTH
    assert sum(work.flops * work.times for work in block.backward) == 2 * product.flops
    (of_weight,) = [work for work in block.backward if work.of_weights]
    assert (of_weight.rows, of_weight.inner, of_weight.columns) == (WIDTH, SAMPLES, WIDTH)
    assert not any(work.of_weights for work in block.forward)


@pytest.mark.parametrize(
    ("asked", "known", "causal", "share"),
    [(8, 8, False, 1), (8, 8, True, 1 / 2), (4, 8, True, 1 / 4), (8, 4, True, 3 / 4)],
)
def test_causal_attention_looks_at_some_pairs_of_tokens(asked: int, known: int, causal: bool, share: float) -> None:
    def attended(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        query, states = (model(one).unflatten(-1, (2, 3)).transpose(1, 2) for one in batch)
        return F.scaled_dot_product_attention(query, states, states, is_causal=causal).sum()

    lengths = [torch.empty(2, length, 5) for length in (asked, known)]
    parts = parts_of(profile_module(nn.Linear(5, 6), attended, lengths))
    for works, products in ((parts.after.forward, 2), (parts.after.backward, 5)):
        [work] = [work for work in works if work.kind == "attention"]
        assert (work.flops, work.looked_at) == (products * 2 * 3 * 2 * 2 * asked * known, share)


def test_only_what_reads_or_writes_memory_counts_as_moving_bytes() -> None:
    """Whatever asks a tensor where it is, reshapes it or makes room for one moves nothing and starts no kernel."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())
    tower = nn.Sequential(nn.Linear(5, WIDTH), nn.Sequential(layer, *(deepcopy(layer) for _ in range(2))))
    profile = profile_module(tower, loss, torch.empty(SAMPLES, 3, 5))
    block = parts_of(profile).blocks[1]
    activation = SAMPLES * 3 * WIDTH * 4
    moved = [(work.times, work.moved_bytes) for work in block.forward if work.kind == "memory"]
    assert moved == [(1, 2 * activation)]  # GELU
    assert [(work.times, work.moved_bytes) for work in block.backward if work.kind == "memory"] == [(1, 3 * activation)]


def test_the_backward_of_every_call_begins_and_ends_in_its_turn() -> None:
    events = [one.event for one in read(Tower()).intervals if one.event.stage == "backward" and one.event.call >= 0]
    edges = [(event.what, event.call) for event in events if event.what in ("begin", "end")]
    assert edges == [("begin", 2), ("end", 2), ("begin", 1), ("end", 1), ("begin", 0), ("end", 0)]


def test_tied_weights_and_buffers_count_once() -> None:
    profile = read(TwoTowers())
    assert profile.parameters["left.enter.weight"].names == ("left.enter.weight", "right.enter.weight")
    assert "right.enter.weight" not in profile.parameters
    assert profile.buffer_bytes == 3 * 4


def test_costs_are_linear_in_samples() -> None:
    found = between(read(Tower(), 2), read(Tower(), 6), 4 * 5)
    assert found.intervals == read(Tower(), 4).intervals
    assert [call.input_bytes for call in found.calls] == [4 * WIDTH * 4] * 3


def test_a_profile_is_scaled_to_more_than_it_has() -> None:
    four, whole = read(Tower(), 4), read(Tower(), 6)
    found = scaled(four, 6 * 5)
    assert found.elements == whole.elements and between(four, read(Tower(), 4), 6 * 5) == found
    assert flops_of(found) == pytest.approx(flops_of(whole))


def test_profiles_of_as_many_elements_are_blended() -> None:
    low, high = scaled(read(Tower(), 2), 20), read(Tower(2), 4)
    assert blended(low, high, 0.25) is high  # another model
    high = replace(low, works={key: tuple(map(thrice, works)) for key, works in low.works.items()})
    assert flops_of(blended(low, high, 0.25)) == pytest.approx(1.5 * flops_of(low))


def flops_of(profile: Profile) -> float:
    return sum(one.flops for works in profile.works.values() for one in works)


def thrice(work: OpCost) -> OpCost:
    return replace(work, flops=3 * work.flops)


def test_profiles_between_measured_ones_follow_where_three_lie_on_a_line() -> None:
    model, line, measured = Tower(), SampleLine(), list[int]()

    def at(samples: int) -> Profile:
        def measure() -> Profile:
            measured.append(samples)
            return read(model, samples)

        return line.at(samples, samples * 5, measure)

    for samples in (40, 10, 20, 15, 30, 15, 5):
        found, exact = at(samples), read(model, samples)
        assert (found.intervals, found.calls, found.output_bytes) == (exact.intervals, exact.calls, exact.output_bytes)
    assert measured == [40, 10, 20, 5]  # nothing is known of what lies outside


def test_profiles_on_no_line_are_measured() -> None:
    class Bends(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.ones(max(0, len(x) - 15) * 10 + 1).sum()

    line, measured = SampleLine(), list[int]()

    def at(samples: int) -> None:
        def measure() -> Profile:
            measured.append(samples)
            return read(Bends(), samples)

        line.at(samples, samples * 5, measure)

    for samples in (40, 10, 20, 30):
        at(samples)
    assert measured == [40, 10, 20, 30]


def test_operations_may_lie_on_a_line_where_what_is_held_does_not() -> None:
    class Bends(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.ones(40, 100).amax())  # more than few samples hold, and freed again

    line, measured = SampleLine(), list[int]()

    def at(samples: int, *, held: bool) -> Profile:
        def measure() -> Profile:
            measured.append(samples)
            return read(Bends(), samples)

        return line.at(samples, samples * 5, measure, held=held)

    for samples in (420, 10, 200):
        at(samples, held=False)
    found, exact = at(100, held=False), read(Bends(), 100)
    assert measured == [420, 10, 200] and found.calls == exact.calls and found.intervals != exact.intervals
    assert [sum(work.flops for work in one) for one in found.works.values()] == pytest.approx(
        [sum(work.flops for work in one) for one in exact.works.values()]
    )
    assert at(100, held=True) == exact and measured[3:] == [100]


def test_code_that_looks_at_numbers_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs numbers"):
        read(Looks())


def test_what_is_written_by_the_model_has_no_numbers_either() -> None:
    class Writes(Looks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            kept = torch.zeros(3)
            kept.copy_(y[0].detach())
            return y * 2 if kept.sum() > 0 else y

    with pytest.raises(UserError, match=r"needs numbers"):
        read(Writes())


def test_a_loss_apart_from_the_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"does not depend"):
        profile_module(Tower(), lambda model, batch: batch.sum(), torch.empty(2, 5))


def test_reading_leaves_model_and_random_numbers_alone() -> None:
    model = Tower()
    before = [parameter.clone() for parameter in model.parameters()]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    read(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "element", "other"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 0, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 4, 0),
        (torch.optim.AdamW, {}, 8, 4),
        (torch.optim.Adafactor, {}, 0, 4 + 4 * (6 + 10)),
    ],
)
def test_what_an_optimizer_keeps(kind: Any, settings: dict[str, Any], element: int, other: int) -> None:
    parameter = nn.Parameter(torch.zeros(6, 10))
    optimizer = kind([("weight", parameter)], **settings)
    costs = optimizer_costs(optimizer, {id(parameter): "weight"})
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    really = sum(value.nbytes for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
    assert costs.bytes({"weight": (6, 10)}) == really == math.prod((6, 10)) * element + other
