"""Faults that distributed training is known for, planted in the engine: `verify` finds and names each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import classifier_job
from kept_ranks import KeptRanks

import evenly.data.loader as loader
import evenly.engine.executor as executor
import evenly.engine.updater as updater
import evenly.parallel.core.statistics as statistics
import evenly.parallel.data.gradients as gradients
from evenly.job import Loss
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference

STEPS = 3


def rank() -> int:
    return int(os.environ["RANK"])


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Every microbatch counts the same, however much it holds."""
    plain = executor.as_loss
    patch.setattr(executor, "as_loss", lambda *a: Loss(plain(*a).total / float(plain(*a).weight), 1.0))


def repeated_evaluation_sample(patch: pytest.MonkeyPatch) -> None:
    """The evaluation set is filled up so that every rank gets the same number of samples."""
    plain = loader.microbatches_of_evaluation
    patch.setattr(loader, "microbatches_of_evaluation", lambda job: [*plain(job), [0]])


def double_reduction(patch: pytest.MonkeyPatch) -> None:
    """Gradients that were already summed are summed again."""
    plain = gradients.GradientSum.finish_reduce

    def receive(self: Any) -> list[float]:
        values = plain(self)
        for bucket in self.buckets:
            gradients.all_reduce(bucket.gradients, bucket.group)
        return values

    patch.setattr(gradients.GradientSum, "finish_reduce", receive)


def averaged_gradients(patch: pytest.MonkeyPatch) -> None:
    """Gradients are divided by the number of ranks on top of the weight."""
    plain = gradients.GradientSum.finish_reduce

    def receive(self: Any) -> list[float]:
        values = plain(self)
        for bucket in self.buckets:
            bucket.gradients.div_(2)
        return values

    patch.setattr(gradients.GradientSum, "finish_reduce", receive)


def dropout_by_rank(patch: pytest.MonkeyPatch) -> None:
    """The stream of a microbatch follows the rank that runs it."""
    plain = executor.stream_key
    patch.setattr(executor, "stream_key", lambda seed, *place: plain(seed, *place, rank()))


def augmentation_by_rank(patch: pytest.MonkeyPatch) -> None:
    """The stream of reading samples follows the rank that reads them."""
    plain = loader.stream_key
    patch.setattr(loader, "stream_key", lambda seed, *place: plain(seed, *place, rank()))


def unclipped(patch: pytest.MonkeyPatch) -> None:
    """The gradient is left as long as it is."""
    patch.setattr(gradients.GradientSum, "scale", lambda self, factor: None)


def clipped_by_local_norm(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by a norm of its own."""
    plain = gradients.GradientSum.norm
    patch.setattr(gradients.GradientSum, "norm", lambda self: plain(self) * (1 + rank()))


def lost_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The last rank drops what does not divide evenly."""
    plain = loader.deal
    patch.setattr(loader, "_dealt_by_samples", lambda n, ranks: [*plain(n, ranks)[:-1], plain(n, ranks)[-1][:-1]])


def schedule_by_rank_steps(patch: pytest.MonkeyPatch) -> None:
    """The schedule is stepped once per rank, as it is when it counts what all ranks did."""
    plain = updater.build_schedule

    def build(job: Any, optimizer: Any) -> Any:
        schedule = plain(job, optimizer)
        step = schedule.step
        schedule.step = lambda: (step(), step())
        return schedule

    patch.setattr(updater, "build_schedule", build)


def statistics_of_own_rank(patch: pytest.MonkeyPatch) -> None:
    """Running statistics see only the rank's own microbatches."""
    patch.setattr(statistics, "all_reduce", lambda tensor, group, **_: tensor)


def zeros_for_unused(patch: pytest.MonkeyPatch) -> None:
    """A parameter that no rank used gets a gradient of zeros, and so weight decay (trap S10)."""
    plain = gradients.GradientSum.divide

    def divide(self: Any, divisor: float) -> None:
        plain(self, divisor)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.grad = slot.gradient

    patch.setattr(gradients.GradientSum, "divide", divide)


def other_order(patch: pytest.MonkeyPatch) -> None:
    """Each rank shuffles for itself."""
    plain = loader.batch_indices
    patch.setattr(loader, "batch_indices", lambda *, seed, **rest: plain(seed=seed + rank(), **rest))


def forgotten_unused_share(patch: pytest.MonkeyPatch) -> None:
    """Old sums of a parameter that this rank did not use in this step are summed again."""

    def send(self: Any, end: int) -> None:
        for bucket in self.buckets[self._sent : end]:
            bucket.pending = gradients.all_reduce.begin(bucket.sent, bucket.group)
        self._sent = end

    patch.setattr(gradients.GradientSum, "_send_until", send)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    mean_of_means: "loss at step 1",
    repeated_evaluation_sample: "evaluation loss at step 3",
    double_reduction: "grad_norm at step 1",
    averaged_gradients: "grad_norm at step 1",
    dropout_by_rank: "loss at step 1",
    augmentation_by_rank: "loss at step 1",
    unclipped: "first.weight at step 1",
    clipped_by_local_norm: "grad_norm at step 1 on rank 1",
    lost_microbatch: "loss at step 1",
    schedule_by_rank_steps: "first.weight at step 2",
    statistics_of_own_rank: "norm.running_mean at step 1",
    zeros_for_unused: "never at step 1",
    other_order: "loss at step 1",
    forgotten_unused_share: "grad_norm at step 2",
}


def compare(fault: Callable[[pytest.MonkeyPatch], None] | None, folder: Path) -> RankComparison:
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
            patch.setattr("evenly.train.run.check_job", lambda *_: [])  # finds some of them first
        return compare_job(classifier_job(precision="float64"), "ddp", STEPS, folder)


@pytest.fixture(scope="module")
def folder(ranks: KeptRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    ranks.run(reference_in_float64, folder, size=1)
    return folder


def reference_in_float64(folder: Path) -> None:
    keep_reference(classifier_job(precision="float64"), STEPS, folder / "reference")


def test_without_a_fault_nothing_is_found(ranks: KeptRanks, folder: Path) -> None:
    row = judge("ddp", ranks.run(compare, None, folder))
    assert (row.status, row.reason) == ("equal", "")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_named(fault: Any, ranks: KeptRanks, folder: Path) -> None:
    row = judge("ddp", ranks.run(compare, fault, folder))
    assert row.status == "different"
    assert row.reason.startswith(f"first difference: {FAULTS[fault]}")
