"""The parts of a step that need no ranks: loss scale, ledger, interrupt, options, build, precision."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import classifier_job
from torch import nn

from evenly.comm.groups import Group
from evenly.comm.world import World
from evenly.engine.build import build_model, build_optimizer, choose_kernels, refuse_gradient_hooks
from evenly.engine.precision import STEPS_BEFORE_GROWTH, LossScale, first_scale, place_batch
from evenly.engine.schedule import build_schedule
from evenly.engine.step_totals import StepTotals, StepTotalsBuilder, as_loss
from evenly.errors import PlanError, RunError, UserError
from evenly.job import Job, Loss
from evenly.plan import Plan, PlanSpec
from evenly.train.interrupt import Interrupt
from evenly.train.options import RunOptions
from evenly.train.run import start

SINGLE = PlanSpec(data=1).complete("float32")
ALONE = replace(World.alone(), groups={"data": Group.alone(), "files": Group.alone("files")})


def test_the_loss_scale_follows_torchs_rule() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=STEPS_BEFORE_GROWTH)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scale = LossScale(2.0**10)
    for step in range(2 * STEPS_BEFORE_GROWTH + 9):
        finite = step not in (3, 4, 900)
        weight.grad = torch.ones(1) if finite else torch.full((1,), torch.inf)
        scaler.scale(weight.sum())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scale = scale.after(finite=finite)
        assert scale.factor == scaler.get_scale()


def test_only_float16_is_scaled() -> None:
    assert first_scale("float32", 64) == first_scale("bfloat16", 64) == LossScale(1.0)
    assert first_scale("float16", 64) == first_scale("float16", 33) == LossScale(2.0**10)
    assert first_scale("float16", 2**40) == LossScale(1.0)


def test_a_ledger_carries_what_was_entered() -> None:
    ledger = StepTotalsBuilder(ALONE, microbatches=3, layers=2)
    ledger.add(2, Loss(torch.tensor(1.5), torch.tensor(4)), [1, 0])
    ledger.add(0, Loss(torch.tensor(2.5), 2.0), [3, 1])
    account = ledger.read([*ledger.numbers(memory_bytes=[10], busy_s=1.5, own_s=0.5, stop=True)])
    expected = StepTotals(
        [2.5, 0.0, 1.5], [2.0, 0.0, 4.0], [[3, 1], [0, 0], [1, 0]], [10], True, [0.5], [1.5], marks=[1.0]
    )
    assert account.clock_s > 0 and replace(account, clock_s=0.0) == expected
    assert account.weight == 6.0 and account.loss == pytest.approx(4.0 / 6.0)
    two = StepTotalsBuilder(ALONE, microbatches=1, devices=2)
    assert two.read([*two.numbers(memory_bytes=[7, 8])]).memory_bytes == [7, 8]


@pytest.mark.parametrize(
    ("totals", "weights", "message"),
    [
        ([1.0, 1.0], [1.0, float("nan")], "microbatch 1 has total 1.0 and weight nan"),
        ([1.0, 1.0], [1.0, -1.0], "microbatch 1 has total 1.0 and weight -1"),
        ([0.0, 0.0], [0.0, 0.0], "the weight is 0 in every microbatch"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(totals: list[float], weights: list[float], message: str) -> None:
    with pytest.raises(RunError) as caught:
        StepTotals(totals, weights, [[], []], [0], False).check(7)
    assert "step 7" in str(caught.value) and message in str(caught.value)


def test_a_weight_of_zero_in_some_microbatches_is_none_of_them() -> None:
    account = StepTotals([0.0, 3.0], [0.0, 2.0], [[], []], [0], False)
    account.check(1)
    assert account.loss == 1.5


def test_a_plain_scalar_is_a_mean_over_samples() -> None:
    loss = as_loss(torch.tensor([2.0]), 5)
    assert loss.total == 10.0 and loss.total.shape == () and loss.weight == 5


def test_a_weight_has_no_gradient() -> None:
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(RunError, match="it depends on the model's parameters"):
        as_loss(Loss(scale * 2, scale * 3), 5)
    assert as_loss(Loss(scale * 2, (scale * 3).detach()), 5).weight == 3


@pytest.mark.parametrize("result", [torch.ones(2), 1.0, None, Loss(torch.ones(2), 1), Loss(2.5, 1)])  # type: ignore[arg-type]
def test_anything_else_is_no_loss(result: Any) -> None:
    with pytest.raises(RunError, match=r"must return evenly\.Loss") as caught:
        as_loss(result, 5)
    assert ("whose total is no tensor of one element" in str(caught.value)) == isinstance(result, Loss)


def test_a_signal_asks_and_the_handler_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupt = Interrupt()
    interrupt.begin()
    assert not interrupt.asked
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # the same request, delivered twice
    assert interrupt.asked
    interrupt.close()
    interrupt.close()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(),
        RunOptions(PlanSpec(data=2, zero=3, exact="rounding"), Path("a b"), 7, True),
        RunOptions(search=True, cluster=Path("c.toml")),
    ],
)
def test_options_survive_the_way_to_the_ranks(options: RunOptions) -> None:
    assert RunOptions.from_text(options.to_text()) == options


def test_the_model_follows_from_the_seed_alone() -> None:
    job = classifier_job()
    torch.manual_seed(1)
    one = build_model(job, precision="float32", device="cpu")
    torch.manual_seed(2)
    two = build_model(job, precision="float64", device="cpu")
    other = build_model(classifier_job(seed=1), precision="float32", device="cpu")
    assert torch.equal(one.first.weight.double(), two.first.weight)
    assert not torch.equal(one.first.weight, other.first.weight)


def broken() -> nn.Module:
    raise ValueError("boom")


def hooked() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


def clamped() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda g: g.clamp(-1, 1))
    return model


def test_hooks_of_gradients_and_plans_that_would_pass_them_by_do_not_go_together() -> None:
    refuse_gradient_hooks(clamped(), PlanSpec(data=2, zero=3).complete("float32"))
    staged = PlanSpec(data=1, pipeline=2).complete("float32")
    refuse_gradient_hooks(clamped(), staged)
    with pytest.raises(PlanError, match=r"parameter weight has a hook[^$]*use ddp, zero1 or zero2"):
        refuse_gradient_hooks(clamped(), staged, shared=["weight"])
    with pytest.raises(PlanError, match="parameter weight has a hook"):
        refuse_gradient_hooks(clamped(), PlanSpec(data=1, pipeline=2, schedule="zero-bubble").complete("float32"))
    with (
        pytest.raises(PlanError, match="parameter weight has a hook"),
        start(classifier_job(model=clamped), plan="single zero=3 offload=parameters"),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": broken}, "boom"),
        ({"model": lambda: nn.LazyLinear(3)}, "it has no shape yet"),
        ({"model": lambda: nn.Linear(3, 3, dtype=torch.complex64)}, "it is of torch.complex64"),
        ({"model": hooked}, "a hook for its accumulated gradient"),
        ({"model": lambda: 3}, r"must return a torch\.nn\.modules\.module\.Module"),
        ({"optimizer": lambda p: torch.optim.LBFGS(p)}, "evaluates the loss several times"),
        ({"optimizer": lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}, "not the model's"),
        ({"schedule": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)}, "the job has no eval_every"),
        ({"schedule": lambda o: 3}, "it returned a int"),
    ],
)
def test_what_the_job_builds_is_checked(changes: dict[str, Any], message: str) -> None:
    job = classifier_job(**changes)
    with pytest.raises(UserError, match=message):
        model = build_model(job, precision="float32", device="cpu")
        build_schedule(job, build_optimizer(job, [*model.named_parameters()], SINGLE))


def test_an_eps_that_is_0_in_the_type_of_the_weights_is_refused() -> None:
    model = build_model(classifier_job(), precision="pure-float16", device="cpu")
    build_optimizer(
        classifier_job(optimizer=lambda p: torch.optim.AdamW(p, eps=1e-4)), [*model.named_parameters()], SINGLE
    )
    with pytest.raises(UserError, match=r"AdamW with eps=1e-08\n.*that is 0 in float16"):
        build_optimizer(classifier_job(), [*model.named_parameters()], SINGLE)


ROUNDING, BITWISE = (PlanSpec(data=1, exact=exact).complete("float32") for exact in ("rounding", "bitwise"))
IN_ORDER, TURNED = torch.zeros(5, 3), torch.zeros(3, 5).t()


@pytest.mark.parametrize(
    ("kind", "settings", "parameter", "plan", "fused"),
    [
        (torch.optim.AdamW, {}, IN_ORDER, ROUNDING, True),
        (torch.optim.Adam, {"fused": True}, IN_ORDER, ROUNDING, True),
        (torch.optim.SGD, {"fused": True}, IN_ORDER, ROUNDING, True),
        # The job has chosen.
        (torch.optim.AdamW, {"fused": False}, IN_ORDER, ROUNDING, False),
        (torch.optim.AdamW, {"foreach": True}, IN_ORDER, ROUNDING, None),
        (torch.optim.AdamW, {"differentiable": True}, IN_ORDER, ROUNDING, None),
        # Other numbers, other bits, and what torch cannot do.
        (torch.optim.AdamW, {"fused": True}, TURNED, ROUNDING, None),
        (torch.optim.AdamW, {"fused": True}, IN_ORDER, BITWISE, None),
        (torch.optim.AdamW, {}, IN_ORDER.bfloat16(), ROUNDING, None),
        (torch.optim.SGD, {}, IN_ORDER, ROUNDING, None),
    ],
)
def test_fused_kernels_step_where_the_numbers_stay_right(
    kind: Any, settings: dict[str, Any], parameter: torch.Tensor, plan: Plan, fused: bool | None
) -> None:
    optimizer = kind([nn.Parameter(parameter)], lr=0.1, **settings)
    choose_kernels(optimizer, plan)
    assert optimizer.param_groups[0]["fused"] is fused


class Turned(nn.Module):
    """A linear layer whose weight lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def square_loss(model: nn.Module, batch: torch.Tensor) -> Loss:
    return Loss(model(batch).square().sum(), len(batch))


