"""Training in stages on several ranks, held against one device."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from jobs_pipeline import (
    LAYERS,
    LONGEST,
    PIPELINE_JOBS,
    WIDTH,
    Block,
    Chain,
    ConvolutionNet,
    Tied,
    points_job,
    text_job,
)
from kept_ranks import KeptRanks, RankFailure
from kept_references import References
from torch import nn

import evenly
from evenly.data.loader import microbatches_of_step
from evenly.errors import EvenlyError
from evenly.parallel.data.partition import PartitionedGradients
from evenly.parallel.pipeline.messages import StageChannel
from evenly.parallel.pipeline.orders import orders
from evenly.plan import parse_plan
from evenly.plan.schedule import COMPUTE, ActionSpan
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_measured_reference, measure_again

STEPS = 3  # the last has the short batch of the epoch
FIRST = 35  # the token that the first microbatch begins with, and none of the next steps


class TurnedBlock(nn.Module):
    """Mixes positions (B, 16, 15): what it returns, and the gradient of what it gets, is transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(LONGEST - 1), nn.Linear(LONGEST - 1, LONGEST - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.norm(x.mT))).mT


class Turned(Chain):
    """At the ends of its stages tensors and gradients are transposed, or expanded."""

    def __init__(self) -> None:
        super().__init__(TurnedBlock() for _ in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x if number % 3 else x + x.mean(1, keepdim=True).expand_as(x))
        return x.sum(1, keepdim=True).expand_as(x) + x


class LaidOutBlock(nn.Module):
    """Its dropout draws in the order in which what it gets lies in memory; the view asks for that layout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.mix = nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)
        self.mix.weight = nn.Parameter(self.mix.weight.detach().T)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (B, L, 15), with B innermost in memory. kept: (B, L, 15), some part of a larger tensor, or expanded."""
        x = self.drop(x) + torch.randn_like(x) * 0.1
        flat = x.permute(1, 2, 0).view(x.shape[1], -1)
        x = flat.view(x.shape[1], x.shape[2], -1).permute(2, 0, 1)
        kept = self.drop(kept) + torch.rand_like(kept)
        mixed = nn.functional.linear(x.permute(1, 0, 2), self.drop(self.mix.weight), self.mix.bias)
        return torch.tanh(mixed).permute(0, 2, 1).contiguous().permute(2, 0, 1), kept


class LaidOut(Chain):
    """What stages send is permuted, sliced and expanded, and drawn for in that order, by remote stages too."""

    def __init__(self) -> None:
        super().__init__(LaidOutBlock() for _ in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        kept, scale = x, torch.ones(WIDTH, dtype=x.dtype)
        for number, block in enumerate(self.blocks):
            noise = torch.randn_like(x)
            scale = scale + 0.01 * torch.randn(WIDTH, dtype=x.dtype)
            wide = torch.cat([kept, kept], -1)
            x, kept = block(x + 0.1 * noise, wide.mT[:, ::2].mT if number % 2 else kept[:, :1].expand_as(kept))
        return (x + kept.mean(1, keepdim=True)) * scale


class Turning(nn.Sequential):
    """Its weights lie transposed in memory, and a dropout draws for them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 16), *(TurnedWeight() for _ in range(LAYERS)), nn.Linear(16, 3))


class TurnedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.mix.weight = nn.Parameter(self.mix.weight.detach().T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, nn.functional.dropout(self.mix.weight, 0.2), self.mix.bias))


class FrozenEnds(Chain):
    """Of four stages the first and the last have nothing to train; the first sends what requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.norm, self.head, *(self.blocks[number] for number in (0, 1, 6, 7))):
            part.requires_grad_(False)
        self.place.requires_grad_(False)


class FrozenMiddle(Chain):
    """Its second stage of four hands gradients on without any of its own."""

    def __init__(self) -> None:
        super().__init__()
        for number in (2, 3):
            self.blocks[number].requires_grad_(False)


