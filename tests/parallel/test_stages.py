"""A model's stages, run one after the other in one process: what each sees, holds, needs and computes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from jobs_pipeline import LAYERS, PIPELINE_JOBS, WIDTH, Block, Chain, Skips, text_job
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import evenly
from evenly.comm.groups import Group
from evenly.data.generators import undisturbed
from evenly.data.loader import microbatches_of_step
from evenly.data.nest import map_tensors
from evenly.engine.build import build_model
from evenly.engine.find_stages import stage_plan_of, stage_plans_of
from evenly.engine.precision import autocast, place_batch
from evenly.engine.step_totals import as_loss
from evenly.errors import EvenlyError, PlanError, RunError
from evenly.model.blocks import find_blocks
from evenly.parallel.core.calls import BlockCall, BlockCalls
from evenly.parallel.core.left_behind import LeftBehind
from evenly.parallel.core.parameter_views import ViewedParameters
from evenly.parallel.pipeline.backward import backward, non_view_alias
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.pipeline import Pipeline
from evenly.parallel.pipeline.remote_tensor import RemoteTensor, fake_of, is_remote, materialized, remote, write_refusal
from evenly.parallel.pipeline.result_forms import ResultForm, ResultForms
from evenly.parallel.pipeline.skipped import SkippedBlocks
from evenly.parallel.pipeline.stage_discovery import Code, find_calls
from evenly.parallel.pipeline.stages import CallCost, StagePlan, TensorSite
from evenly.plan import Plan, parse_plan
from evenly.torch_private import tensor_dict

Gradients = dict[str, torch.Tensor | None]


def built(job: evenly.Job) -> nn.Module:
    return build_model(job, precision=job.precision, device="cpu")


def fitted(text: str, precision: Any = "float64") -> Plan:
    plan = parse_plan(f"{text} data=1")
    return plan.fit(plan.devices or 1).complete(precision)


def batches_of(job: evenly.Job, step: int = 0) -> list[Any]:
    collate: Any = job.collate or torch.utils.data.default_collate
    read = [collate([job.data[i] for i in indices]) for indices in microbatches_of_step(job, step)]
    return [place_batch(batch, job.precision, "cpu") for batch in read]


def staged(job: evenly.Job, plan: str) -> StagePlan:
    return stage_plan_of(job, StagedModel(built(job), "cpu"), fitted(plan, job.precision), device="cpu")[0]


class ByHand:
    """All stages of `job` in one process, each with a model of its own of which it holds what it runs."""

    def __init__(self, job: evenly.Job, plan: str) -> None:
        self.job, self.stage_plan = job, staged(job, plan)
        self.models = [StagedModel(built(job), "cpu") for _ in range(self.stage_plan.stages)]
        for stage, model in enumerate(self.models):
            model.keep_stages(self.stage_plan, [stage])
        self.calls = [BlockCalls(model.blocks, "cpu", model.call) for model in self.models]

    def step(self, batch: Any, key: int) -> float:
        """Forward and backward of a microbatch; its loss."""
        passed: list[tuple[list[torch.Tensor | None], list[torch.Tensor | None]]] = []
        inputs: list[torch.Tensor | None] = []
        forms: ResultForms = []
        for stage in range(self.stage_plan.stages):
            given = [None if one is None else non_view_alias(one) for one in inputs]
            stated: ResultForms = []
            payload, loss = self.forward(stage, given, batch, key, forms=forms, found_forms=stated)
            forms = stated
            outputs = [loss] if payload is None else [None if one is None else non_view_alias(one) for one in payload]
            passed.append((inputs, outputs))
            inputs = [None if one is None else one.detach().requires_grad_(one.requires_grad) for one in outputs]
        gradients: list[torch.Tensor | None] = [torch.ones_like(loss)]
        for inputs, outputs in reversed(passed):
            both = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o is not None and g is not None]
            backward([o for o, _ in both], [g for _, g in both])
            gradients = [None if one is None else one.grad for one in inputs]
        return float(loss.detach())

    def forward(
        self, stage: int, given: Any, batch: Any, key: int, *, training: bool = True, **forms: ResultForms
    ) -> tuple[Any, Any]:
        model = self.models[stage]

        def compute() -> torch.Tensor:
            with autocast(self.job.precision, "cpu"):
                return as_loss(self.job.loss(model.model, batch), 1).total

        with undisturbed(), self.calls[stage].drawing(key):
            return model.forward(stage, given, compute, training=training, **forms)

    def gradients(self) -> Gradients:
        """Of each parameter, added up over the stages that hold it."""
        found: Gradients = {}
        for model in self.models:
            for name, parameter in model.model.named_parameters():
                known = found.get(name)
                found[name] = known if parameter.grad is None else parameter.grad + (0 if known is None else known)
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer for model in self.models for name, buffer in model.model.named_buffers()}


def on_one_device(job: evenly.Job, batches: list[Any]) -> tuple[list[float], Gradients, dict[str, torch.Tensor]]:
    """Losses, gradients and buffers of the whole model."""
    model = built(job)
    calls = BlockCalls(find_blocks(model), "cpu")
    losses: list[float] = []
    for key, batch in enumerate(batches):
        with undisturbed(), calls.drawing(key), autocast(job.precision, "cpu"):
            total = as_loss(job.loss(model, batch), 1).total
        total.backward()
        losses.append(float(total.detach()))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, dict(model.named_buffers())


def assert_as_on_one_device(job: evenly.Job, plan: str, tolerance: float = 1e-12) -> ByHand:
    batches = batches_of(job)
    stages = ByHand(job, plan)
    losses, gradients, buffers = on_one_device(job, batches)
    assert [stages.step(batch, key) for key, batch in enumerate(batches)] == pytest.approx(losses, rel=tolerance)
    found = stages.gradients()
    assert found.keys() == gradients.keys()
    for name, expected in gradients.items():
        mine = found[name]
        assert (mine is None) == (expected is None), name
        if mine is not None and expected is not None:
            assert (mine - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1), name
    held = stages.buffers()
    assert held.keys() == buffers.keys()
    assert all(torch.allclose(held[name], buffer, rtol=tolerance) for name, buffer in buffers.items())
    return stages


# ------------------------------------------------------------------------------------------ stages, one after another
BY_HAND = [
    *(("chain", f"pipeline={n}") for n in (1, 3, 8)),
    *((name, "pipeline=2") for name in ("alternating", "twice")),
    *((name, "pipeline=3") for name in ("first_bias", "ragged", "conv_norm", "lstm", "gru", "lstm_layers")),
    *((name, "pipeline=2") for name in ("gru_layers", "packed", "selecting", "shared")),
    *((name, "pipeline=5") for name in ("skips", "towers", "learned_bias", "tied")),
    *((name, "pipeline=8") for name in ("several", "branches", "whole_penalty")),
    ("towers", "pipeline=3 split_points=1|8"),
    ("skips", "pipeline=3 split_points=4|7"),
    ("chain", "pipeline=2 schedule=zbv split_points=1|2|3"),
    ("twice", "pipeline=3 split_points=3|7"),
    ("twice", "pipeline=8"),
    ("first", "pipeline=3"),
    ("first", "pipeline=8"),
]


@pytest.mark.full_but(
    "alternating-*",
    "twice-pipeline=2",
    "first_bias-*",
    "ragged-*",
    "conv_norm-*",
    "lstm-*",
    "gru_layers-*",
    "packed-*",
    "selecting-*",
    "shared-*",
    "skips-pipeline=5",
    "towers-pipeline=5",
    "learned_bias-*",
    "tied-*",
    "several-*",
    "branches-*",
    "whole_penalty-*",
    "chain-pipeline=2 schedule*",
    "first-pipeline=3",
)
@pytest.mark.parametrize(("name", "plan"), BY_HAND)
def test_all_stages_together_compute_what_the_model_does(name: str, plan: str) -> None:
    assert_as_on_one_device(PIPELINE_JOBS[name](precision="float64", eval_data=None), plan)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_stages_compute_in_the_types_of_autocast(precision: str) -> None:
    job = PIPELINE_JOBS["several"](precision=precision, eval_data=None)
    assert_as_on_one_device(job, "pipeline=3", tolerance=1e-5 if precision == "float32" else 1e-2)


@pytest.mark.parametrize("change", [lambda x: x[:, 1:], lambda x: x.float()])
def test_what_arrives_must_have_the_form_of_what_it_fills(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    job = PIPELINE_JOBS["chain"](precision="float64", eval_data=None)
    stages, batch = ByHand(job, "pipeline=2"), batches_of(job)[0]
    inbox, _ = stages.forward(0, [], batch, 0, training=True)
    with pytest.raises(RunError, match="receiving argument 0 from an earlier stage"):
        stages.forward(1, [change(inbox[0])], batch, 0, training=True)


@pytest.mark.parametrize("name", ["ragged", "conv_norm"])
def test_what_a_stage_has_run_no_other_one_finds_out_again_for_other_sizes(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job = PIPELINE_JOBS[name](precision="float64", eval_data=None)
    stages, batches = ByHand(job, "pipeline=2"), batches_of(job)
    found: list[str] = []
    run = SkippedBlocks._run

    def counted(self: SkippedBlocks, call: BlockCall, left: LeftBehind) -> Any:
        found.append(call.block.name)
        return run(self, call, left)

    monkeypatch.setattr(SkippedBlocks, "_run", counted)
    losses = [stages.step(batch, key) for key, batch in enumerate(batches)]
    skipped = [block for (block, _), stage in stages.stage_plan.stage_of.items() if stage == 0]
    assert len({str(map_tensors(lambda one: one.shape, batch)) for batch in batches}) > 1
    assert sorted(found) == sorted(skipped)  # once each
    assert losses == pytest.approx(on_one_device(job, batches)[0], rel=1e-12)


def test_within_its_own_blocks_a_stage_finds_parameters_without_asking() -> None:
    job = PIPELINE_JOBS["chain"](precision="float64", eval_data=None)
    stages, batch = ByHand(job, "pipeline=2"), batches_of(job)[0]
    views = [tensor_dict(one, "_parameters") for model in stages.models for one in model.model.modules()]
    asked: list[bool] = []

    def note(block: nn.Module, *_: Any) -> None:
        asked.extend(tensor_dict(one, "_parameters").asked for one in block.modules() if [*one.parameters(False)])

    def fail(*_: Any) -> None:
        raise ValueError("in a block")

    for model in stages.models:
        for block in model.blocks:
            block.module.register_forward_pre_hook(note)
    assert stages.step(batch, 0) == pytest.approx(on_one_device(job, [batch])[0][0], rel=1e-12)
    assert asked and not any(asked)
    stages.models[0].blocks[0].module.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in a block"):
        stages.step(batch, 0)
    assert all(one.asked for one in views if isinstance(one, ViewedParameters))


def test_sizes_are_those_that_are_stated_where_these_are_of_the_same_tensors() -> None:
    job = PIPELINE_JOBS["chain"](precision="float64", eval_data=None)
    batch = batches_of(job)[0]

    def second_stage(changed: Callable[[ResultForms], ResultForms]) -> Any:
        """Of a smaller microbatch, whose blocks are stated to return what those of the first one did."""
        stages, stated = ByHand(job, "pipeline=2"), ResultForms()
        inbox, _ = stages.forward(0, [], batch, 0, found_forms=stated)
        stages.forward(1, inbox, batch, 0)
        smaller = map_tensors(lambda one: one[:-1], (batch, inbox))
        return stages.forward(1, smaller[1], smaller[0], 0, forms=changed(stated))[1]

    found = second_stage(lambda stated: [None for _ in stated])
    assert torch.equal(
        second_stage(lambda stated: [form and ResultForm(form.metas * 2, form.arguments * 2) for form in stated]), found
    )
    with pytest.raises(RunError, match="receiving argument 0 from an earlier stage"):
        second_stage(lambda stated: stated)


def test_a_block_that_returns_its_argument_for_some_sizes_alone_is_not_taken_to_do_so_for_others() -> None:
    class SomeOfAll(Chain):
        """Its first block leaves a microbatch of three samples as it is; behind the last its argument is needed too."""

        def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            given, found = x, self.blocks[0](x)
            x = found
            for block in self.blocks[1:]:
                x = block(x)
            return x + given + found

    class OfThree(Block):
        leaves = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.leaves and len(x) == 3 else super().forward(x)

    def model() -> nn.Module:
        made = SomeOfAll(OfThree() for _ in range(LAYERS))
        made.blocks[0].leaves = True
        return made

    job = text_job(model=model, precision="float64", eval_data=None)
    stages, batch = ByHand(job, "pipeline=2"), batches_of(job)[0]
    assert stages.step(batch, 0) == pytest.approx(on_one_device(job, [batch])[0][0], rel=1e-12)
    with pytest.raises(RunError, match="that was not sent: the first microbatches did without it"):
        stages.step(map_tensors(lambda one: one[:-1], batch), 0)


def test_an_evaluation_in_stages() -> None:
    job = PIPELINE_JOBS["conv_norm"](precision="float64")
    stages, model, batch = ByHand(job, "pipeline=3"), built(job).eval(), batches_of(job)[0]
    inbox, loss = [], None
    with torch.no_grad():
        for stage, one in enumerate(stages.models):
            one.model.eval()
            inbox, loss = stages.forward(stage, inbox, batch, 0, training=False)
        expected = as_loss(job.loss(model, batch), 1).total
    assert torch.equal(loss, expected) and not expected.requires_grad


def test_ends_of_stages_that_gradients_do_not_flow_through() -> None:
    """A frozen first stage has nothing to differentiate, a frozen last one hands gradients on."""

    class Frozen(Chain):
        def __init__(self) -> None:
            super().__init__()
            for number in (0, 1, 6, 7):
                self.blocks[number].requires_grad_(False)
            for part in (self.embed, self.norm, self.head):
                part.requires_grad_(False)
            self.place.requires_grad_(False)

    stages = assert_as_on_one_device(text_job(model=Frozen, precision="float64", eval_data=None), "pipeline=4")
    trained = [any(p.grad is not None for p in model.model.parameters()) for model in stages.models]
    assert trained == [False, True, True, False]


class Strided(Chain):
    """Between blocks stand views: transposed, expanded, sliced out of a larger tensor; and a gradient that is one."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = [x.mT.contiguous().mT, x[:1].expand_as(x), torch.cat([x, x], -1)[..., ::2]][number % 3] + 0.0 * x
            x = block(x.mT.contiguous().mT if number % 2 else torch.cat([x, x], -1)[..., :WIDTH])
        return x


