"""Loops of the job's own, against the same loop in plain torch on one device, in float64, under every plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks, RankFailure
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.data.generators import seeded
from evenly.data.microbatch import cut
from evenly.data.stream import stream_key
from evenly.errors import RunError, SampleError, UserError
from evenly.verify.reference import build_model, named_tensors
from evenly.verify.reference_data import batches, read_microbatch
from evenly.verify.reference_forward import run_forward

WIDTH, STEPS = 7, 4
TWO = ["ddp", "zero1", "zero2", "zero3", "tensor=2", "pipeline=2"]
PLANS = [*((plan, 2) for plan in TWO), ("data=4 zero=3 shard=2", 4), ("data=2 tensor=2 pipeline=2", 8)]

Sample = tuple[torch.Tensor, torch.Tensor]
Pass = tuple[Sequence[tuple[int, Any]], Any]  # (samples, batch) of each microbatch, and the loss


class Layer(nn.Module):
    """Dropout, running statistics and a gate that only microbatches of an odd number of samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.down(self.drop(F.gelu(self.up(x)))))
        return x + (h * self.gate if len(x) % 2 else h)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def class_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    weights = 1.0 + y
    return evenly.Loss((F.cross_entropy(model(x), y, reduction="none") * weights).sum(), weights.sum())


def other_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    return evenly.Loss((model(x).logsumexp(-1) * y.to(x.dtype)).sum() + model_size(x), len(y) / 2)