class NotingBlock(Block):
    """Returns a note beside the hidden state, and looks at the note that it gets if it `reads`."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.note = reads, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, note: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = super().forward(x + note if self.reads else x)
        return x, self.note(x)


class Unread(Chain):
    """Notes come to the next stage, which does not read them: who wrote them has no gradient, not one of zeros."""

    def __init__(self) -> None:
        super().__init__(NotingBlock(reads=number not in (2, 4)) for number in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        note = torch.zeros_like(x)
        for block in self.blocks:
            x, note = block(x, note)
        return x


class OverwritingBlock(Block):
    """Changes what it is given, in place."""

    def forward(self, x: torch.Tensor, sight: torch.Tensor | None = None) -> torch.Tensor:
        x *= 0.9
        return super().forward(x.clamp_(min=-3.0), sight)


class Overwriting(Chain):
    def __init__(self) -> None:
        super().__init__(OverwritingBlock() for _ in range(LAYERS))


class Layers(nn.Sequential):
    """Layer after layer: over the tensor axis what every second one returns is split, also where a stage ends."""

    def __init__(self) -> None:
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS))
        super().__init__(nn.Linear(5, 16), *blocks, nn.Linear(16, 3))


class Rarely(Tied):
    """Two stages hold the gain; the first uses it for microbatches that begin with some token, the last always."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = x * self.gain if tokens[0, 0] == FIRST else x
        return super().through(x, tokens) * self.gain


class Leaves(Chain):
    """Leaves out a block by a draw in training, always."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == 3 and self.training and torch.rand([]) < 2 else block(x)
        return x


OWN_JOBS: dict[str, Callable[[], nn.Module]] = {
    "turned": Turned,
    "laid_out": LaidOut,
    "turning": Turning,
    "frozen_ends": FrozenEnds,
    "frozen_middle": FrozenMiddle,
    "unread": Unread,
    "overwriting": Overwriting,
    "rarely": Rarely,
    "leaves": Leaves,
    "layers": Layers,
}


def prepared(name: str, **changes: Any) -> evenly.Job:
    changes = {"precision": "float64", **changes}
    if name in OWN_JOBS:
        return (points_job if name in ("layers", "turning") else text_job)(model=OWN_JOBS[name], name=name, **changes)
    return PIPELINE_JOBS[name](**changes)


def compared(name: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(prepared(name), plan, STEPS, folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Of the jobs of this module."""
    return References(tmp_path_factory, prepared, STEPS)


