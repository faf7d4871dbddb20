"""Which parts of a model are gathered together, what is refused, and resuming under another plan."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Tower, token_loss, tower_job
from jobs_pipeline import Chain, text_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.errors import PlanError
from evenly.model.blocks import find_blocks
from evenly.parallel.data import grouping, shard_collectives
from evenly.parallel.data.grouping import SMALL_BYTES, UnitMembers, are_units, stay_gathered, unit_members
from evenly.parallel.data.shards import units_of


def test_a_block_that_shares_parameters_with_others_is_no_unit() -> None:
    model = Tower()
    assert [unit.name for unit, _ in units_of(model, find_blocks(model))] == ["blocks.0", "blocks.1", "blocks.2"]
    model.blocks[1].feed[0].weight = model.blocks[0].feed[0].weight
    assert [unit.name for unit, _ in units_of(model, find_blocks(model))] == ["blocks.2"]
    model.blocks[2].gate = nn.Parameter(torch.zeros(11, 6))
    model.embed.weight = model.blocks[2].gate
    assert units_of(model, find_blocks(model)) == []


def test_blocks_that_are_small_together_are_no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.parallel.data.grouping.SMALL_BYTES", 10)
    assert are_units([5, 9, 3, 11, 3]) == [True, True, False, True, False]  # the 5 would be too much
    assert are_units([5, 5, 5]) == [False, False, True]
    assert are_units([11]) == [True] and are_units([10]) == [False] and are_units([]) == []
    monkeypatch.undo()
    model = Tower()
    assert units_of(model, find_blocks(model)) == []
    assert model.blocks[0].feed[0].weight.nbytes < SMALL_BYTES


def test_what_the_backward_begins_with_stays_whole_as_far_as_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.parallel.data.grouping.WHOLE_BYTES", 10)
    assert stay_gathered([1, 7, 4, 6]) == [False, False, True, True]  # the 1 is asked for after the 7
    assert stay_gathered([11]) == [False] and stay_gathered([]) == []


def test_units_follow_from_names_and_sizes() -> None:
    tied = [(("a.weight", "head.weight"), 8), (("a.bias",), 4), (("b.weight", "b.again"), 8), (("norm",), 2)]
    assert unit_members(tied, ["a", "b", "empty"]) == [UnitMembers("b", (2,), whole=False)]


def test_parameters_shared_inside_a_block_leave_it_a_unit() -> None:
    model = Tower()
    for block in model.blocks:
        block.again = block.feed
    assert len(units_of(model, find_blocks(model))) == 3


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3, dtype=torch.bfloat16)


def refused(model: type[nn.Module]) -> str:
    try:
        with evenly.start(tower_job(model=model), plan="zero3"):
            return "nothing"
    except PlanError as problem:
        return str(problem)


def test_what_cannot_be_cut_is_refused(ranks: KeptRanks) -> None:
    assert all("several dtypes: bfloat16, float32" in text for text in ranks.run(refused, Mixed, size=2))


def train(plan: str, steps: int, out: Path | None, resume: bool) -> dict[str, Any]:
    with evenly.start(tower_job(), plan=f"{plan} exact=bitwise", out=out, steps=steps, resume=resume) as run:
        for batch in run.batches():
            run.step(batch)
        if out is not None:
            run.evaluate()
            run.save()
        return {name: run.composed.full_view(name, p.detach()).clone() for name, p in run.model.named_parameters()}


@pytest.mark.full_but("first0-then0")
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("zero3", 2), ("zero1", 3)),
        (("zero2", 2), ("zero3", 3)),
        (("single offload=optimizer", 1), ("zero1 offload=optimizer", 3)),
        (("zero3 offload=parameters", 2), ("zero2 offload=optimizer", 2)),
        (("zero3 offload=optimizer", 2), ("single offload=optimizer", 1)),
    ],
)
def test_a_run_goes_on_under_another_plan_with_the_same_bits(
    first: tuple[str, int], then: tuple[str, int], ranks: KeptRanks, tmp_path: Path
) -> None:
    (expected,) = ranks.run(train, "single", 6, None, False, size=1)
    ranks.run(train, first[0], 3, tmp_path, False, size=first[1])
    for found in ranks.run(train, then[0], 6, tmp_path, True, size=then[1]):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class WithGain(Tower):
    """Has a parameter without dims, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, batch: Any) -> Any:
        return super().forward(batch) * self.gain + self.nothing.sum()


