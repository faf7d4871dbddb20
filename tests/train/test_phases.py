"""Several updates in one step, each of some parameters, by a loss and an optimizer of its own, under every plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from kept_references import References
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

import evenly
from evenly.engine.updaters import joined_optimizers
from evenly.errors import ResumeError, RunError, UserError
from evenly.model.phases import parameters_of
from evenly.verify.additive import loss_not_additive
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, compare_steps
from evenly.verify.reference import reference_steps
from evenly.verify.shorten import shortened
from evenly.verify.tasks import PlanSteps

STEPS, SAVED_AT = 5, 3


def layers(width: int, inner: int, *others: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width), *others)


class Adversaries(nn.Module):
    """A generator of rows from noise, and a discriminator of them; `normed` has buffers that its forward uses."""

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        inner = [layers(12, 20, nn.LayerNorm(12), nn.Dropout(0.1)) for _ in range(2)]
        self.generator = nn.Sequential(nn.Linear(5, 12), *inner, nn.Linear(12, 7))
        outer = [layers(14, 22) if normed else layers(14, 22, nn.BatchNorm1d(14)) for _ in range(2)]
        self.discriminator = nn.Sequential(nn.Linear(7, 14), *outer, nn.Linear(14, 1))
        if normed:
            spectral_norm(self.discriminator[1][0])

    def forward(self, real: torch.Tensor | None, count: int) -> torch.Tensor:
        noise = torch.randn(count, 5, dtype=self.generator[0].weight.dtype)
        if real is None:
            return self.discriminator(self.generator(noise))
        with torch.no_grad():
            made = self.generator(noise)
        return self.discriminator(torch.cat([real, made]))


def distinguish(model: Any, batch: Any) -> evenly.Loss:
    (x,) = batch
    real, made = model(x, len(x)).squeeze(1).split(len(x))
    right = (real > 0).sum() + (made < 0).sum()
    x.zero_()  # a batch is the phase's own
    return evenly.Loss((F.softplus(-real) + F.softplus(made)).sum(), len(x), {"right": (right, 2 * len(x))})


def deceive(model: Any, batch: Any) -> evenly.Loss:
    (x,) = batch
    assert x.any()
    return evenly.Loss(F.softplus(-model(None, len(x))).sum(), len(x))


def rows(count: int, *columns: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(count, width, generator=generator) for width in columns))


def gan(**fields: Any) -> evenly.Job:
    phases = {
        "discriminator": evenly.Phase(
            parameters="discriminator.*",
            loss=distinguish,
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
            clip_norm=0.3,
        ),
        "generator": evenly.Phase(
            parameters=["generator.[01].*", "generator.[23].*"],
            loss=deceive,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
            schedule=lambda optimizer: StepLR(optimizer, 2, gamma=0.3),
            every=2,
        ),
    }
    given = {"model": Adversaries, "data": rows(37, 7), "phases": phases} | fields
    return evenly.Job(**{"global_batch": 10, "microbatch": 3, "steps": STEPS, "precision": "float64"} | given)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12), *(layers(12, 20, nn.LayerNorm(12)) for _ in range(3)))
        self.critic, self.actor = nn.Linear(12, 1), nn.Linear(12, 4)
        self.unused = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.trunk(x)
        return self.critic(inner).squeeze(1), self.actor(inner)


def value_loss(model: Any, batch: Any) -> evenly.Loss:
    x, y = batch
    return evenly.Loss((y[:, 2] * (model(x)[0] - y[:, 0]) ** 2).sum(), y[:, 2].sum())


def policy_loss(model: Any, batch: Any) -> torch.Tensor:
    value, logits = model(batch[0])
    return F.cross_entropy(logits + value.detach().unsqueeze(1), batch[1][:, 1].long())  # a mean of samples


def plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)


def actor_critic(**fields: Any) -> evenly.Job:
    generator = torch.Generator().manual_seed(2)
    y = torch.stack([torch.randn(31, generator=generator), torch.arange(31) % 4, 0.5 + torch.arange(31) % 3], 1)
    phases = {
        "critic": evenly.Phase(
            parameters=("trunk.*", "critic.*"),
            loss=value_loss,
            optimizer=lambda named_parameters: torch.optim.AdamW(
                [{"params": [pair], "lr": 1e-2 / len(pair[0])} for pair in named_parameters], eps=1e-3
            ),
            schedule=plateau,
        ),
        "actor": evenly.Phase(
            parameters="actor.*", loss=policy_loss, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.1)
        ),
    }
    data = TensorDataset(rows(31, 6).tensors[0], y)
    given: dict[str, Any] = {"model": ActorCritic, "data": data, "phases": phases, "eval_data": data} | fields
    settings: dict[str, Any] = {"loss": value_loss, "average": evenly.EMA(0.5, start=2), "frozen": {"trunk.0.*": 2}}
    sizes = {"global_batch": 9, "microbatch": 2, "steps": STEPS, "precision": "float64", "eval_every": 2}
    return evenly.Job(**settings | sizes | given)


def factored(**fields: Any) -> evenly.Job:
    """One phase's optimizer looks at whole parameters, the other's at elements."""
    job = actor_critic(**fields)
    assert job.phases is not None
    whole = dataclasses.replace(job.phases["critic"], optimizer=lambda p: torch.optim.Adafactor(p, lr=1e-2))
    return dataclasses.replace(job, phases={**job.phases, "critic": whole})


JOBS: dict[str, Callable[..., evenly.Job]] = {
    "factored": factored,
    "gan": gan,
    "normed": lambda **fields: gan(model=lambda: Adversaries(normed=True), **fields),
    "actor_critic": actor_critic,
    "streamed": lambda **fields: gan(data=lambda: iter(rows(37, 7)), shuffle_buffer=5, **fields),
}


def prepared(name: str) -> evenly.Job:
    return JOBS[name]()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory, prepared, STEPS)


def compare(name: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(prepared(name), plan, STEPS, folder)


PLANS = [
    ("gan", "single", 1),
    ("gan", "ddp", 2),
    ("gan", "zero2", 3),
    ("gan", "zero3", 2),
    ("gan", "tp", 2),
    ("gan", "pp", 2),
    ("gan", "3d", 8),
    ("gan", "replicas=2", 1),
    ("gan", "zero2 offload=optimizer", 2),
    ("gan", "pp schedule=zero-bubble", 2),
    ("normed", "zero1", 2),
    ("normed", "zero3", 2),
    ("actor_critic", "ddp", 3),
    ("actor_critic", "zero3", 2),
    ("actor_critic", "tp", 2),
    ("actor_critic", "pp", 3),
    ("factored", "zero2", 2),
    ("factored", "zero3", 3),
    ("factored", "tp", 2),
    ("streamed", "ddp", 3),
    ("streamed", "3d", 8),
]


@pytest.mark.full_but(
    "gan-single-1",
    "gan-ddp-2",
    "gan-zero3-2",
    "gan-tp-2",
    "gan-pp-2",
    "gan-replicas=2-1",
    "normed-zero1-2",
    "actor_critic-ddp-3",
    "actor_critic-pp-3",
    "factored-zero3-3",
    "streamed-ddp-3",
    "gan-zero2 offload*",
)
@pytest.mark.parametrize(("name", "plan", "size"), PLANS)
def test_every_plan_has_the_phases_of_one_device(
    name: str, plan: str, size: int, ranks: KeptRanks, reference: References
) -> None:
    row = judge(plan, ranks.run(compare, name, plan, reference(name), size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-9


def part(name: str, plan: str, first: int, last: int, out: Path, folder: Path) -> RankComparison:
    return compare_steps(prepared(name), PlanSteps(plan, first, last, out), STEPS, folder)  # type: ignore[arg-type]


@pytest.mark.full_but("actor_critic-zero3-pp")
@pytest.mark.parametrize(("name", "first", "then"), [("streamed", "ddp", "zero3"), ("actor_critic", "zero3", "pp")])
def test_a_run_goes_on_with_its_phases_under_another_plan(
    name: str, first: str, then: str, ranks: KeptRanks, reference: References, tmp_path: Path
) -> None:
    folder, out = reference(name), tmp_path / "run"
    assert judge(first, ranks.run(part, name, first, 0, SAVED_AT, out, folder)).reason == ""
    assert judge(then, ranks.run(part, name, then, SAVED_AT, STEPS, out, folder)).reason == ""


def test_phases_have_the_bits_of_one_device(ranks: KeptRanks) -> None:
    (expected,) = ranks.run(bits, "single exact=bitwise", size=1)
    for plan, size in (("ddp exact=bitwise", 3), ("zero2 exact=bitwise", 2), ("zero3 exact=bitwise", 2)):
        assert ranks.run(bits, plan, size=size)[0] == expected


def bits(plan: str) -> list[bytes]:
    with evenly.start(gan(precision="float32"), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        with run.whole_model(device="cpu") as model:
            return [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]


def quiet_gan() -> evenly.Job:
    """Without chance, in one microbatch, in order."""

    def losses(which: str) -> Callable[[Any, Any], torch.Tensor]:
        def loss(model: Any, batch: Any) -> torch.Tensor:
            made = model.generator(batch[0][:, :5])
            if which == "generator":
                return F.softplus(-model.discriminator(made)).mean()
            return (F.softplus(-model.discriminator(batch[0])) + F.softplus(model.discriminator(made.detach()))).mean()

        return loss

    def model() -> Adversaries:
        made = Adversaries()
        made.generator[1][4] = made.generator[2][4] = nn.Identity()
        return made

    job = gan(model=model, data=rows(36, 7), global_batch=9, microbatch=9, shuffle=False, steps=4)
    assert job.phases is not None
    phases = {name: dataclasses.replace(phase, loss=losses(name), every=1) for name, phase in job.phases.items()}
    return dataclasses.replace(job, phases=phases)


def test_phases_are_what_a_loop_written_by_hand_does(ranks: KeptRanks) -> None:
    (found,) = ranks.run(by_engine, size=1)
    job = quiet_gan()
    torch.manual_seed(0)
    model = job.model().double()
    model.load_state_dict(found[0])
    d_optimizer = torch.optim.AdamW(model.discriminator.parameters(), lr=1e-2, eps=1e-3)
    g_optimizer = torch.optim.SGD(model.generator.parameters(), lr=1e-2, momentum=0.9)
    scheduler = StepLR(g_optimizer, 2, gamma=0.3)
    x = job.data.tensors[0].double()
    for step, (losses, norms) in enumerate(found[1]):
        real = x[9 * step : 9 * step + 9]
        made = model.generator(real[:, :5])
        d_loss = F.softplus(-model.discriminator(real)) + F.softplus(model.discriminator(made.detach()))
        d_optimizer.zero_grad()
        d_loss.mean().backward()
        d_norm = nn.utils.clip_grad_norm_(model.discriminator.parameters(), 0.3)
        d_optimizer.step()
        g_loss = F.softplus(-model.discriminator(model.generator(real[:, :5]))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_norm = nn.utils.clip_grad_norm_(model.generator.parameters(), math.inf)
        g_optimizer.step()
        scheduler.step()
        assert losses == pytest.approx([d_loss.mean().item(), g_loss.item()], abs=1e-12)
        assert norms == pytest.approx([d_norm.item(), g_norm.item()], abs=1e-12)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[2][name], tensor, rtol=0, atol=1e-12), name


def by_engine() -> Any:
    with evenly.start(quiet_gan(), plan="single") as run:
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        reports = [run.step(batch) for batch in run.batches()]
        assert [one.loss for one in reports] == [sum(pair(one, "loss")) for one in reports]
        assert [one.grad_norm for one in reports] == [math.hypot(*pair(one, "grad_norm")) for one in reports]
        found = [(pair(one, "loss"), pair(one, "grad_norm")) for one in reports]
        return before, found, {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def pair(report: Any, figure: str) -> list[float]:
    return [report.metrics[f"{phase}/{figure}"] for phase in ("discriminator", "generator")]


def test_each_phase_has_a_scale_of_its_own(ranks: KeptRanks) -> None:
    (found,) = ranks.run(scales, size=1)
    assert found == {"discriminator": 2.0**10, "generator": 2.0**12}


def scales() -> dict[str, float]:
    """In float16, of which the discriminator's gradients overflow twice."""

    def loud(model: Any, batch: Any) -> evenly.Loss:
        loss = distinguish(model, batch)
        return evenly.Loss(loss.total.float() * 2.0**12, loss.weight)

    job = gan(precision="float16", steps=2)
    assert job.phases is not None
    phases = {**job.phases, "discriminator": dataclasses.replace(job.phases["discriminator"], loss=loud)}
    with evenly.start(dataclasses.replace(job, phases=phases), plan="single") as run:
        reports = [run.step(batch) for batch in run.batches()]
        assert [one.skipped for one in reports] == ["overflow", "overflow"]
        return {phase: one.loss_scale.factor for phase, one in run.updaters.by_phase.items()}