@pytest.mark.full_but(
    "chain-mp-*",
    "skips-pipeline=2 *",
    "ragged-pipeline=2 *",
    "shared-*",
    "alternating-*",
    "tied-pipeline=2 *",
    "tied-data=2 pipeline=2 zero=3-*",
    "learned_bias-*",
    "layers-*split_points=4-*",
    "masked-*",
    "layerdrop-pipeline=2 *",
    "conv_norm-pipeline=2 *",
    "twice-*",
    "chain-pipeline=2 recompute=full-*",
    "chain-pipeline=2 offload=*",
    "frozen_ends-pipeline=2 *",
    "turned-pipeline=2 schedule=zbv*",
    "laid_out-pipeline=2 schedule=zbv*",
    "unread-pipeline=2 *",
    "rarely-pipeline=2-*",
    "overwriting-*",
)
@pytest.mark.parametrize(
    ("name", "plan", "size", "sharded"),
    [
        ("chain", "mp", 2, 0.98),
        ("skips", "pipeline=2 schedule=gpipe", 2, 0.98),
        ("several", "pipeline=4", 4, 0.95),  # the gain, which all use
        ("ragged", "pipeline=2 schedule=interleaved", 2, 0.98),
        ("ragged", "data=2 pipeline=2 zero=1", 4, 0.98),
        ("shared", "pipeline=2", 2, 0.2),  # the block is on both ranks
        ("alternating", "pipeline=2 schedule=looped-bfs", 2, 0.05),  # both blocks are on both ranks
        ("tied", "pipeline=2 schedule=zero-bubble", 2, 0.9),
        ("tied", "data=2 pipeline=2 zero=3", 4, 0.9),
        ("tied", "data=2 pipeline=2 zero=2 schedule=zbv", 4, 0.9),
        ("first_bias", "pipeline=2 schedule=zbv", 2, 0.98),
        ("learned_bias", "pipeline=2 schedule=dualpipev", 2, 0.98),
        ("branches", "pipeline=2 schedule=zero-bubble", 2, 0.98),
        ("branches", "data=2 pipeline=2", 4, 0.98),
        ("branches", "data=2 pipeline=2 zero=3 schedule=interleaved", 4, 0.98),
        ("towers", "pipeline=2 split_points=5", 2, 0.9),
        ("towers", "tensor=2 pipeline=2", 4, 0.9),
        ("chain", "tensor=2 pipeline=2 recompute=full", 4, 0.9),
        ("layers", "tensor=2 pipeline=2 split_points=4", 4, 0.9),
        ("layers", "tensor=2 pipeline=2 split_points=3", 4, 0.9),
        ("experts", "pipeline=2", 2, 0.98),
        ("lstm", "pipeline=2", 2, 0.98),
        ("gru", "data=2 pipeline=2 zero=3", 4, 0.98),
        ("lstm_layers", "data=2 pipeline=2 schedule=zbv", 4, 0.98),
        ("packed", "data=2 pipeline=2", 4, 0.98),
        ("selecting", "pipeline=2 schedule=zbv", 2, 0.98),
        ("masked", "pipeline=2", 2, 0.98),
        pytest.param("masked", "data=2 pipeline=2 zero=3", 4, 0.98, marks=pytest.mark.full),
        ("layerdrop", "pipeline=2 split_points=6", 2, 0.88),
        pytest.param("leaves", "pipeline=2", 2, 0.8, marks=pytest.mark.full),
        ("layerdrop", "data=2 pipeline=2 zero=1 schedule=zbv", 4, 0.98),
        ("experts", "data=2 pipeline=2 zero=1 schedule=zbv", 4, 0.98),
        ("whole_penalty", "pipeline=2 schedule=zbv", 2, 0.0),  # all of it is on all ranks
        ("whole_penalty", "data=2 pipeline=2 zero=1", 4, 0.9),
        ("conv_norm", "data=2 pipeline=2 zero=2", 4, 0.9),
        ("conv_norm", "pipeline=2 schedule=interleaved", 2, 0.9),  # a rank has the first stage, and a later one
        ("twice", "pipeline=2 schedule=gpipe split_points=4", 2, 0.48),
        ("chain", "pipeline=2 recompute=full", 2, 0.98),
        ("chain", "pipeline=2 schedule=zbv recompute=selective", 2, 0.98),
        ("first", "pipeline=2 schedule=zbv", 2, 0.98),
        ("chain", "pipeline=2 offload=optimizer", 2, 0.98),
        ("chain", "data=2 pipeline=2 zero=3 schedule=zero-bubble", 4, 0.98),
        ("several", "data=2 pipeline=2 zero=3 schedule=dualpipev", 4, 0.9),
        ("frozen_ends", "pipeline=4 split_points=2|4|6", 4, 0.98),
        ("frozen_ends", "pipeline=2 schedule=zbv split_points=2|4|6", 2, 0.98),
        ("frozen_middle", "data=2 pipeline=2 zero=1 schedule=interleaved split_points=2|4|6", 4, 0.98),
        ("turned", "pipeline=2 schedule=zbv split_points=2|4|5", 2, 0.98),
        ("turned", "pipeline=2 schedule=zero-bubble split_points=4", 2, 0.98),
        ("laid_out", "pipeline=2 schedule=zbv split_points=1|4|5", 2, 0.95),
        ("laid_out", "pipeline=2 schedule=zero-bubble split_points=4", 2, 0.95),
        ("laid_out", "pipeline=2 split_points=5 recompute=full", 2, 0.95),
        ("laid_out", "data=2 pipeline=2 zero=2 split_points=4", 4, 0.95),
        ("laid_out", "tensor=2 pipeline=2 split_points=5", 4, 0.5),
        ("turning", "data=2 pipeline=2 zero=3", 4, 0.9),
        ("turning", "tensor=2 pipeline=2", 4, 0.5),
        ("unread", "pipeline=2 split_points=4", 2, 0.98),
        ("unread", "data=2 pipeline=2 zero=1 schedule=zbv split_points=2|4|6", 4, 0.98),
        ("rarely", "pipeline=2", 2, 0.8),
        ("rarely", "data=2 pipeline=2 zero=1", 4, 0.8),
        ("overwriting", "pipeline=2 schedule=zbv", 2, 0.98),
        ("tied", "3d zero=3", 8, 0.9),
        ("skips", "3d schedule=interleaved", 8, 0.9),
    ],
)
def test_a_model_in_stages_computes_what_one_device_does(
    name: str, plan: str, size: int, sharded: float, references: References, ranks: KeptRanks
) -> None:
    row = judge(plan, ranks.run(compared, name, plan, references(name), size=size))
    assert row.status == "equal", row.reason
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert row.grad_norm_diff is not None and row.grad_norm_diff < 1e-11
    assert row.sharded is not None and row.sharded >= sharded