def train_with_gain(
    plan: str, steps: int, out: Path | None, resume: bool, precision: str = "float64"
) -> tuple[dict[str, torch.Tensor], float]:
    with evenly.start(
        tower_job(model=WithGain, precision=precision, clip_norm=0.1), plan=plan, out=out, steps=steps, resume=resume
    ) as run:
        norm = 0.0
        for batch in run.batches():
            norm = run.step(batch).grad_norm
        if out is not None:
            run.save()
        return {
            name: run.composed.full_view(name, p.detach()).clone() for name, p in run.model.named_parameters()
        }, norm


def test_a_parameter_without_dims_is_whole_on_all_ranks(ranks: KeptRanks, tmp_path: Path) -> None:
    (expected, norm), _ = ranks.run(train_with_gain, "ddp", 4, None, False)
    ranks.run(train_with_gain, "zero3", 2, tmp_path, False)
    for found, its_norm in ranks.run(train_with_gain, "zero3", 4, tmp_path, True):
        assert abs(float(expected["gain"]) - 0.7) > 1e-4  # it was trained
        assert its_norm == pytest.approx(norm, rel=1e-9)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


def test_a_parameter_without_dims_has_the_bits_of_one_device(ranks: KeptRanks) -> None:
    ((expected, norm),) = ranks.run(train_with_gain, "single exact=bitwise", 4, None, False, "float32", size=1)
    for found, its_norm in ranks.run(train_with_gain, "zero3 exact=bitwise", 4, None, False, "float32", size=3):
        assert its_norm == norm
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def talk_of_a_step(whole_bytes: int = 0) -> tuple[list[str], set[tuple[torch.dtype, torch.dtype]]]:
    """The order in which forwards enter blocks and gathers are begun; what is sent and what it is added in."""
    grouping.WHOLE_BYTES = whole_bytes
    order: list[str] = []
    types: set[tuple[torch.dtype, torch.dtype]] = set()
    gather, add, exchange = (
        shard_collectives.post_all_gather,
        shard_collectives.ExactSum.add,
        shard_collectives.exchange.begin,
    )
    sent: list[torch.dtype] = []
    with evenly.start(tower_job(steps=1, precision="float32"), plan="zero3 exact=bitwise") as run:
        for name, block in run.model.blocks.named_children():  # pyright: ignore
            block.register_forward_pre_hook(lambda *_, name=name: order.append(name))

        def gathered(*arguments: Any, **named: Any) -> Any:
            order.append("gather")
            return gather(*arguments, **named)

        def exchanged(packed: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            sent.append(packed.dtype)
            return exchange(packed, *arguments, **named)

        def added(total: Any, values: torch.Tensor, start: int = 0) -> None:
            types.add((values.dtype, total.high.dtype))
            add(total, values, start)

        shard_collectives.post_all_gather, shard_collectives.exchange.begin = gathered, exchanged  # pyright: ignore
        shard_collectives.ExactSum.add = added  # pyright: ignore
        try:
            run.step(next(run.batches()))
        finally:
            shard_collectives.post_all_gather, shard_collectives.exchange.begin, shard_collectives.ExactSum.add = (
                gather,
                exchange,
                add,
            )
            grouping.WHOLE_BYTES = 0
    assert {*sent} == {torch.float32}
    return order, types


def test_blocks_are_gathered_ahead_and_gradients_sent_as_narrow_as_they_are(ranks: KeptRanks) -> None:
    for order, types in ranks.run(talk_of_a_step):
        # The root's, then one ahead.
        assert order[: order.index("2") + 1] == ["gather", "gather", "gather", "0", "gather", "1", "2"]
        assert types == {(torch.float32, torch.float64)}


def test_a_block_that_stays_whole_is_not_gathered_for_its_backward(ranks: KeptRanks) -> None:
    (anew, _), *_ = ranks.run(talk_of_a_step)
    (kept, _), *_ = ranks.run(talk_of_a_step, 1 << 20)
    forwards = anew.count("2")
    assert (anew.count("gather"), kept.count("gather")) == (7 * forwards, 4 * forwards)


class OneLeftOut(Chain):
    """Leaves out one block, another in every microbatch: as many on all ranks, so that their gathers pair up."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        left = int(torch.randint(0, len(self.blocks), []))
        for number, block in enumerate(self.blocks):
            x = x if number == left else block(x)
        return x


class LayerDrop(Chain):
    """Leaves out each block but the first with a probability of one half."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == 0 or torch.rand([]) < 0.5:
                x = block(x)
        return x


class PastTheHooks(Chain):
    """Calls the forward of its blocks, not the blocks."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class LeavesOutLater(OneLeftOut):
    """Leaves none out in the forwards before the first step, for no reason that is seen in them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forwards = itertools.count(1)  # what is seen to count is put back after them

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return Chain.through(self, x, tokens) if next(self.forwards) < 5 else super().through(x, tokens)


def by_parts(model: Any, batch: Any) -> evenly.Loss:
    """Calls parts of the model, and never itself."""
    x = batch["inputs"]
    return token_loss(lambda _: model.head(model.norm(model.through(model.embed(x), x))), batch)  # type: ignore[arg-type]


def trained(
    model: type[Chain], plan: str, evaluates: bool = True, **fields: Any
) -> tuple[dict[str, torch.Tensor], float]:
    """All parameters after 3 steps of 3 microbatches, and the evaluation loss."""
    job = text_job(model=model, steps=3, global_batch=6, microbatch=2, precision="float64", **fields)
    with evenly.start(job, plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        tensors = {name: run.composed.full_view(name, p.detach()).clone() for name, p in run.model.named_parameters()}
        return tensors, run.evaluate().loss if evaluates else 0.0


@pytest.mark.parametrize("model", [OneLeftOut, LayerDrop, PastTheHooks])
def test_blocks_left_out_by_chance_or_called_past_hooks_are_gathered_at_once(
    model: type[Chain], ranks: KeptRanks
) -> None:
    expected, loss = ranks.run(trained, model, "ddp", model is LayerDrop)[0]
    for found, its_loss in ranks.run(trained, model, "zero3", model is LayerDrop):
        assert its_loss == pytest.approx(loss, rel=1e-12)
        assert all((found[name] - expected[name]).abs().max() < 1e-12 for name in expected)


def trained_by_parts(plan: str) -> tuple[dict[str, torch.Tensor], float]:
    return trained(Chain, plan, loss=by_parts)


def test_a_loss_may_call_parts_of_the_model(ranks: KeptRanks) -> None:
    expected, loss = ranks.run(trained_by_parts, "single", size=1)[0]
    for found, its_loss in ranks.run(trained_by_parts, "zero3", size=2):
        assert its_loss == pytest.approx(loss, rel=1e-12)
        assert all((found[name] - expected[name]).abs().max() < 1e-12 for name in expected)


def test_ranks_that_run_other_blocks_in_a_later_step_are_found(ranks: KeptRanks) -> None:
    """Each would compute with another block's parameters."""
    with pytest.raises(AssertionError, match="ranks ran different blocks"):
        ranks.run(trained, LeavesOutLater, "zero3", limit_s=100)


class Towers(nn.Module):
    """The blocks of the second tower get what the first computes and do not use it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

        def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
            return self.layer(x)

    def __init__(self) -> None:
        super().__init__()
        self.start, self.tower = nn.Linear(6, 6), nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.start(x)
        for block in self.tower:
            x = block(x, beside)
        return x


def start_of_towers(plan: str) -> torch.Tensor:
    """A weight that no loss depends on, after two steps that would decay it."""
    job = evenly.Job(
        model=Towers,
        loss=lambda model, batch: model(batch).square().mean(),
        data=[torch.full((6,), float(number)) for number in range(8)],  # type: ignore[arg-type]
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.5),
        global_batch=4,
        microbatch=2,
        steps=2,
    )
    with evenly.start(job, plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        return run.composed.full_view("start.weight", run.model.start.weight.detach()).clone()


def test_what_a_block_gets_and_does_not_use_is_not_stepped(ranks: KeptRanks) -> None:
    [expected, _], [found, _] = ranks.run(start_of_towers, "ddp"), ranks.run(start_of_towers, "zero3")
    assert torch.equal(found, expected)


class EverySecondTime(Chain):
    """Runs its last block in every second forward only, which is gathered ahead in all."""

    forwards = 0

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        for block in [*self.blocks][: len(self.blocks) - (self.forwards + 1) % 2]:
            x = block(x)
        return x


def train_every_second_time(plan: str) -> dict[str, torch.Tensor]:
    EverySecondTime.forwards = 0
    job = text_job(model=EverySecondTime, eval_data=None, steps=4, global_batch=8, microbatch=2, precision="float64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenly.train.run.check_model", lambda *_: {})  # which refuses it
        run = evenly.start(job, plan=plan)
    with run:
        for batch in run.batches():
            run.step(batch)
        return {name: run.composed.full_view(name, p.detach()).clone() for name, p in run.model.named_parameters()}


def test_what_is_gathered_ahead_and_not_run_is_not_used_later(ranks: KeptRanks) -> None:
    """Of two microbatches per rank and step the first runs the block, which so is updated, and the second does not."""
    expected = ranks.run(train_every_second_time, "ddp")[0]
    for found in ranks.run(train_every_second_time, "zero3"):
        assert all((found[name] - expected[name]).abs().max() < 1e-12 for name in expected)