def test_what_stages_send_need_not_be_contiguous() -> None:
    job = text_job(model=Strided, precision="float64", eval_data=None)
    for plan in ("pipeline=2", "pipeline=8"):
        assert_as_on_one_device(job, plan)


class InPlace(Chain):
    """Overwrites what a block has returned, which another stage may have, as a whole and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.drop = nn.SiLU(inplace=True), nn.Dropout(0.2, inplace=True)

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            x += 0.1 * self.place[number]
            x[:, 0] *= 2
            x.clamp_(max=3)
            x = self.drop(self.act(x))
            F.elu(x, 0.5, inplace=True)
        return x


def test_a_model_may_overwrite_what_it_got() -> None:
    job = text_job(model=InPlace, precision="float64", eval_data=None)
    for plan in ("pipeline=2", "pipeline=5"):
        assert_as_on_one_device(job, plan)


class Noisy(Chain):
    """Draws between blocks what it uses in the end, where other stages draw too."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        drawn: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x + torch.rand(WIDTH, dtype=x.dtype))
            drawn.append(torch.rand(WIDTH, dtype=x.dtype))
        return x + torch.stack(drawn).sum(0)


def test_what_is_drawn_between_blocks_is_the_same_on_all_stages() -> None:
    assert_as_on_one_device(text_job(model=Noisy, precision="float64", eval_data=None), "pipeline=3")


