"""The rules of data order, broken in the code that the engine and the reference share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Points, classifier_job, language_job
from jobs_streams import PointStream
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import evenly
import evenly.data.loader as loader
import evenly.verify.data_rules as data_rules
from evenly.data.stream_reader import StreamBatch, StreamPlace, StreamReader
from evenly.verify.data_rules import broken_data_rule
from evenly.verify.hidden_state import find_hidden_state
from evenly.verify.reference_data import batches
from evenly.verify.shorten import shortened, shortened_in_words
from evenly.verify.tasks import FoundInJob
from evenly.verify.verify import _problem_of, _ReferenceRuns, _verify_plan

JOBS = {
    "classifier": classifier_job,
    "language": language_job,
    "in order": lambda: classifier_job(shuffle=False),
    "one batch": lambda: classifier_job(global_batch=37, microbatch=None),
    "no evaluation": lambda: classifier_job(eval_data=None),
    "long": lambda: classifier_job(data=Points(4001), global_batch=2, microbatch=1),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_rules_are_kept(name: str) -> None:
    assert broken_data_rule(JOBS[name]()) == ""


def in_order(change: Callable[[list[int], dict[str, Any]], list[int]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in `data/order`."""
    plain = loader.batch_indices

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(loader, "batch_indices", lambda **rest: change(plain(**rest), rest))

    return plant


