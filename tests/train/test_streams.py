"""Streams in runs: every plan trains on them as one device does, reads each sample once, and goes on at the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_streams import STREAM_JOBS, CountedStream, PointStream, ResumableStream, points_job, sentences, sentences_job
from kept_ranks import KeptRanks, RankFailure
from kept_references import References

import evenly
from evenly.errors import RunError, UserError
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, compare_steps
from evenly.verify.tasks import PlanSteps

STEPS = 5  # of 23 samples in batches of 10, the third is short; the fourth begins an epoch


def prepared(name: str) -> evenly.Job:
    return STREAM_JOBS[name](precision="float64")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory, prepared, STEPS)


def compare(name: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(prepared(name), plan, STEPS, folder)


def compare_part(name: str, part: PlanSteps, folder: Path) -> RankComparison:
    return compare_steps(prepared(name), part, STEPS, folder)


PLANS = [
    ("points", "single", 1),
    ("points", "ddp", 2),
    ("points", "zero2", 3),
    ("buffered", "ddp", 2),
    ("workers", "ddp", 2),
    ("resumable", "zero3", 2),
    ("sentences", "ddp", 3),
    ("sentences", "zero3", 2),
    ("sentences", "tensor=2", 2),
    ("sentences", "pipeline=2", 2),
    ("sentences", "data=2 tensor=2 pipeline=2", 8),
]


@pytest.mark.full_but(
    "points-single-1",
    "points-ddp-2",
    "buffered-ddp-2",
    "workers-ddp-2",
    "resumable-zero3-2",
    "sentences-ddp-3",
    "sentences-tensor=2-2",
    "sentences-pipeline=2-2",
)
@pytest.mark.parametrize(("name", "plan", "size"), PLANS)
def test_a_stream_has_the_numbers_of_one_device(
    name: str, plan: str, size: int, ranks: KeptRanks, references: References
) -> None:
    row = judge(plan, ranks.run(compare, name, plan, references(name), size=size))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11


@pytest.mark.full_but("points-3", "resumable-3", "buffered-2", "buffered-4")
@pytest.mark.parametrize("done", [2, 3, 4])
@pytest.mark.parametrize("name", ["points", "resumable", "buffered"])
def test_a_run_goes_on_in_the_middle_of_a_stream(
    name: str, done: int, ranks: KeptRanks, references: References, tmp_path: Path
) -> None:
    first, second = PlanSteps("ddp", 0, done, tmp_path), PlanSteps("zero3", done, STEPS, tmp_path)  # type: ignore[arg-type]
    comparisons = ranks.run(compare_part, name, first, references(name), size=2)
    comparisons += ranks.run(compare_part, name, second, references(name), size=3)
    row = judge("ddp>zero3", comparisons)
    assert (row.status, row.reason) == ("equal", "")


def count(file: Path, plan: str, steps: int) -> None:
    job = sentences_job if "=" in plan else points_job
    changes = {"data": CountedStream(file, sentences(23) if "=" in plan else PointStream(23))}
    with evenly.start(job(**changes, global_batch=10, eval_data=None, steps=steps), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)


@pytest.mark.full_but("ddp-3", "single-1")
@pytest.mark.parametrize(("plan", "size"), [("ddp", 3), ("tensor=2 pipeline=2", 4), ("single", 1)])
def test_each_sample_is_read_once_in_the_world(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(count, tmp_path / "read", plan, 6, size=size)
    read = (tmp_path / "read").read_text().splitlines()
    assert sorted(read) == sorted(f"{epoch} {number}" for epoch in (0, 1) for number in range(23))


# ------------------------------------------------------------------------------------------- going on
class Shuffling(ResumableStream):
    """Draws its order with a generator of its own, which its state does not have."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample[0] + self.drawn(), sample[1]

    def drawn(self) -> float:
        if self._done == 1 or not hasattr(self, "own"):
            self.own = torch.Generator().manual_seed(7)
        return float(torch.rand((), generator=self.own))


class Unseeded(PointStream):
    """Other samples each time."""

    def __iter__(self) -> Iterator[Any]:
        own = torch.Generator()
        own.seed()
        for x, y in super().__iter__():
            yield x + torch.rand((), generator=own), y