class OverwritingBlock(Block):
    """Changes what it is given, in place."""

    def forward(self, x: torch.Tensor, sight: torch.Tensor | None = None) -> torch.Tensor:
        x *= 0.9
        return super().forward(x.clamp_(min=-1.0), sight)


class OverwritingSkips(Skips):
    """What is kept for later is what the next block changes: the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OverwritingBlock() for _ in range(LAYERS))


@pytest.mark.full_but("pipeline=4")
@pytest.mark.parametrize("plan", ["pipeline=2 split_points=2", "pipeline=4", "pipeline=8"])
def test_blocks_may_overwrite_what_a_later_stage_needs(plan: str) -> None:
    assert_as_on_one_device(text_job(model=OverwritingSkips, precision="float64", eval_data=None), plan)


# ------------------------------------------------------------------------------------------------- what stages hold
# -------------------------------------------------------------------------------- hooks, and what blocks leave behind
class Hooked(Chain):
    """Hooks collect what the loss needs of every block and of its parts, and change what these take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.embed.register_forward_hook(lambda _, __, result: result * 1.1)
        self.norm.register_forward_pre_hook(lambda _, given: (given[0] + 0.1,))
        for block in self.blocks:
            block.register_forward_pre_hook(self.scaled, with_kwargs=True)
            block.register_forward_hook(self.collected)
            block.register_full_backward_hook(lambda _, into, __: (into[0] * 0.5,))
            block.up.register_forward_hook(self.clamped)

    def scaled(self, _: Any, given: Any, named: dict[str, Any]) -> Any:
        return (given[0] * (1 + 0.1 * torch.rand([])), *given[1:]), named

    def collected(self, _: Any, __: Any, result: torch.Tensor) -> torch.Tensor:
        self.seen.append((result * torch.rand(result.shape[-1])).square().mean())
        return result.roll(1, -1)

    def clamped(self, _: Any, __: Any, result: torch.Tensor) -> torch.Tensor:
        self.seen.append(result.square().mean())
        return result.clamp(-1, 1)

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        x = super().through(x, tokens)
        return x + sum((n + 1) * seen for n, seen in enumerate(self.seen))