def test_a_step_of_phases_is_made_whole(ranks: KeptRanks, tmp_path: Path) -> None:
    messages = ranks.run(refused_calls, tmp_path, size=1)[0]
    assert "run.forward_backward(batch)" in messages[0] and "call run.step(batch)" in messages[0]
    assert "run.step(batch, loss)" in messages[1]
    assert "phases was {'discriminator': 'AdamW', 'generator': 'SGD'}, is now {'discriminator': 'SGD'" in messages[2]


def refused_calls(folder: Path) -> list[str]:
    found: list[str] = []
    with evenly.start(gan(), plan="single", out=folder / "run") as run:
        for batch in run.batches():
            with pytest.raises(RunError) as problem:
                run.forward_backward(batch)
            found.append(str(problem.value))
            with pytest.raises(RunError) as problem:
                run.step(batch, deceive)
            found.append(str(problem.value))
            run.step(batch)
            break
    job = gan()
    assert job.phases is not None
    changed = dataclasses.replace(job.phases["discriminator"], optimizer=lambda p: torch.optim.SGD(p, lr=1e-2))
    with pytest.raises(ResumeError) as problem:
        evenly.start(gan(phases={**job.phases, "discriminator": changed}), out=folder / "run", resume=True)
    return [*found, str(problem.value)]