def in_cut(change: Callable[[list[list[int]]], list[list[int]]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in what `data/loader` makes of a batch."""
    plain = loader.microbatches_of_step
    return lambda patch: patch.setattr(data_rules, "microbatches_of_step", lambda job, step: change(plain(job, step)))


def in_evaluation(change: Callable[[list[list[int]]], list[list[int]]]) -> Callable[[pytest.MonkeyPatch], None]:
    plain = loader.microbatches_of_evaluation
    return lambda patch: patch.setattr(data_rules, "microbatches_of_evaluation", lambda job: change(plain(job)))


FAULTS = {
    "a sample less per batch": (in_order(lambda batch, _: batch[:-1]), "the batch of step 1 has 9 samples, not 10"),
    "always step 0": (in_order(lambda _, rest: loader_indices({**rest, "step": 0})), "step 4 has 10 samples, not 7"),
    "one sample again": (in_order(lambda batch, _: [batch[0], *batch[:-1]]), "epoch 1 has samples"),
    "one epoch's order": (in_order(lambda _, rest: loader_indices({**rest, "step": rest["step"] % 4})), "same order"),
    "a sample that is not there": (in_order(lambda batch, _: [37 if i == 3 else i for i in batch]), "sample 37"),
    "the short batch lost": (in_order(lambda batch, _: batch if len(batch) == 10 else []), "step 4 has 0 samples"),
    "cut with loss": (in_cut(lambda cut: cut[:-1]), "the batch of step 1 has 7 samples, not 10"),
    "cut with an exchange": (in_cut(lambda cut: [[*cut[1][:1], *cut[0][1:]], *cut[1:]]), "do not have the samples"),
    "cut too large": (in_cut(lambda cut: [cut[0] + cut[1], *cut[2:]]), "microbatch 0 of step 1 has 5 samples"),
    "one evaluated microbatch": (in_evaluation(lambda cut: cut[:1]), "an evaluation leaves out samples"),
    "an empty microbatch": (in_cut(lambda cut: [*cut, []]), "microbatch 4 of step 1 is empty"),
    "evaluated twice": (in_evaluation(lambda cut: [*cut, [0]]), "an evaluation has sample 0 more than once"),
}  # fmt: skip


def loader_indices(rest: dict[str, Any]) -> list[int]:
    from evenly.data.order import batch_indices

    return batch_indices(**rest)


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_rule_is_found_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, words = FAULTS[name]
    plant(monkeypatch)
    assert words in broken_data_rule(classifier_job())


def test_data_that_are_not_shuffled_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order(lambda batch, _: batch[::-1])(monkeypatch)
    assert broken_data_rule(classifier_job(shuffle=False)).startswith("epoch 1 is not in the order of the data")
    assert broken_data_rule(classifier_job()) == ""


@pytest.mark.parametrize("broken", [1, 4, 5])
def test_the_cut_is_checked_in_the_last_batch_of_an_epoch_and_the_next_epoch_too(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """37 samples are four batches; 57 are six."""
    plain = loader.microbatches_of_step
    monkeypatch.setattr(
        data_rules, "microbatches_of_step", lambda job, step: plain(job, step)[: -1 if step == broken else None]
    )
    for samples in (37, 57):
        assert broken_data_rule(classifier_job(data=Points(samples))).startswith(f"the batch of step {broken + 1} has")


def test_a_budget_of_padded_length_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    in_cut(lambda cut: [[*chain.from_iterable(cut)]])(monkeypatch)
    assert "has a padded cost of" in broken_data_rule(language_job())


@pytest.mark.parametrize(
    ("found", "world", "status"),
    [
        (FoundInJob(), 2, None),
        (FoundInJob(broken_rule="a rule"), 1, "different"),
        (FoundInJob(hidden_state="a module"), 1, None),
        (FoundInJob(hidden_state="a module"), 2, "unsupported"),
    ],
)
def test_what_is_wrong_with_the_job_is_every_plans_row(found: FoundInJob, world: int, status: str | None) -> None:
    row = _problem_of(found, world)
    assert (row and row.status) == status


def test_epochs_end_within_the_steps() -> None:
    job = shortened(classifier_job(data=Points(996), eval_data=Points(500), steps=100), 3)
    assert job.length == 16
    sizes = [sum(map(len, loader.microbatches_of_step(job, step))) for step in range(3)]
    assert sizes == [10, 6, 10]
    assert len(job.eval_data) == 20  # type: ignore[arg-type]
    assert broken_data_rule(job) == ""
    assert shortened(classifier_job(), 6).length == 37  # as long as it is
    with pytest.raises(IndexError):
        job.data[16]


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"data": Points(1000), "steps": 200}, [10, 10, 10]),  # every batch is full
        ({"data": Points(997), "steps": 99}, [10, 10, 10]),  # training ends before the short batch
        ({"data": Points(997), "steps": 100}, [10, 7, 10]),
        (
            {"data": DataLoader(Points(997), batch_size=10, drop_last=True), "global_batch": 0, "steps": 999},
            [10, 10, 10],
        ),
        ({"data": DataLoader(Points(997), batch_size=10), "global_batch": 0, "steps": 999}, [10, 7, 10]),
        ({"data": Points(997), "sampler": RandomSampler(range(997)), "steps": 99}, [10, 10, 10]),
        ({"data": Points(997), "sampler": RandomSampler(range(997)), "steps": 100}, [10, 7, 10]),
        ({"data": PointStream(997), "shuffle": False}, [10, 10, 10]),
    ],
)
def test_a_shortened_job_has_no_batch_that_training_has_not(changes: dict[str, Any], sizes: list[int]) -> None:
    job = shortened(classifier_job(microbatch=None, **changes), 3)
    found = [sum(len(microbatch()) for microbatch in step) for step, _ in zip(batches(job), range(3), strict=False)]
    assert found == sizes
    assert shortened_in_words(job).startswith("verify trains on the first ")


class Counting(nn.Module):
    """Carries something from one call to the next, in an attribute or in a buffer outside of the state dict."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(5, 3), 0
        self.register_buffer("last", torch.zeros(3), persistent=False)
        self.by_buffer = buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        if self.by_buffer:
            self.last, out = out.detach().mean(0), out + self.last
            return out
        self.calls += 1
        return out * self.calls


@pytest.mark.parametrize("buffer", [False, True])
def test_what_a_module_carries_along_is_found_and_named(buffer: bool) -> None:
    job = classifier_job(model=lambda: nn.Sequential(nn.BatchNorm1d(5), Counting(buffer=buffer)))
    assert find_hidden_state(job).startswith("module 1 computes other numbers for microbatch 0 of step 1")


def test_statistics_dropout_and_caches_are_not_hidden_state() -> None:
    for job in (classifier_job(), language_job(), classifier_job(microbatch=10)):
        assert find_hidden_state(job) == ""


class Growing(nn.Module):
    """Calls more of its layers, or others, from call to call."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.layers, self.last, self.calls = nn.ModuleList(nn.Linear(5, 5) for _ in range(2)), nn.Linear(5, 3), 0
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.order == "input":
            return self.last(self.layers[0](x * self.calls))
        chosen = self.layers[: self.calls] if self.order == "more" else self.layers[self.calls % 2 :][:1]
        if self.order == "more":
            out = self.last(x)
            return out + 0 * sum(layer(x).sum() for layer in chosen)
        return self.last(chosen[0](x))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("input", "the code that calls model.layers.0 computes other numbers for microbatch 0"),
        ("others", "the model calls other modules (model.layers.1, model.layers.0) and computes other numbers"),
        ("more", "the model calls other modules (model, model.layers.1) and computes other numbers"),
    ],
)
def test_what_the_code_between_modules_carries_along_is_found(order: str, words: str) -> None:
    wrapped = classifier_job(model=lambda: nn.ModuleDict({"model": Growing(order)}), loss=of_wrapped)
    assert find_hidden_state(wrapped).startswith(words)


def of_wrapped(model: Any, batch: Any) -> evenly.Loss:
    return evenly.Loss(model["model"](batch[0]).sum(), len(batch[0]))


def test_a_loss_that_calls_the_model_more_often_from_call_to_call_is_found() -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> evenly.Loss:
        calls.append(1)
        return evenly.Loss(sum(model(batch[0]).sum() for _ in calls) / len(calls), len(batch[0]))

    found = find_hidden_state(classifier_job(model=lambda: nn.Linear(5, 3), loss=loss))
    assert found.startswith("the model calls more modules and computes other numbers")


def test_what_a_forward_writes_into_the_state_dict_is_no_hidden_state() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("average", torch.zeros(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average.lerp_(x.detach().mean(0), 0.5)
            return self.linear(x - self.average)

    assert find_hidden_state(classifier_job(model=Averaging)) == ""


CALLS = [0]


def counted_loss(model: nn.Module, batch: Any) -> evenly.Loss:
    CALLS[0] += 1
    return evenly.Loss(model(batch[0]).sum() * CALLS[0], len(batch[0]))


def test_a_loss_that_counts_its_calls_is_found() -> None:
    assert find_hidden_state(classifier_job(loss=counted_loss)).startswith("the job's loss computes other numbers")


class Drawing(Points):
    """Draws from a generator of its own."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.draw = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + torch.randn(5, generator=self.draw), self.y[index]


def test_data_with_a_memory_are_found() -> None:
    assert find_hidden_state(classifier_job(data=Drawing(37))).startswith("the data have a memory")


def test_plans_in_turns_need_a_step_each(tmp_path: Path) -> None:
    from evenly.verify.verify import VerifyRequest

    request = VerifyRequest(tmp_path / "job.py", {}, 1, "float64")
    references = _ReferenceRuns(request, tmp_path, lambda _: None)
    row = _verify_plan(request, "ddp>zero3", references, devices=2, report=lambda _: None)
    assert (row.status, "1 steps for 2 plans" in row.reason) == ("unsupported", True)


def test_what_two_processes_have_found_is_one_note() -> None:
    found = FoundInJob(broken_rule="a rule") | FoundInJob(hidden_state="a module")
    assert found == FoundInJob("a rule", "a module") and found.notes == "a rule; a module"


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ([*range(9), 8], "step 1 has samples of the stream that were trained on before"),
        ([*range(9), 10], "step 1 has samples that come later in the stream"),
        ([*range(11)], "the batch of step 1 has 11 samples of 10, or follows a short one"),
    ],
)
def test_a_stream_out_of_order_is_found(numbers: list[int], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = classifier_job(data=lambda: iter(Points(37)))
    assert broken_data_rule(job) == ""
    samples = [job.data()] * len(numbers)
    batch = StreamBatch(numbers, samples, StreamPlace(0, len(numbers)))
    monkeypatch.setattr(StreamReader, "read", lambda _: batch)
    assert broken_data_rule(job) == problem


def test_a_cut_of_a_stream_that_loses_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = loader.cut
    monkeypatch.setattr(loader, "cut", lambda *args, **kwargs: plain(*args, **kwargs)[:-1])
    found = broken_data_rule(classifier_job(data=lambda: iter(Points(37))))
    assert found == "the microbatches of step 1 do not have the samples of its batch once each"