class Telling(Block):
    """A block that leaves in an attribute what the loss needs, as experts do with their balance."""

    stated: Any = 0.0

    def forward(self, x: torch.Tensor, sight: Any = None) -> torch.Tensor:
        self.stated = (F.dropout(x, 0.5) * torch.rand(x.shape[-1])).square().mean()
        return super().forward(x, sight)


class Told(Chain):
    def __init__(self) -> None:
        super().__init__(Telling() for _ in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = super().through(x, tokens)
        return x + sum(block.stated for block in self.blocks)  # pyright: ignore


@pytest.mark.full_but("pipeline=3-*")
@pytest.mark.parametrize("model", [Hooked, Told])
@pytest.mark.parametrize("plan", ["pipeline=2", "pipeline=3", "pipeline=8"])
def test_what_is_collected_inside_of_blocks_arrives_at_the_loss(model: type[Chain], plan: str) -> None:
    assert_as_on_one_device(text_job(model=model, precision="float64"), plan)


# --------------------------------------------------------------- numbers of other stages, and what is written piecewise
class Number(Chain):
    """Its code asks, between blocks, how large the hidden state is."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x / x.detach().abs().max().item()
        return x


class Decides(Chain):
    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x if bool(x.sum() > 0) else -x)
        return x


class Writes(Chain):
    """Collects the hidden states in a tensor that it makes beforehand."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        kept, rows = torch.zeros(LAYERS, *x.shape, dtype=x.dtype), torch.zeros_like(x)
        first = torch.zeros(x.shape, dtype=x.dtype)
        for number, block in enumerate(self.blocks):
            kept[number] = x = block(x)
            rows[:, 1:].add_(x[:, 1:])
            first[:, 0] += x[:, 0]
        return kept.mean(0) + rows + first


class Finite(Chain):
    """Looks whether all is well, and takes the tokens by whom they look at."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if x.isnan().any():
                raise ValueError("not a number")
            x = block(x)
            most = x.detach().sum(-1).argmax(1).tolist()
            x = x + torch.stack([x[row, at] for row, at in enumerate(most)])[:, None]
        return x


@pytest.mark.full_but("pipeline=3-*")
@pytest.mark.parametrize("model", [Number, Decides, Writes, Finite])
@pytest.mark.parametrize("plan", ["pipeline=2", "pipeline=3", "pipeline=8"])
def test_numbers_of_other_stages_and_what_they_write_arrive(model: type[Chain], plan: str) -> None:
    assert_as_on_one_device(text_job(model=model, precision="float64"), plan)


class Sometimes(Chain):
    """Only some microbatches need what the hooks have collected, and not the first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda _, __, result: self.seen.append(result.square().mean()))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        x = super().through(x, tokens)
        return x + self.seen[0] if tokens[0, 0] % 3 == 0 else x


def test_what_other_stages_hold_takes_no_memory_here() -> None:
    job = PIPELINE_JOBS["tied"](precision="float64", eval_data=None)
    stage_plan, whole = staged(job, "pipeline=2"), built(job)
    names = [name for name, _ in whole.named_parameters()]
    held: list[set[str]] = []
    for stage in range(2):
        model = StagedModel(built(job), "cpu")
        elsewhere = model.keep_stages(stage_plan, [stage])
        held.append({name for name, _ in model.model.named_parameters()})
        assert held[stage].isdisjoint(elsewhere) and held[stage] | {*elsewhere} == {*names}
        assert all(p.is_meta and isinstance(p, nn.Parameter) for p in elsewhere.values())
        assert {*model.model.state_dict()} - {"head.weight"} == held[stage]  # the other name of the tied one
        for name, parameter in model.model.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)) and parameter.is_leaf
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert {id(p) for p in model.parameters(stage)} == {id(p) for p in model.model.parameters()}
    assert held[0] & held[1] == {"embed.weight"}
    assert stage_plan.shared == {"embed.weight": (0, 1)}
    assert "blocks.0.up.weight" in held[0] and "blocks.7.up.weight" in held[1] and "norm.weight" in held[1]


def test_a_stage_lets_go_of_what_it_received() -> None:
    """At once, not when Python's collector comes by."""
    job = PIPELINE_JOBS["several"](precision="float64", eval_data=None)
    by_hand, batch = ByHand(job, "pipeline=2"), batches_of(job)[0]
    payload, _ = by_hand.forward(0, [], batch, 0)
    given = [None if one is None else one.detach().clone() for one in payload]
    watched = [weakref.ref(one) for one in given if one is not None]
    del payload
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            by_hand.forward(1, given, batch, 0)
        del given
        assert watched and not any(one() is not None for one in watched)
    finally:
        gc.enable()