def test_a_step_that_has_failed_half_way_is_not_gone_on_from(ranks: KeptRanks, tmp_path: Path) -> None:
    for found in ranks.run(failing_half_way, tmp_path, size=2):
        assert len(found) == 3 and all("step 2 has failed after parameters were updated" in one for one in found)


def failing_half_way(folder: Path) -> list[str]:
    def fails(model: Any, batch: Any) -> evenly.Loss:
        if failing:
            raise ValueError("no")
        return deceive(model, batch)

    failing, job = list[bool](), gan()
    assert job.phases is not None
    phases = {**job.phases, "generator": dataclasses.replace(job.phases["generator"], loss=fails, every=1)}
    found: list[str] = []
    with evenly.start(dataclasses.replace(job, phases=phases), plan="ddp", out=folder / "run") as run:
        batches = run.batches()
        run.step(next(batches))
        failing.append(True)
        with pytest.raises(ValueError, match="no"):
            run.step(next(batches))
        failing.clear()
        for call in (lambda: run.step(run.batch([*job.data][:9])), run.save, lambda: run.whole_model()):
            with pytest.raises(RunError) as problem:
                call()
            found.append(str(problem.value))
        run.saved_at = run.steps_done  # the block ends without an error, which would save
    return found


# --- what is decided before