def model_size(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum() * 0.01


def job(**changes: Any) -> evenly.Job:
    """29 samples, batches of 9 in microbatches of 3 or less, a short last batch."""
    draw = torch.Generator().manual_seed(3)
    data = [(torch.randn(5, generator=draw), torch.tensor(n % 3)) for n in range(29)]
    fields: dict[str, Any] = dict(
        model=Layers, loss=class_loss, data=data, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        global_batch=9, microbatch=3, steps=STEPS, clip_norm=0.7, precision="float64",
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    )  # fmt: skip
    return evenly.Job(**{**fields, **changes})


def made(step: int, draw: int = 0) -> list[Sample]:
    """Samples of a loop's own, in another number each time."""
    generator = torch.Generator().manual_seed(100 * step + draw)
    return [(torch.randn(5, generator=generator), torch.tensor((n + step) % 3)) for n in range(5 + step)]


class PlainLoop:
    """Steps of several passes on one device."""

    def __init__(self, mine: evenly.Job) -> None:
        self.job, self.model, self.steps_done = mine, build_model(mine), 0
        self.optimizer: Any = mine.optimizer(self.model.parameters())
        self.schedule: Any = mine.schedule and mine.schedule(self.optimizer)
        self._stream = batches(mine) if mine.streams else None

    def of_data(self) -> Pass:
        """The batch of the step; of a stream, the next."""
        step = self.steps_done
        found = next(self._stream or islice(batches(self.job), step, None))
        keys = [stream_key(self.job.seed, "data", step, number) for number in range(len(found))]
        return [read_microbatch(self.job, one, key) for one, key in zip(found, keys, strict=True)], self.job.loss

    def of_samples(self, samples: list[Any], loss: Any = None) -> Pass:
        groups = cut(list(range(len(samples))), size=self.job.samples_per_microbatch)
        mine = replace(self.job, data=samples, global_batch=len(samples), shuffle_buffer=None)
        made = [partial(list, [samples[number] for number in one]) for one in groups]
        keys = [stream_key(self.job.seed, "data", self.steps_done, number) for number in range(len(made))]
        return [read_microbatch(mine, one, key) for one, key in zip(made, keys, strict=True)], loss or self.job.loss

    def step(self, passes: list[Pass]) -> tuple[list[tuple[float, float]], float, float]:
        """(total, weight) of each pass, the loss and the norm of the gradient."""
        self.optimizer.zero_grad()
        found: list[tuple[float, float]] = []
        number = 0
        for microbatches, loss in passes:
            total, weight = 0.0, 0.0
            for samples, batch in microbatches:
                key = stream_key(self.job.seed, "microbatch", self.steps_done, number)
                one = run_forward(replace(self.job, loss=loss), self.model, batch, key, samples)
                one.total.backward()
                total, weight, number = total + float(one.total.detach()), weight + float(one.weight), number + 1
            found.append((total, weight))
        weight = math.fsum(one for _, one in found)
        used = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in used:
            parameter.grad = parameter.grad / weight  # type: ignore[operator]
        norm = float(nn.utils.clip_grad_norm_(used, self.job.clip_norm or math.inf))
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        self.steps_done += 1
        return found, sum(total for total, _ in found) / weight, norm


def whole_state(run: Any) -> dict[str, torch.Tensor]:
    with run.whole_model() as model:
        return named_tensors(model)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def two_passes_and_three(plan: str) -> None:
    """Steps of a pass over the data, one over samples of the loop's own under another loss, and every other step one
    over two samples.
    """
    plain = PlainLoop(job())
    with evenly.start(job(), plan=plan) as run:
        for batch in run.batches():
            samples = made(run.steps_done)
            passes = [plain.of_data(), plain.of_samples(samples, other_loss)]
            reports = [run.forward_backward(batch), run.forward_backward(run.batch(samples), other_loss)]
            if run.steps_done % 2:
                passes.append(plain.of_samples(samples[:2]))
                reports.append(run.forward_backward(run.batch(samples[:2])))
            report = run.update()
            totals, loss, norm = plain.step(passes)
            assert [one.weight for one in reports] == pytest.approx([weight for _, weight in totals])
            assert [one.loss for one in reports] == pytest.approx([total / w for total, w in totals], rel=1e-9)
            assert report.step == plain.steps_done and report.samples == sum(one.samples for one in reports)
            assert (report.loss, report.grad_norm) == pytest.approx((loss, norm), rel=1e-9)
            assert_close(whole_state(run), named_tensors(plain.model))
    assert plain.steps_done == STEPS


@pytest.mark.full_but("ddp-2", "zero3-2", "pipeline=2-2")
@pytest.mark.parametrize(("plan", "size"), PLANS)
def test_passes_of_a_step_add_up_under_every_plan(plan: str, size: int, ranks: KeptRanks) -> None:
    ranks.run(two_passes_and_three, plan, size=size)


@pytest.mark.parametrize("plan", ["single", "replicas=2"])
def test_passes_of_a_step_add_up_in_one_process(plan: str, ranks: KeptRanks) -> None:
    ranks.run(two_passes_and_three, plan, size=1)


def ratio_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    """The form of PPO's: the ratio to what the model said as it drew, clipped, times an advantage."""
    x, action, said, advantage = batch
    ratio = (model(x).log_softmax(-1).gather(1, action[:, None])[:, 0] - said).exp()
    total = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    return evenly.Loss(total, len(x))


@torch.no_grad()
def rollouts(model: nn.Module) -> list[Any]:
    """Eleven draws of states, and of actions as the model likes them."""
    x = torch.randn(11, 5, dtype=torch.float64)
    scores = model(x).log_softmax(-1)
    action = torch.multinomial(scores.exp(), 1)
    said = scores.gather(1, action)[:, 0]
    return [*zip(x, action[:, 0], said, torch.randn(11, dtype=torch.float64), strict=True)]


def generate_and_train(plan: str) -> None:
    plain, epochs = PlainLoop(job()), 2
    with evenly.start(job(), plan=plan) as run:
        for _ in run.batches():
            with run.whole_model() as model:
                assert not model.training
                drawn = rollouts(model)
                for parameter in model.parameters():
                    parameter.data.zero_()  # what is done to it is done to it alone
            with seeded(stream_key(0, "whole model", plain.steps_done, 0)):
                plain.model.eval()
                expected = rollouts(plain.model)
                plain.model.train()
            for mine, theirs in zip(drawn, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
            for _ in range(epochs):
                report = run.step(run.batch(drawn), ratio_loss)
                _, loss, norm = plain.step([plain.of_samples(drawn, ratio_loss)])
                assert (report.loss, report.grad_norm) == pytest.approx((loss, norm), rel=1e-9, abs=1e-12)
            run.log({"reward": 1.5})
        assert_close(whole_state(run), named_tensors(plain.model))
    assert plain.steps_done == STEPS


@pytest.mark.full_but("single-1", "ddp-2", "zero3-2", "pipeline=2-2")
@pytest.mark.parametrize(("plan", "size"), [("single", 1), *((plan, 2) for plan in TWO if plan != "zero1")])
def test_what_a_loop_generates_is_trained_on_under_every_plan(plan: str, size: int, ranks: KeptRanks) -> None:
    ranks.run(generate_and_train, plan, size=size)


TURNS = (["data"], ["made"], ["data"], ["made", "made"], ["data", "made"], ["data"])


def batches_between(plan: str) -> None:
    """Steps on samples of one's own in the place of batches of the data, or after them."""
    plain = PlainLoop(job(steps=8))
    with evenly.start(job(steps=8), plan=plan) as run:
        for batch, steps in zip(run.batches(), TURNS, strict=True):
            wide = [torch.stack(column) for column in zip(*batch.samples(), strict=True)]
            read = [torch.cat(column) for column in zip(*(one for _, one in plain.of_data()[0]), strict=True)]
            assert all(torch.equal(one.to(other.dtype), other) for one, other in zip(wide, read, strict=True))
            for kind in steps:
                run.step(batch if kind == "data" else run.batch(made(1)))
                plain.step([plain.of_data() if kind == "data" else plain.of_samples(made(1))])
        assert plain.steps_done == run.steps_done == 8
        assert_close(whole_state(run), named_tensors(plain.model))


def test_a_batch_is_that_of_its_step_whatever_came_between(ranks: KeptRanks) -> None:
    ranks.run(batches_between, "ddp", size=2)


def noisy(samples: list[Any]) -> Any:
    """Draws, by the step and the microbatch."""
    x, y = torch.utils.data.default_collate(samples)
    return x + torch.rand(()), y


def streamed() -> evenly.Job:
    rows = job().data
    return job(steps=8, data=lambda: iter(rows), shuffle_buffer=5, collate=noisy)  # type: ignore[call-overload]


def turns_on_a_stream(plan: str, folder: Path, first: int, last: int) -> None:
    """The same turns of a loop that gets batches of a stream, from `first` to `last` steps; the rest on one device."""
    plain = PlainLoop(streamed())
    with evenly.start(streamed(), plan=plan, out=folder, resume=first > 0) as run:
        given = run.batches()
        for steps in TURNS:
            batch = next(given) if first <= plain.steps_done < last else None
            data = plain.of_data()
            for kind in steps:
                plain.step([data if kind == "data" else plain.of_samples(made(1))])
                if first < plain.steps_done <= last:
                    trained = batch if kind == "data" else run.batch(made(1))
                    assert trained is not None
                    run.step(trained)
            if plain.steps_done >= run.steps_done == last:
                break
        if plain.steps_done == last:
            assert_close(whole_state(run), named_tensors(plain.model))
        assert run.steps_done == last


@pytest.mark.full_but("single-1", "ddp-2", "zero3-3")
@pytest.mark.parametrize(("plan", "size"), [("single", 1), ("ddp", 2), ("zero3", 3), ("data=2 tensor=2 pipeline=2", 8)])
def test_a_stream_loses_no_sample_to_steps_on_others(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(turns_on_a_stream, plan, tmp_path, 0, 8, size=size)


@pytest.mark.full_but("4", "5")
@pytest.mark.parametrize("done", [2, 4, 5, 6])  # of which 4 and 6 are amid a turn, 5 is two steps after the batch
def test_a_loop_goes_on_at_the_very_next_sample_of_a_stream(done: int, ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(turns_on_a_stream, "ddp", tmp_path, 0, done, size=2)
    ranks.run(turns_on_a_stream, "zero3", tmp_path, done, 8, size=3)


def samples_of_a_stream() -> str:
    """The samples of a batch on this rank, as often as they are asked for, until the loop gets the next."""
    expected, given = batches(streamed()), list[Any]()
    with evenly.start(streamed(), plan="ddp") as run:
        for batch in run.batches():
            read = [sample for microbatch in next(expected) for sample in microbatch()]
            for samples in (batch.samples(), batch.samples()):
                assert len(samples) == len(read)
                assert all(torch.equal(one[0], other[0]) for one, other in zip(samples, read, strict=True))
            run.step(run.batch(samples))
            given.append(batch)
            if run.steps_done == 3:
                with pytest.raises(RunError) as error:
                    given[1].samples()
                return str(error.value)
    return ""


def test_all_ranks_have_the_samples_of_a_stream_s_batch(ranks: KeptRanks) -> None:
    for text in ranks.run(samples_of_a_stream, size=2):
        assert "the batch of step 2" in text and "another batch since" in text


def bits(plan: str) -> list[Any]:
    with evenly.start(job(precision="float32"), plan=plan) as run:
        for batch in run.batches():
            run.forward_backward(batch)
            run.forward_backward(run.batch(made(run.steps_done)), other_loss)
            run.update()
        return [tensor.numpy() for tensor in whole_state(run).values()]


@pytest.mark.full_but("zero2")
@pytest.mark.parametrize("plan", ["ddp", "zero2", "zero3"])
def test_bits_of_several_passes_do_not_depend_on_the_plan(plan: str, ranks: KeptRanks) -> None:
    (expected,) = ranks.run(bits, "single exact=bitwise", size=1)
    for found in ranks.run(bits, f"{plan} exact=bitwise", size=2):
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine == theirs).all()


def misused() -> None:
    with evenly.start(job(), plan="ddp") as run:
        batches = run.batches()
        with pytest.raises(RunError, match="there are no gradients"):
            run.update()
        batch, early = next(batches), run.batch(made(0))
        run.forward_backward(batch)
        with pytest.raises(RunError, match="that was trained on before"):
            run.forward_backward(batch)
        for call in (run.evaluate, run.save, run.whole_model):
            with pytest.raises(RunError, match=r"step 1 has gradients that no update has used"):
                call()
        run.update()
        with pytest.raises(RunError, match="a batch of step 1"):
            run.step(early)
        mine = made(1) if run.world.rank == 0 else [*made(1)[:3], *made(2)[3:]]
        with pytest.raises(UserError, match="sample 3 on rank 1 differs from rank 0's"):
            run.batch(mine)
        with pytest.raises(UserError, match="there are no samples"):
            run.batch([])
        with pytest.raises(SampleError, match="collating samples"):
            run.step(run.batch([(torch.ones(5), 1), (torch.ones(4), 1)] * 2))
        assert run.steps_done == 1
        with suppress(StopIteration), pytest.raises(RunError, match="no step was trained on it"):
            next(batches)
            next(batches)
        run.asked_to_end = True


def test_misuse_is_said(ranks: KeptRanks) -> None:
    ranks.run(misused, size=2)


def two_calls(model: nn.Module, batch: Any) -> evenly.Loss:
    x, _ = batch
    return evenly.Loss((model(x) - model(x * 2)).square().sum(), len(x))


def calls_twice() -> None:
    with evenly.start(job(), plan="pipeline=2") as run:
        run.step(run.batch(made(1)), two_calls)


def test_a_loss_that_calls_other_blocks_than_the_job_s_is_refused_under_pipeline(ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure, match=r"it calls .* where the first microbatches called no block"):
        ranks.run(calls_twice, size=2)


def nan_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    x, y = batch
    return evenly.Loss((model(x).sum() * (x[0, 0] - x[0, 0]) / 0.0 * 0 + model(x).sum()), len(y))


def left_out() -> None:
    """A pass with nan has the whole step left out, and buffers are as it began."""
    with evenly.start(job(), plan="ddp", skip_nonfinite=1) as run:
        before = whole_state(run)
        run.forward_backward(next(run.batches()))
        assert math.isnan(run.forward_backward(run.batch(made(1)), nan_loss).loss)
        assert run.update().skipped == "not finite"
        assert all(torch.equal(tensor, before[name]) for name, tensor in whole_state(run).items())
        run.forward_backward(next(run.batches()))
        run.forward_backward(run.batch(made(1)), nan_loss)
        with pytest.raises(RunError, match=r"step 2: the loss must be finite\n.* microbatch 0 \(samples 0, 1, 2\)"):
            run.update()
        run.asked_to_end = True


def test_a_step_with_a_pass_that_is_not_finite_is_left_out(ranks: KeptRanks) -> None:
    ranks.run(left_out, size=2)