def test_a_tied_weight_stays_tied() -> None:
    job = PIPELINE_JOBS["tied"](precision="float64", eval_data=None)
    model = StagedModel(built(job), "cpu")
    model.keep_stages(staged(job, "pipeline=2"), [1])
    chain: Any = model.model
    assert chain.embed.weight is chain.head.weight
    assert "embed.weight" in model.model.state_dict() and "head.weight" in model.model.state_dict()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_list_of_parameters_keeps_its_order_on_every_rank(position: int) -> None:
    job = PIPELINE_JOBS["whole_penalty"](precision="float64", eval_data=None)
    group = Group("pipeline", [0, 1, 2], own=position, handle=None, device=torch.device("cpu"))
    plan = fitted("pipeline=3 schedule=interleaved split_points=1|2|3|4|6")
    model = StagedModel(built(job), "cpu")
    pipeline = Pipeline.of(model, stage_plans_of(job, model, plan, device="cpu")[0], plan, group)
    expected = [(tuple(p.shape), p.dtype, p.requires_grad) for p in built(job).parameters()]
    assert [(tuple(p.shape), p.dtype, p.requires_grad) for p in pipeline.parameters()] == expected
    assert [p.is_meta for p in pipeline.parameters()] == [name in pipeline.placeholders for name in pipeline.names]
    assert 0 < pipeline.share <= 1
    stages = {0: (0, 3), 1: (1, 4, 5), 2: (2, 6, 7)}[position]
    assert [block.name for block in pipeline.blocks] == [f"blocks.{number}" for number in stages]


def test_everything_is_held_by_somebody() -> None:
    """A parameter that nothing uses belongs to the first stage, the statistics of a layer to whoever runs it."""
    job = PIPELINE_JOBS["branches"](precision="float64", eval_data=None)
    stage_plan = staged(job, "pipeline=4")
    assert stage_plan.owners["never"] == (0,) and stage_plan.owners["blocks.2.never.weight"] == (1,)
    assert stage_plan.owners["blocks.7.up.weight"] == (3,)
    stage_plan = staged(PIPELINE_JOBS["conv_norm"](precision="float64"), "pipeline=2")
    assert stage_plan.owners["0.3.running_mean"] == (0,) and stage_plan.owners["8.norm_two.running_var"] == (1,)
    assert stage_plan.shared == {}


# ---------------------------------------------------------------------------------------------- what stages are sent
def segments_of(job: evenly.Job) -> list[CallCost]:
    model, batch = StagedModel(built(job), "cpu"), batches_of(job)[0]
    return find_calls(model, [Code(lambda: job.loss(model.model, batch))]).costs


def test_segments_of_like_blocks_cost_the_same() -> None:
    draws = torch.get_rng_state()
    call_costs = segments_of(PIPELINE_JOBS["tied"](precision="float64"))
    assert torch.equal(torch.get_rng_state(), draws)
    assert [call_cost.call for call_cost in call_costs] == [(f"blocks.{n}", 0) for n in range(LAYERS)]
    middle = call_costs[1:-1]
    assert len({(s.flops, s.moved_bytes, s.weight_bytes, s.saved_bytes) for s in middle}) == 1
    assert middle[0].flops > 0 and middle[0].saved_bytes > 0 and middle[0].moved_bytes > 0
    block = Block()
    assert middle[0].tensors == {f"blocks.1.{name}" for name, _ in block.named_parameters()}
    assert middle[0].weight_bytes == 8 * sum(p.numel() for p in block.parameters())
    assert {"embed.weight", "place"} < call_costs[0].tensors - call_costs[1].tensors
    assert {"embed.weight", "norm.bias"} < call_costs[-1].tensors
    assert call_costs[-1].flops > middle[0].flops  # the head


def test_nothing_is_computed_to_find_the_stages() -> None:
    """On a model without numbers: neither values nor memory."""
    job = PIPELINE_JOBS["several"](precision="float64", eval_data=None)
    model = built(job)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stage_plan_of(job, StagedModel(model, "cpu"), fitted("pipeline=3"), device="cpu")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_stage_is_sent_what_it_and_later_ones_need() -> None:
    hidden = TensorSite(None, "in", "0.0")
    assert staged(PIPELINE_JOBS["chain"](eval_data=None), "pipeline=3").stage_inputs[True] == ((), (hidden,), (hidden,))
    skips = staged(PIPELINE_JOBS["skips"](eval_data=None), "pipeline=4").stage_inputs[True]
    assert [len(places) for places in skips] == [0, 2, 4, 2]
    kept = TensorSite(("blocks.1", 0), "out", "")
    assert kept in skips[2] and kept not in skips[3]  # of it, what block 6 is called with is made before
    memory = staged(PIPELINE_JOBS["towers"](eval_data=None), "pipeline=3 split_points=4|6").stage_inputs[True]
    assert TensorSite(None, "in", "0.1") in memory[2]