def named_phases(**patterns: Any) -> dict[str, evenly.Phase]:
    return {
        name: evenly.Phase(parameters=one, loss=distinguish, optimizer=torch.optim.SGD)
        for name, one in patterns.items()
    }


NAMES = {"a.weight": True, "a.bias": True, "b.weight": True, "c.weight": False}


def test_parameters_go_to_the_phases_that_name_them() -> None:
    found = parameters_of(named_phases(one="a.*", other=["b.*", "c.*"]), NAMES)
    assert found == {"one": {"a.weight", "a.bias"}, "other": {"b.weight", "c.weight"}}
    assert parameters_of(named_phases(one="a.*", other="b.*"), NAMES)["other"] == {"b.weight"}


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ({"one": "a.*", "other": "d.*"}, "phase 'other' with parameters='d.*'"),
        ({"one": "[ab].*", "other": "c.*"}, "all of them are frozen"),
        ({"one": "a.*", "other": ["*.bias", "b.*"]}, "it belongs to phases 'one' and 'other'"),
        ({"one": "a.weight", "other": "b.*"}, 'keep it frozen (frozen={"a.bias": None})'),
    ],
)
def test_parameters_that_no_phase_or_several_have_are_refused(patterns: Any, found: str) -> None:
    with pytest.raises(UserError) as problem:
        parameters_of(named_phases(**patterns), NAMES)
    assert found in str(problem.value)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"phases": {}}, "phases is {}, must be a mapping"),
        ({"phases": {"one": print}}, "phases['one'] is a builtin_function_or_method, must be an evenly.Phase(...)"),
        ({"optimizer": torch.optim.SGD}, "optimizer is set, and so are phases; give it to each of them"),
        ({"clip_norm": 1.0}, "clip_norm is set, and so are phases"),
        ({"eval_data": rows(3, 7)}, "the job has phases but no loss to evaluate"),
        ({"phases": named_phases(**{"a/b": "*"})}, "phases has the name 'a/b', must be a text without /"),
        ({"phases": None}, "loss is missing (or phases, each with its own); optimizer is missing"),
    ],
)
def test_jobs_with_phases_that_cannot_be_run_are_refused(fields: Any, found: str) -> None:
    with pytest.raises(UserError) as problem:
        gan(**fields)
    assert found in str(problem.value)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"every": 0}, "every of phase 'one' is 0, must be a whole number of at least 1"),
        ({"every": 2}, "no phase is run in every step"),
        ({"parameters": ()}, "parameters of phase 'one' is (), must be a pattern"),
        ({"loss": 1}, "the loss of phase 'one' is a int, not a callable"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0, must be a finite number above 0"),
    ],
)
def test_phases_that_cannot_be_run_are_refused(fields: Any, found: str) -> None:
    phase = dataclasses.replace(named_phases(one="*")["one"], **fields)
    with pytest.raises(UserError) as problem:
        gan(phases={"one": phase})
    assert found in str(problem.value)