def stepped(**settings: Any) -> torch.Tensor:
    """The weight after three steps."""
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    adam = lambda p: torch.optim.AdamW(p, lr=0.1, **settings)  # noqa: E731
    job = Job(model=Turned, loss=square_loss, data=data, optimizer=adam, global_batch=4, steps=3)  # pyright: ignore
    with start(job, plan="single exact=rounding") as run:
        for batch in run.batches():
            run.step(batch)
        return run.model.weight.detach().clone()


def test_a_fused_kernel_does_not_step_a_gradient_that_lies_otherwise_than_its_parameter() -> None:
    assert torch.equal(stepped(fused=True), stepped(fused=False))


def test_batches_become_float64_where_the_run_is() -> None:
    batch = {"x": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    wide = place_batch(batch, "float64", "cpu")
    assert wide["x"].dtype == torch.float64 and wide["n"].dtype == torch.int64
    assert place_batch(batch, "bfloat16", "cpu")["x"].dtype == torch.float32


def test_steps_and_evaluations_leave_the_generator_of_the_code_around_them_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    with start(classifier_job(steps=2), plan="single") as run:
        for batch in run.batches():
            run.step(batch)
            found.append(torch.rand(1))
        run.evaluate()
        found.append(torch.rand(1))
    assert torch.equal(torch.cat(found), expected)


def test_memory_is_told_once_and_not_over_the_group_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[str] = []

    def noted(value: Any, group: Any) -> list[Any]:
        groups.append(group.name)
        return [value]

    monkeypatch.setattr("evenly.train.step.gather_values", noted)
    with start(classifier_job(steps=4, eval_data=None), plan="single", out=tmp_path) as run:
        groups.clear()  # of what is asked at the start
        told = [run.step(batch).memory is not None for batch in run.batches()]
    assert told == [False, True, False, False] and groups == ["data"]