class Shapes(Chain):
    """Of the hidden state between blocks only its form matters."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        first = x + 1
        for block in self.blocks:
            assert first.dim() == 3 and first.is_floating_point() and len(first) == first.size(0)
            x = block(x + torch.zeros(first.shape[1:], dtype=first.dtype, device=first.device))
            x = x / first.numel() ** 0.01
        return x.view(first.shape)


def test_the_shape_of_an_absent_tensor_need_not_be_sent() -> None:
    job = text_job(model=Shapes, precision="float64", eval_data=None)
    stages = assert_as_on_one_device(job, "pipeline=4")
    assert [len(places) for places in stages.stage_plan.stage_inputs[True]] == [0, 1, 1, 1]


# ---------------------------------------------------------------------------------------------------- absent tensors
class Met:
    """An owner that gives nothing numbers, and counts what it meets."""

    function_context = None

    def __init__(self) -> None:
        self.met = self.shaped = 0

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        return None

    def note_inputs(self, tensors: list[torch.Tensor]) -> None:
        self.met += 1

    def note_shaped(self) -> None:
        self.shaped += 1

    def refuses_write(self, target: torch.Tensor, function: str) -> Exception:
        return write_refusal(function)

    def want_numbers(self, tensors: list[RemoteTensor]) -> None: ...

    def note_write(self, target: RemoteTensor) -> None: ...

    def draws(self) -> bool:
        return False


def missing(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> RemoteTensor:
    from evenly.model.fake import shared_fake_mode

    with shared_fake_mode():
        form = torch.empty(shape, dtype=dtype)
    return remote(form.requires_grad_(grad), Met())


def test_what_is_computed_of_an_absent_tensor_is_absent() -> None:
    x = missing(2, 3)
    for made in (x + 1, 1 - x, x @ torch.ones(3, 5), torch.cat([torch.ones(1, 3), x]), x.view(-1), x[0], x.sum()):
        assert is_remote(made)
    assert (x @ torch.ones(3, 5)).shape == (2, 5)
    halves, values = x.chunk(3, dim=1), x.max(dim=1)
    assert [half.shape for half in halves] == [(2, 1)] * 3
    assert is_remote(values.values) and values.indices.dtype == torch.int64
    assert "shape=(2, 3)" in repr(x)


def test_its_form_can_be_asked_for() -> None:
    x = missing(2, 3, dtype=torch.float16, grad=True)
    assert (x.shape, x.ndim, x.dtype, x.device, len(x), x.numel()) == (
        (2, 3),
        2,
        torch.float16,
        torch.device("cpu"),
        2,
        6,
    )
    assert x.requires_grad and x.is_floating_point() and not x.is_complex() and x.stride() == (3, 1)
    owner: Any = x.owner
    assert owner.met == 0


@pytest.mark.parametrize(
    "ask",
    [torch.Tensor.item, float, bool, torch.Tensor.tolist, torch.nonzero, torch.Tensor.numpy],
    ids=lambda ask: ask.__name__,
)
def test_its_numbers_cannot(ask: Callable[[Any], Any]) -> None:
    with pytest.raises(Exception, match=r"_local_scalar_dense|nonzero|not supported for tensor subclasses"):
        ask(missing(1))


def test_filled_it_computes_as_its_value() -> None:
    x, value = missing(2, 3), torch.arange(6.0).view(2, 3)
    view = x[0]
    x.fill(value)
    assert not is_remote(x) and materialized(x) is value and is_remote(view)
    for made in (x + 1, x.sum(), x @ torch.ones(3, 1), torch.cat([x, x])):
        assert not isinstance(made, RemoteTensor)
    assert torch.equal(x * 2, value * 2) and x.sum().item() == 15.0 and fake_of(x) is value
    assert is_remote(x + missing(2, 3))


def test_it_is_overwritten_in_place() -> None:
    x = missing(2, 3)
    for changed in (x.add_(1), x.mul_(torch.ones(3)), x.clamp_(min=0)):
        assert changed is x
    before = x
    x += 1
    x[:, 0] = 2.0
    x[0] = missing(3)
    assert F.relu(x, inplace=True) is x and nn.Dropout(0.5, inplace=True)(x) is x
    assert F.relu(x, inplace=False) is not x
    assert x is before and is_remote(x) and not x.requires_grad
    assert torch.add(missing(3), 1, out=(out := missing(3))) is out
    x += missing(3, grad=True)
    assert x.requires_grad and x.add_(1).requires_grad and not x.detach().mul_(2).requires_grad
    with torch.no_grad():
        assert not missing(3).add_(missing(3, grad=True)).requires_grad


def test_one_that_was_filled_is_not_overwritten_by_one_that_was_not() -> None:
    x = missing(2, 3)
    x.fill(torch.ones(2, 3))
    assert x.add_(1).tolist() == [[2.0] * 3] * 2 and x.sum().item() == 12.0
    with pytest.raises(PlanError, match="writes a tensor of another stage"):
        x.add_(missing(3))


@pytest.mark.parametrize(
    "write",
    [
        lambda real, x: real.__setitem__(0, x),
        lambda real, x: real.add_(x),
        lambda real, x: real.copy_(x),
        lambda real, x: torch.add(x, 1, out=real),
        lambda real, x: real.__iadd__(x),
        lambda real, x: real.index_copy_(0, torch.tensor([0, 1]), x),
    ],
)
def test_it_is_not_written_into_what_has_numbers(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    real = torch.ones(2, 3)
    with pytest.raises(PlanError, match="writes a tensor of another stage into one that every stage has"):
        write(real, missing(2, 3))
    assert real.tolist() == [[1.0] * 3] * 2


def test_what_is_known_of_one_shape_is_not_taken_for_another() -> None:
    for rows in (2, 4, 2):
        x = missing(rows, 3)
        assert (x.view(-1).shape, x.sum(0).shape, x.mT.stride()) == ((3 * rows,), (3,), (1, 3))
        assert missing(3, rows).mT.stride() == (1, rows)
    assert (missing(2).sum(0, True).shape, missing(2).sum(0, False).shape) == ((1,), ())
    assert missing(2, 3)[1].shape == (3,) and missing(2, 3)[True].shape == (1, 2, 3)
    assert (missing(2, dtype=torch.float64) * 2).dtype == torch.float64 and (missing(2) * 2).dtype == torch.float32


def test_types_follow_autocast_and_gradients_the_mode() -> None:
    x, weight = missing(2, 3, grad=True), torch.ones(3, 3)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert (x @ weight).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert (x @ weight).dtype == torch.float16
        assert (x @ weight).dtype == torch.float32
        assert (x @ weight).requires_grad
        with torch.no_grad():
            assert not (x @ weight).requires_grad


# ------------------------------------------------------------------------------------------------------- refusals
class Asks(Chain):
    """Its code asks, between blocks, for a number that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones([]))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().through(x * self.gain.item(), tokens)