@pytest.mark.full_but("bfloat16-*")
@pytest.mark.parametrize(
    ("precision", "plan"),
    [
        ("float32", "pipeline=2 schedule=zbv"),
        ("bfloat16", "pipeline=2"),
        ("float16", "pipeline=2 schedule=zero-bubble"),
        ("pure-bfloat16", "data=2 pipeline=2 zero=3"),
    ],
)
def test_narrower_types_agree_up_to_rounding(precision: str, plan: str, tmp_path: Path, ranks: KeptRanks) -> None:
    job = prepared("several", precision=precision)
    keep_measured_reference(job, STEPS, tmp_path, ["sums"])
    compare = partial(ranks.run, compared_in, precision, plan, tmp_path, size=4 if "data" in plan else 2)
    row = judge(plan, compare())
    if row.status == "different":  # as `evenly verify`: one draw of rounding may miss what another processor rounds
        measure_again(job, STEPS, tmp_path, "sums")
        row = judge(plan, compare())
    assert row.status in ("equal", "rounding"), row.reason  # 16 bits may move a job further than shows anything
    assert row.bits_differ is None


def compared_in(precision: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(prepared("several", precision=precision), plan, STEPS, folder)


# ------------------------------------------------------------------------------------------------ who does what when
def spans(plan: str, out: Path) -> tuple[int, list[ActionSpan]]:
    """What this rank did in the third step, on 4 microbatches."""
    with evenly.start(prepared("chain", global_batch=12), plan=plan, out=out, steps=3) as run:
        for batch in run.batches():
            run.step(batch)
        rank = run.world.rank
    records = [json.loads(line) for line in (out / "timeline" / f"rank{rank}.jsonl").read_text().splitlines()]
    assert {record["step"] for record in records} == {3}
    return rank, [ActionSpan(*(record.get(key) for key in ActionSpan._fields)) for record in records]


@pytest.mark.full_but("mp", "pp schedule=zbv")
@pytest.mark.parametrize("plan", ["mp", "pp", "pp schedule=zbv"])
def test_a_step_is_what_the_schedule_says(plan: str, tmp_path: Path, ranks: KeptRanks) -> None:
    axis = parse_plan(plan).fit(2).complete("float32").pipeline
    expected = orders(axis.schedule, 2, axis.stages_per_rank, 4)
    for rank, found in ranks.run(spans, plan, tmp_path / "run"):
        assert [(span.kind, span.stage, span.microbatch) for span in found] == [
            (action.kind, action.stage, action.microbatch) for action in expected[rank]
        ]
        sent = Counter(span.kind for span in found if span.kind not in COMPUTE)
        there, back = ("send_forward", "recv_backward") if rank == 0 else ("recv_forward", "send_backward")
        if axis.schedule != "zbv":
            assert sent == {there: 4, back: 4}


def ends_of_backwards(plan: str) -> list[str]:
    """In which order this rank sends gradients of inputs and ends a backward, in a step."""
    order: list[str] = []
    send, end = StageChannel.send_gradients, PartitionedGradients.finish_backward
    with (
        mock.patch.object(StageChannel, "send_gradients", lambda *of, **how: (order.append("send"), send(*of, **how))),
        mock.patch.object(PartitionedGradients, "finish_backward", lambda one: (order.append("end"), end(one))),
        evenly.start(prepared("chain", global_batch=12), plan=plan, steps=1) as run,
    ):
        for batch in run.batches():
            run.step(batch)
        return [f"rank {run.composed.pipeline.group.position}", *order]  # pyright: ignore


def test_gradients_of_inputs_are_sent_before_the_data_axis_waits_for_others(ranks: KeptRanks) -> None:
    found = ranks.run(ends_of_backwards, "data=2 pipeline=2 zero=2", size=4)
    assert sorted(map(tuple, found)) == [*[("rank 0", "end", "end")] * 2, *[("rank 1", *["send", "end"] * 2)] * 2]


def test_naive_model_parallelism_never_computes_two_stages_at_once(tmp_path: Path, ranks: KeptRanks) -> None:
    found = [span for _, mine in ranks.run(spans, "mp", tmp_path / "run") for span in mine if span.kind in COMPUTE]
    in_turn = sorted(found, key=lambda span: span.begin_s)
    assert len(in_turn) == 2 * 2 * 4
    assert all(before.end_s <= after.begin_s for before, after in pairwise(in_turn))


# ----------------------------------------------------------------------------------------------------- memory, names
def held(name: str, plan: str) -> tuple[list[str], list[str], int, dict[str, bool]]:
    """Names of parameters held and stepped, elements of the optimizer's state, and which gradients there are."""
    with evenly.start(prepared(name), plan=plan, steps=1) as run:
        for batch in run.batches():
            run.step(batch)
        pipeline = run.composed.pipeline
        assert pipeline is not None
        with run.inside():
            named = dict(run.model.named_parameters())
            stepped = [name for name, parameter in named.items() if parameter in run.optimizer.state]
            elements = sum(t.numel() for kept in run.optimizer.state.values() for t in kept.values() if t.dim() > 0)
            assert not any(parameter.is_meta for group in run.optimizer.param_groups for parameter in group["params"])
        gradients = {name: gradient is not None for name, gradient in run.composed.gradients.named_gradients()}
        return [*named], stepped, elements, gradients


def test_each_rank_holds_and_steps_its_stages(ranks: KeptRanks) -> None:
    (first, stepped, elements, _), (last, also_stepped, more, _) = ranks.run(held, "tied", "pipeline=2")
    model = prepared("tied").model()
    assert {*first} | {*last} == {name for name, _ in model.named_parameters()}
    assert {*first} & {*last} == {"embed.weight"} and stepped == first and also_stepped == last
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert (elements, more) == tuple(2 * sum(sizes[name] for name in names) for names in (first, last))


def test_what_nothing_uses_has_no_gradient_on_any_stage(ranks: KeptRanks) -> None:
    """An optimizer does more with a gradient of zeros than with none."""
    (_, stepped, _, gradients), (_, _, _, others) = ranks.run(held, "unread", "pipeline=2 split_points=4")
    unread = {"blocks.1.note.weight", "blocks.3.note.weight"}
    assert {name for name, there in gradients.items() if not there} == {f"{n[:-6]}{e}" for n in unread for e in ENDS}
    assert unread.isdisjoint(stepped)
    assert {name for name, there in others.items() if not there} == {"blocks.7.note.weight", "blocks.7.note.bias"}


ENDS = ("weight", "bias")


# -------------------------------------------------------------------------------------------------------- refusals
class Sync(nn.Sequential):
    """SyncBatchNorm in every block."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(5, 5), nn.SyncBatchNorm(5)) for _ in range(4)), nn.Linear(5, 3))


class Lars(torch.optim.SGD):
    """Not of torch: it might look at all parameters."""


class NormAgain(ConvolutionNet):
    """Ends with the block that it began with."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        *most, pool, flat, drop, head = self
        for part in (*most, self[1]):
            input = part(input)
        return head(drop(flat(pool(input))))


REFUSED: dict[str, tuple[Callable[[], evenly.Job], str, str]] = {
    "layerdrop": (lambda: prepared("layerdrop"), "data=1 pipeline=2 zero=3", "by a draw between them (layerdrop)"),
    "blockless": (
        lambda: points_job(model=lambda: nn.Linear(5, 3)), "pipeline=2", "no repeated blocks that its forward calls"
    ),
    "stages": (lambda: prepared("chain"), "pipeline=2 schedule=interleaved stages_per_rank=5", "it has 10 stages"),
    "turned": (lambda: prepared("turning"), "data=1 tensor=2 zero=3", "is not in memory in the order of its dims"),
    "cut": (lambda: prepared("chain"), "pipeline=2 split_points=9", "to begin at block 9, and the model calls 8"),
    "sync": (lambda: points_job(model=Sync), "pipeline=2", "SyncBatchNorm"),
    "statistics": (
        lambda: points_job(model=NormAgain), "pipeline=2 split_points=2", "is called by stages 0, 1, and each"
    ),
    "optimizer": (
        lambda: prepared("chain", optimizer=lambda p: Lars(p, lr=0.1)), "pipeline=2", "optimizer Lars under pipeline=2"
    ),
}  # fmt: skip


def refusal(name: str) -> str:
    job, plan, _ = REFUSED[name]
    try:
        with evenly.start(job(), plan=plan):
            return "nothing"
    except EvenlyError as problem:
        return str(problem)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_in_stages_is_refused_on_all_ranks(name: str, ranks: KeptRanks) -> None:
    said = ranks.run(refusal, name)
    assert said[0] == said[1]
    assert REFUSED[name][2] in said[0]


class Rolls(nn.Module):
    """A block that draws from Python's generator or numpy's, whose streams are not cut at blocks."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.inside, self.draw = nn.Linear(15, 15), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(x) * (1 + self.draw())


class Counts(Chain):
    """Counts its forwards in a buffer that every stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros([]))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().through(x, tokens)