def test_a_verification_runs_phases_that_come_seldom() -> None:
    job = gan()
    assert job.phases is not None
    seldom = dataclasses.replace(job.phases["generator"], every=100)
    found = shortened(gan(phases={**job.phases, "generator": seldom}), 3).phases
    assert found is not None and [one.every for one in found.values()] == [1, 2]
    assert shortened(gan(phases={**job.phases, "generator": seldom}), 1).phases["generator"].every == 1  # type: ignore[index]


def test_several_optimizers_stand_as_one() -> None:
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one, other = torch.optim.Adam([a, b], lr=0.1), torch.optim.SGD([c], lr=0.2, momentum=0.9)
    joined = joined_optimizers([one, other])
    assert [group["lr"] for group in joined.param_groups] == [0.1, 0.2] and joined.param_groups[
        1
    ] is other.param_groups[0]
    joined.state[c] = {"momentum_buffer": torch.zeros(2)}
    assert c in other.state and joined.state.get(a) is None and [*joined.state] == [c] and len(joined.state) == 1
    assert joined.state.pop(c) is not None and not other.state
    with pytest.raises(KeyError):
        joined.state[torch.ones(2)] = {}
    a.grad = c.grad = torch.ones(2)
    joined.zero_grad()
    assert a.grad is None and c.grad is None


def test_each_microbatch_of_each_phase_draws_its_own_numbers() -> None:
    seen: list[tuple[int, float]] = []

    def loss(model: Any, batch: Any) -> evenly.Loss:
        seen.append((len(batch[0]), float(torch.rand(()))))
        return evenly.Loss(model(batch[0]).sum(), len(batch[0]))

    phases = {
        name: evenly.Phase(parameters=f"{n}.*", loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        for n, name in enumerate(("one", "other"))
    }
    model = lambda: nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 1))  # noqa: E731
    next(reference_steps(gan(model=model, phases=phases), 1))
    assert [count for count, _ in seen] == [2, 3, 2, 3] * 2 and len({draw for _, draw in seen}) == 8


def test_a_loss_that_draws_is_not_said_to_be_no_sum() -> None:
    assert loss_not_additive(gan()) == ""
    assert "the loss of phase actor" in loss_not_additive(actor_critic_of_means())


def actor_critic_of_means() -> evenly.Job:
    job = actor_critic(microbatch=3)
    assert job.phases is not None

    def wrong(model: Any, batch: Any) -> evenly.Loss:
        return evenly.Loss(10 * policy_loss(model, batch), 1.0)

    return dataclasses.replace(
        job, phases={**job.phases, "actor": dataclasses.replace(job.phases["actor"], loss=wrong)}
    )