class WritesIntoView(Chain):
    """Writes into a view that it took before."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(x)
        view = rows[:, 1:]
        for block in self.blocks:
            x = block(x)
            view.add_(x[:, 1:])
        return x + rows


class WritesInto(Chain):
    """Writes into a buffer that every stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 1, WIDTH), persistent=False)

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.kept[:] = x.detach().mean(1, keepdim=True)
        return x + self.kept


class Grows(Chain):
    """Makes a part of itself in its first forward, and draws for it."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.Dropout(0.1)
            torch.rand(3)
        return super().through(self.extra(x), tokens)


class Parametrizes(Chain):
    """Has a weight computed otherwise for one forward, as adapters of experts do."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        part: Any = self.blocks[1].up
        parametrize.register_parametrization(part, "weight", nn.Identity())
        try:
            return super().through(x, tokens)
        finally:
            parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)


class Kept(Chain):
    """Finds a parameter in a list of its own, where stages that do not hold it would find an old one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.place]

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().through(x + self.kept[0][: x.shape[1]], tokens)


class Aliased(Chain):
    """Finds a parameter by a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.embed.weight.detach()[:1]


def hooked_root(**hooks: Any) -> nn.Module:
    model = Chain()
    for register, named in hooks.items():
        getattr(model, register)(lambda *_: None, **named)
    return model