class CountsInside(nn.Module):
    """A block that counts its calls in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(15, 15)
        self.register_buffer("calls", torch.zeros([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inside(x)


class Narrows(nn.Module):
    """A block that runs its router in a type of its own, as in Switch."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.route = nn.Linear(15, 15), nn.Linear(15, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.route = self.route.to(torch.float32)
        return x + self.inside(x) * self.route(x.float()).to(x.dtype)


def rolling(draw: Callable[[], float]) -> Chain:
    return Chain(Rolls(draw) for _ in range(4))


STOPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "random": (partial(rolling, random.random), "draws from Python's or numpy's generator"),
    "numpy": (partial(rolling, np.random.random), "draws from Python's or numpy's generator"),
    # As many numbers as the generator makes at a time, after which it is where it was.
    "numpy's period": (lambda: rolling(lambda: np.random.rand(312).mean()), "draws from Python's or numpy's generator"),
    "counts inside": (lambda: Chain(CountsInside() for _ in range(4)), "buffer blocks.0.calls changes in the forward"),
    "narrows": (lambda: Chain(Narrows() for _ in range(4)), r"the forward makes blocks.\d.route.weight torch.float32"),
    "counts": (Counts, "buffer forwards changes in the forward pass"),
}


def stopped(name: str) -> None:
    with evenly.start(text_job(model=STOPPED[name][0], precision="float64"), plan="pipeline=2") as run:
        run.step(next(iter(run.batches())))


@pytest.mark.parametrize("name", STOPPED)
def test_what_would_come_out_otherwise_in_stages_ends_the_first_step(name: str, ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure, match=STOPPED[name][1]):
        ranks.run(stopped, name, limit_s=100)


def test_only_the_first_step_begins_with_that_token() -> None:
    job = prepared("rarely")
    begins = [[int(job.data[group[0]][0]) for group in microbatches_of_step(job, step)] for step in range(STEPS)]  # pyright: ignore
    assert begins[0][0] == FIRST and FIRST not in [*begins[0][1:], *chain(*begins[1:])]