def losses(data: Any, folder: Path, *, steps: int, resume: bool) -> list[float]:
    job = points_job(data=data, eval_data=None, steps=5)
    with evenly.start(job, plan="ddp", out=folder, resume=resume) as run:
        found: list[float] = []
        for batch in run.batches():
            found.append(run.step(batch).loss)
            if run.steps_done == steps:
                break
        return found


def parts(kind: type[Any], folder: Path) -> tuple[list[float], list[float]]:
    """The losses of an undisturbed run, and of one that goes on after two steps."""
    undisturbed = losses(kind(23), folder / "whole", steps=5, resume=False)
    begun = losses(kind(23), folder / "parts", steps=2, resume=False)
    return undisturbed, begun + losses(kind(23), folder / "parts", steps=5, resume=True)


def test_a_state_that_loses_something_is_not_gone_on_from(ranks: KeptRanks, tmp_path: Path) -> None:
    undisturbed, in_parts = ranks.run(parts, Shuffling, tmp_path, size=2)[0]
    assert undisturbed == in_parts


def test_a_stream_that_is_another_each_time_is_refused(ranks: KeptRanks, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failed:
        ranks.run(parts, Unseeded, tmp_path, size=2)
    assert str(failed.value).count("are others than when the checkpoint was saved") == 2  # on both ranks


# ------------------------------------------------------------------------------------------- bad input
def cut_off() -> Iterator[Any]:
    for number, sample in enumerate(PointStream(23)):
        if number == 13:
            raise OSError("the line was cut")
        yield sample


def once() -> Any:
    iterator = iter(PointStream(12))
    return lambda: iterator


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("cut", "reading sample 13 of the stream, in epoch 1"),
        ("empty", "the job's stream of samples"),
        ("once", "epoch 2 of the stream"),
        ("unevaluated", "the stream eval_data"),
    ],
)
def test_a_bad_stream_ends_all_ranks_alike(change: str, words: str, ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure) as failed:
        ranks.run(run_to_end, change, size=2)
    assert str(failed.value).count(f"Error: {words}") == 2


def run_to_end(change: str) -> None:
    bad = {"cut": cut_off, "empty": lambda: iter([]), "once": once(), "unevaluated": PointStream(23)}[change]
    job = points_job(data=bad, eval_data=(lambda: iter([])) if change == "unevaluated" else None)
    with evenly.start(job, plan="ddp") as run:
        for batch in run.batches():
            run.step(batch)
        run.evaluate()


def test_a_stream_that_keeps_its_place_is_not_evaluated_while_it_is_trained_on() -> None:
    stream, other = ResumableStream(23), PointStream(23)
    points_job(data=stream, eval_data=ResumableStream(23))
    points_job(data=other, eval_data=other)
    with pytest.raises(UserError, match="eval_data 'train' is the stream of data, which keeps its place in itself"):
        points_job(data=stream, eval_data={"train": stream})


class Infinite(PointStream):
    """The 14th sample is no number."""

    def __iter__(self) -> Iterator[Any]:
        for number, (x, y) in enumerate(super().__iter__()):
            yield (x * torch.nan if number == 13 else x), y


def not_finite(plan: str) -> str:
    with (
        evenly.start(points_job(data=Infinite(23), eval_data=None), plan=plan) as run,
        pytest.raises(RunError) as error,
    ):
        for batch in run.batches():
            run.step(batch)
    return str(error.value)


def not_finite_in_a_pass(plan: str) -> str:
    """The batch is run again after another pass of its step, when the next one was read already."""
    with (
        evenly.start(points_job(data=Infinite(23), eval_data=None), plan=plan) as run,
        pytest.raises(RunError) as error,
    ):
        for batch in run.batches():
            samples = batch.samples()
            run.forward_backward(batch)
            run.forward_backward(run.batch([(x.nan_to_num(), y) for x, y in samples[:3]]))
            run.update()
    return str(error.value)


@pytest.mark.parametrize("job", [not_finite, not_finite_in_a_pass])
def test_a_sample_that_is_not_finite_is_traced_in_the_stream(job: Any, ranks: KeptRanks) -> None:
    for text in ranks.run(job, "ddp", size=2):
        assert "step 2: the loss must be finite" in text and "samples 12, 13, 14" in text