AT_ALL_ENDS: dict[str, Any] = {"register_full_backward_hook": {}, "register_forward_hook": {"always_call": True}}
REFUSED: dict[str, tuple[evenly.Job, str, str]] = {
    **{
        name: (text_job(model=partial(hooked_root, **{name: named})), "pipeline=2", "its blocks may lie on several")
        for name, named in AT_ALL_ENDS.items()
    },
    "kept": (text_job(model=Kept), "pipeline=2", "the model (Kept) keeps place in kept too"),
    "aliased": (text_job(model=Aliased), "pipeline=2", "the model (Aliased) keeps embed.weight in first too"),
    "grows": (text_job(model=Grows), "pipeline=2", "its first forward replaces or adds modules (extra)"),
    "parametrizes": (text_job(model=Parametrizes), "pipeline=2", "its forward takes the parameter blocks.1.up.weight"),
    "asks": (text_job(model=Asks), "pipeline=2", "aten._local_scalar_dense needs numbers that another stage has"),
    "writes into view": (text_job(model=WritesIntoView), "pipeline=2", "a tensor of an earlier stage and a view of it"),
    "writes into": (text_job(model=WritesInto), "pipeline=2", "__setitem__ writes a tensor of another stage into one"),
    "stages": (PIPELINE_JOBS["chain"](), "pipeline=9", "it has 9 stages, and the model calls 8 blocks"),
    "V": (PIPELINE_JOBS["chain"](), "pipeline=5 schedule=zbv", "it has 10 stages, and the model calls 8 blocks"),
    "cut": (
        PIPELINE_JOBS["chain"](),
        "pipeline=2 split_points=8",
        "a stage is to begin at block 8, and the model calls 8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_before_training(name: str) -> None:
    job, plan, found = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        staged(job, plan)
    assert found in str(caught.value)


def test_a_model_is_as_it_was_after_a_refusal() -> None:
    job, _, _ = REFUSED["asks"]
    model, batch = built(job), batches_of(job)[0]
    torch.manual_seed(0)
    expected = as_loss(job.loss(model, batch), 1).total
    with pytest.raises(PlanError):
        stage_plan_of(job, StagedModel(model, "cpu"), fitted("pipeline=2"), device="cpu")
    torch.manual_seed(0)
    assert torch.equal(as_loss(job.loss(model, batch), 1).total, expected)
    assert [*model.state_dict()] == [*built(job).state_dict()]


def failure(job: evenly.Job, plan: str = "pipeline=2") -> EvenlyError:
    """What is raised in some microbatch of the first steps."""
    stages = ByHand(job, plan)
    with pytest.raises(EvenlyError) as caught:
        for step in range(3):
            for key, batch in enumerate(batches_of(job, step)):
                stages.step(batch, key)
    assert all(model.running is None for model in stages.models)
    return caught.value


class Leaves(Chain):
    """Leaves out a block for batches without padding."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == 5 and tokens[0, 0] % 3 == 0 else block(x)
        return x


class Needs(Chain):
    """Some microbatches need, late, what came early."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        x = first
        for block in self.blocks[1:]:
            x = block(x)
        return x + first if tokens[0, 0] % 3 == 0 else x


class Catches(Chain):
    """Takes what comes in some microbatches for a fault of its own."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        try:
            return super().through(x, tokens)
        except Exception:
            if tokens[0, 0] % 3 != 0:
                raise
            return x


class Looks(Chain):
    """Some microbatches look at numbers of the hidden state."""

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x / (x.detach().max().item() if tokens[0, 0] % 3 == 0 else 1)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides it, but not from pytest
def test_microbatches_that_run_otherwise_than_the_first_are_found() -> None:
    jobs = {
        model: text_job(model=model, precision="float64", eval_data=None)
        for model in (Leaves, Needs, Catches, Looks, Sometimes)
    }
    assert int(batches_of(jobs[Needs])[0]["inputs"][0, 0]) % 3 != 0  # the first is an ordinary one
    error = failure(jobs[Leaves])
    assert isinstance(error, RunError) and "where the first microbatches called" in str(error)
    assert "the loss needs a tensor of an earlier stage" in str(failure(jobs[Needs]))
    assert "the loss needs a tensor of an earlier stage" in str(failure(jobs[Sometimes]))
    assert "aten._local_scalar_dense needs numbers of an earlier stage that was not" in str(failure(jobs[Looks]))
    assert "came to its end before the next stage began" in str(failure(jobs[Catches]))


class Notes(Block):
    """A block that leaves something in a list that it is given."""

    def __init__(self, *, notes: bool) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:  # pyright: ignore
        if self.notes:
            found.append(x.square().mean())
        return super().forward(x)


class Collects(Chain):
    """Adds up what its blocks have left in a list: all of them, or those of the second half."""

    def __init__(self, first: int) -> None:
        super().__init__(Notes(notes=number >= first) for number in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, found)
        total = sum((number + 1) * one for number, one in enumerate(found))
        return x + total * torch.linspace(0, 1, WIDTH, dtype=x.dtype)  # what all columns share, the norm takes away


class ReadsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, seen: list[torch.Tensor]) -> torch.Tensor:
        return torch.tanh(self.up(seen[-1]))


class Grows(Chain):
    """Gives each block the list of all results so far."""

    def __init__(self) -> None:
        super().__init__(ReadsLast() for _ in range(LAYERS))

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for block in self.blocks:
            seen.append(block(seen))
        return seen[-1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_list_of_all_results_is_given_to_every_block(ranks: int) -> None:
    assert_as_on_one_device(text_job(model=Grows, precision="float64"), f"pipeline={ranks}")


@pytest.mark.full_but("pipeline=2-4", "pipeline=4-0")
@pytest.mark.parametrize("first", [0, LAYERS // 2])
@pytest.mark.parametrize("plan", ["pipeline=2", "pipeline=4"])
def test_what_blocks_leave_in_a_list_that_they_are_given(first: int, plan: str) -> None:
    assert_as_on_one_device(text_job(model=lambda: Collects(first), precision="float64"), plan)


class Shared:
    """What all blocks hold, or are given; of one forward."""

    def __init__(self) -> None:
        self.calls, self.total, self.names = 0, torch.zeros(()), dict[str, Any]()
        self.tried = False


class Count:
    def __init__(self, number: int) -> None:
        self.number = number


class Leaving(Block):
    """A block that leaves something behind in `held` or in what it is given, as `how` says."""

    def __init__(self, how: str, held: Shared) -> None:
        super().__init__()
        self.how, self.held = how, held

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:  # pyright: ignore
        if self.how == "counts":
            self.held.calls += 1
            x = x * self.held.calls
        elif self.how == "adds":
            self.held.total = self.held.total + x.square().mean()
        elif self.how == "counts in a dict":
            given["calls"] = given.get("calls", 0) + 1
            x = x * given["calls"]
        elif self.how == "adds in a dict":
            given["total"] = given.get("total", 0) + x.square().mean()
        elif self.how == "names":
            self.held.names[f"block {len(self.held.names)}"] = len(self.held.names)
            x = x * (1 + sum(self.held.names.values()))
        elif self.how in ("objects in a dict", "tries in a dict"):
            given["calls"] = Count(given["calls"].number + 1 if given else 1)
            x = x * given["calls"].number
            if self.how == "tries in a dict" and not self.held.tried:
                self.held.tried = True
                float(x.detach().sum())
        elif self.how == "numbers":
            given["calls"] = given.get("calls", 0) + int(x.detach().isfinite().all())
        return super().forward(x)


class LeavesBehind(Chain):
    """Uses at its end what its blocks have left behind."""

    def __init__(self, how: str) -> None:
        held = Shared()
        super().__init__(Leaving(how, held) for _ in range(LAYERS))
        self.held = held

    def through(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self.held.__init__()
        given: dict[str, Any] = {}
        for block in self.blocks:
            x = block(x, given) if given or "dict" in block.how or block.how == "numbers" else block(x)
        left = (
            self.held.calls
            + self.held.total
            + len(self.held.names)
            + sum(one.number if isinstance(one, Count) else one for one in given.values())
        )
        return x + left * torch.linspace(0, 1, WIDTH, dtype=x.dtype)


@pytest.mark.full_but(
    "pipeline=2-counts", "pipeline=2-adds in a dict", "pipeline=2-objects in a dict", "pipeline=2-names"
)
@pytest.mark.parametrize("how", ["counts", "adds", "counts in a dict", "adds in a dict", "objects in a dict", "names"])
@pytest.mark.parametrize("plan", ["pipeline=2", "pipeline=4"])
def test_what_blocks_leave_behind_is_there_in_every_microbatch(how: str, plan: str) -> None:
    assert_as_on_one_device(text_job(model=lambda: LeavesBehind(how), precision="float64"), plan)


@pytest.mark.parametrize("how", ["numbers", "tries in a dict"])
def test_a_block_that_needs_numbers_and_leaves_something_behind_is_refused(how: str) -> None:
    with pytest.raises(PlanError, match=r"blocks\.0 needs numbers inside and changes a list, a dict or an object"):
        staged(text_job(model=lambda: LeavesBehind(how), precision="float64"), "pipeline=2")
