"""Faults that distributed training is known for, planted in the engine: `verify` finds and names each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import classifier_job, tower_job
from jobs_pipeline import PIPELINE_JOBS
from jobs_tensor import heads_job
from kept_ranks import KeptRanks

import evenly
import evenly.data.loader as loader
import evenly.data.sample_reader as sample_reader
import evenly.engine.executor as executor
import evenly.engine.updater as updater
import evenly.parallel.core.calls as calls
import evenly.parallel.core.statistics as statistics
import evenly.parallel.data.buckets as buckets
import evenly.parallel.data.gradients as gradients
import evenly.parallel.data.partition as partition
import evenly.parallel.data.shards as shards
import evenly.parallel.data.squares as squares
import evenly.parallel.tensor.model as tensor_model
import evenly.train.resume as resume
from evenly.engine.compose import Composed
from evenly.job import Loss
from evenly.parallel.data.replicas import ReplicaGradients, Replicas
from evenly.parallel.pipeline.messages import IncomingGradients, IncomingTensors, StageChannel
from evenly.parallel.pipeline.schedule_runner import ScheduleRunner
from evenly.parallel.pipeline.ties import Ties
from evenly.parallel.tensor.axis import Axis
from evenly.plan import parse_plan
from evenly.verify.compare import RankComparison, judge
from evenly.verify.disturb import Disturbance
from evenly.verify.ranks import compare_steps, keep_measured_reference, measure_again
from evenly.verify.tasks import PlanSteps

STEPS = 3

Patch = pytest.MonkeyPatch


def rank() -> int:
    return int(os.environ["RANK"])


def mean_of_means(patch: Patch) -> None:
    """Every microbatch counts the same, however much it holds."""
    plain = executor.as_loss
    patch.setattr(executor, "as_loss", lambda *a: Loss(plain(*a).total / float(plain(*a).weight), 1.0))


def repeated_evaluation_sample(patch: Patch) -> None:
    """The evaluation set is filled up so that every rank gets the same number of samples."""
    plain = loader.microbatches_of_evaluation
    patch.setattr(loader, "microbatches_of_evaluation", lambda job: [*plain(job), [0]])


def double_reduction(patch: Patch) -> None:
    """Gradients that were already summed are summed again."""
    plain = gradients.GradientSum.finish_reduce

    def receive(self: Any) -> list[float]:
        values = plain(self)
        for bucket in self.buckets:
            gradients.all_reduce(bucket.gradients, bucket.group)
        return values

    patch.setattr(gradients.GradientSum, "finish_reduce", receive)


def averaged_gradients(patch: Patch) -> None:
    """Gradients are divided by the number of ranks on top of the weight."""
    plain = gradients.GradientSum.finish_reduce

    def receive(self: Any) -> list[float]:
        values = plain(self)
        for bucket in self.buckets:
            bucket.gradients.div_(2)
        return values

    patch.setattr(gradients.GradientSum, "finish_reduce", receive)


def dropout_by_rank(patch: Patch) -> None:
    """The stream of a microbatch follows the rank that runs it."""
    plain = executor.stream_key
    patch.setattr(executor, "stream_key", lambda seed, *place: plain(seed, *place, rank()))


def augmentation_by_rank(patch: Patch) -> None:
    """The stream of reading samples follows the rank that reads them."""
    plain = loader.stream_key
    patch.setattr(loader, "stream_key", lambda seed, *place: plain(seed, *place, rank()))


def unclipped(patch: Patch) -> None:
    """The gradient is left as long as it is."""
    patch.setattr(gradients.GradientSum, "scale", lambda self, factor: None)


def clipped_by_local_norm(patch: Patch) -> None:
    """Each rank clips by a norm of its own."""
    plain = gradients.GradientSum.norm
    patch.setattr(gradients.GradientSum, "norm", lambda self: plain(self) * (1 + rank()))


def lost_microbatch(patch: Patch) -> None:
    """The last rank drops what does not divide evenly."""
    plain = loader.deal
    patch.setattr(loader, "_dealt_by_samples", lambda n, ranks: [*plain(n, ranks)[:-1], plain(n, ranks)[-1][:-1]])


def schedule_by_rank_steps(patch: Patch) -> None:
    """The schedule is stepped once per rank, as it is when it counts what all ranks did."""
    plain = updater.build_schedule

    def build(job: Any, optimizer: Any) -> Any:
        schedule = plain(job, optimizer)
        step = schedule.step
        schedule.step = lambda: (step(), step())
        return schedule

    patch.setattr(updater, "build_schedule", build)


def statistics_of_own_rank(patch: Patch) -> None:
    """Running statistics see only the rank's own microbatches."""
    patch.setattr(statistics, "all_reduce", lambda tensor, group, **_: tensor)


def zeros_for_unused(patch: Patch) -> None:
    """A parameter that no rank used gets a gradient of zeros, and so weight decay (trap S10)."""
    plain = gradients.GradientSum.divide

    def divide(self: Any, divisor: float) -> None:
        plain(self, divisor)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.grad = slot.gradient

    patch.setattr(gradients.GradientSum, "divide", divide)


def other_order(patch: Patch) -> None:
    """Each rank shuffles for itself."""
    plain = loader.batch_indices
    patch.setattr(loader, "batch_indices", lambda *, seed, **rest: plain(seed=seed + rank(), **rest))


def forgotten_unused_share(patch: Patch) -> None:
    """Old sums of a parameter that this rank did not use in this step are summed again."""

    def send(self: Any) -> None:
        self.sending = True
        self._begin_sum()

    patch.setattr(buckets.Bucket, "send", send)
    patch.setattr(buckets, "SMALL", 0)  # the others begin a step as zeros


def small_gradients_not_zeroed(patch: Patch) -> None:
    """Autograd adds to what the last step has left."""
    plain = buckets.Bucket.begin_small

    def begin_small(self: Any, dropped: Any) -> None:
        before = self.gradients.clone()
        plain(self, dropped)
        self.gradients.copy_(before)

    patch.setattr(buckets.Bucket, "begin_small", begin_small)


# --- evaluation -----------------------------------------------------------------------------------------


def lost_evaluation_samples(patch: Patch) -> None:
    """The last rank evaluates one microbatch less."""
    plain = loader.share_of_evaluation

    def share(job: Any, *, rank: int, ranks: int) -> Any:
        found = plain(job, rank=rank, ranks=ranks)
        return loader.replace(found, own=found.own[: len(found.own) - (rank == ranks - 1)])

    patch.setattr("evenly.train.evaluate.share_of_evaluation", share)


def evaluation_in_training_mode(patch: Patch) -> None:
    """Dropout is on while the model is evaluated."""
    patch.setattr(Composed, "train", lambda self, mode: None)


def training_in_evaluation_mode(patch: Patch) -> None:
    """After an evaluation the model stays as it is."""
    plain = Composed.train
    patch.setattr(Composed, "train", lambda self, mode: None if mode else plain(self, mode))


# --- ZeRO 1 and 2 ---------------------------------------------------------------------------------------


def rows_of_others_not_gathered(patch: Patch) -> None:
    """After an update a rank goes on with the old rows of the others."""
    patch.setattr(partition.ShardedBucket, "finish_gather", lambda self, pending: pending.wait())


def first_bucket_not_gathered(patch: Patch) -> None:
    plain = partition.PartitionedGradients.all_gather_parameters

    def gather(self: Any) -> None:
        self.buckets[0].finish_gather = lambda pending: pending.wait()
        plain(self)

    patch.setattr(partition.PartitionedGradients, "all_gather_parameters", gather)


def rounds_overwrite(patch: Patch) -> None:
    """Only the last round of reduce-scatters counts."""
    plain = partition.PartitionedGradients._send_until

    def send(self: Any, end: int) -> None:
        for bucket in self.buckets[self._sent : end]:
            bucket.sums = partition.NOTHING
        plain(self, end)

    patch.setattr(partition.PartitionedGradients, "_send_until", send)


def norm_of_own_rows(patch: Patch) -> None:
    """The norm counts only this rank's rows."""
    patch.setattr(partition, "norm_of_shards", lambda shards, group: squares.sum_of_squares(shards).sqrt())


def undivided_rows(patch: Patch) -> None:
    """The gradient is not divided by the weight."""
    patch.setattr(partition.PartitionedGradients, "divide", lambda self, divisor: None)


def unclipped_rows(patch: Patch) -> None:
    patch.setattr(partition.PartitionedGradients, "scale", lambda self, factor: None)


def all_rows_used(patch: Patch) -> None:
    """A parameter that no rank used is stepped with zeros."""
    plain = partition.PartitionedGradients.finish_reduce

    def finish(self: Any) -> list[float]:
        values = plain(self)
        for part in self._parts:
            part.used = True
        return values

    patch.setattr(partition.PartitionedGradients, "finish_reduce", finish)


def totals_in_half(patch: Patch) -> None:
    """Gradients are rounded to bfloat16 before they are sent."""
    plain = partition.ShardedBucket.pack
    patch.setattr(partition.ShardedBucket, "pack", lambda self: plain(self).bfloat16().double())


# --- ZeRO 3 ---------------------------------------------------------------------------------------------


def averaged_shards(patch: Patch) -> None:
    """`fully_shard` divides by the number of ranks, as it does if it is not asked to sum."""
    plain = shards._set_up_units

    def set_up(units: Any, group: Any, *others: Any) -> None:
        plain(units, group, *others)
        for unit in units:
            unit.set_gradient_divide_factor(2.0)

    patch.setattr(shards, "_set_up_units", set_up)


def fillers_count(patch: Patch) -> None:
    """A microbatch that fills up a rank's rounds counts."""
    plain = sample_reader.Microbatch
    patch.setattr(
        sample_reader, "Microbatch", lambda number, samples, batch, counts: plain(number, samples, batch, True)
    )


def norm_of_own_shards(patch: Patch) -> None:
    plain = shards.begin_numbers
    patch.setattr(
        shards,
        "begin_numbers",
        lambda flags, numbers, group, squares: plain(flags, numbers, group, squares * (1 + rank())),
    )


def unclipped_shards(patch: Patch) -> None:
    patch.setattr(shards.ShardedGradients, "scale", lambda self, factor: None)


def lost_shards(patch: Patch) -> None:
    """The last of the sharded gradients is never stepped."""
    plain = shards.ShardedGradients.named_gradients

    def named(self: Any) -> Iterator[tuple[str, Any]]:
        *others, (name, _) = plain(self)
        yield from (*others, (name, None))

    patch.setattr(shards.ShardedGradients, "named_gradients", named)


# --- tensor ---------------------------------------------------------------------------------------------


def partial_sums_not_added(patch: Patch) -> None:
    """A row-parallel product is left as each rank's share of it."""
    patch.setattr(Axis, "total", lambda self, tensor: tensor)


def input_gradients_not_added(patch: Patch) -> None:
    """The gradient of a column-parallel product's input is that of this rank's columns."""
    patch.setattr(Axis, "enter", lambda self, tensor, **_: tensor)


def everyones_first_part(patch: Patch) -> None:
    """All ranks begin with the part of the first."""
    plain = tensor_model.own_part
    patch.setattr(tensor_model, "own_part", lambda tensor, layout, rank: plain(tensor, layout, 0))


def gathered_in_float32(patch: Patch) -> None:
    plain = Axis.gather_full
    patch.setattr(Axis, "gather_full", lambda self, tensor: plain(self, tensor).float().double())


def split_gradients_counted_once(patch: Patch) -> None:
    """The norm counts this rank's part of what is split."""
    patch.setattr(
        gradients.Ownership,
        "norm",
        lambda self, named, *_: squares.sum_of_squares(g for _, g in named if g is not None).sqrt(),
    )


# --- pipeline -------------------------------------------------------------------------------------------


def ties_not_summed(patch: Patch) -> None:
    """Each stage steps its copy of a tied weight with its own gradient."""
    patch.setattr(Ties, "sum", lambda self, named: None)


def ties_counted_twice(patch: Patch) -> None:
    """The norm counts a tied weight on each of its stages."""
    patch.setattr(Ties, "counted_elsewhere", property(lambda self: set()))


def gradients_not_returned(patch: Patch) -> None:
    """A stage gets zeros as the gradient of what it has sent."""
    plain = IncomingGradients.wait
    patch.setattr(IncomingGradients, "wait", lambda self: [g if g is None else g * 0 for g in plain(self)])


def messages_in_float32(patch: Patch) -> None:
    plain = StageChannel._send

    def send(self: Any, tensor: Any, *rest: Any) -> None:
        plain(self, tensor.float().double() if tensor.is_floating_point() else tensor, *rest)

    patch.setattr(StageChannel, "_send", send)


def messages_of_the_samples_reversed(patch: Patch) -> None:
    plain = IncomingTensors.wait

    def wait(self: Any) -> Any:
        return [t if t is None else t.detach().flip(0).requires_grad_(t.requires_grad) for t in plain(self)]

    patch.setattr(IncomingTensors, "wait", wait)


def lost_weight_gradient(patch: Patch) -> None:
    """Of a split backward, the second part of the first microbatch never runs."""
    plain = ScheduleRunner._backward_weight
    patch.setattr(ScheduleRunner, "_backward_weight", lambda self, at: plain(self, at) if at[1] else None)


def dropout_of_blocks_by_rank(patch: Patch) -> None:
    """The stream of a block follows the rank that runs it."""
    plain = calls.block_key
    patch.setattr(calls, "block_key", lambda key, *rest: plain(key + rank(), *rest))


# --- replicas -------------------------------------------------------------------------------------------


def stale_replicas(patch: Patch) -> None:
    """The second replica keeps the parameters that it began with."""
    patch.setattr(Replicas, "refresh", lambda self: None)


def lost_replica(patch: Patch) -> None:
    """The gradients of the second replica are not added."""
    patch.setattr(ReplicaGradients, "start_reduce", lambda self, numbers=(): self._sum.start_reduce(numbers))


def statistics_of_first_replica(patch: Patch) -> None:
    patch.setattr(statistics.RunningStatistics, "merge", lambda self, other: None)


# --- resume ---------------------------------------------------------------------------------------------


def after_restoring(change: Callable[[Any], None]) -> Callable[[Patch], None]:
    """A fault that shows once a run has been restored."""

    def plant(patch: Patch) -> None:
        plain = resume.restore

        def restore(run: Any, store: Any, step: int | None = None) -> None:
            plain(run, store, step)
            with torch.no_grad():
                change(run)

        patch.setattr(resume, "restore", restore)

    return plant


def forget_momenta(run: Any) -> None:
    for state in run.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].zero_()


def forget_step_numbers(run: Any) -> None:
    for state in run.optimizer.state.values():
        state["step"].zero_()


def forget_statistics(run: Any) -> None:
    run.model.norm.running_mean.zero_()


def forget_schedule(run: Any) -> None:
    run.schedule.last_epoch = 0


def narrow_weights(run: Any) -> None:
    for parameter in run.model.parameters():
        parameter.copy_(parameter.float())


forgotten_momenta, forgotten_step_numbers = after_restoring(forget_momenta), after_restoring(forget_step_numbers)
forgotten_statistics, forgotten_schedule = after_restoring(forget_statistics), after_restoring(forget_schedule)
narrowed_weights = after_restoring(narrow_weights)


def streams_from_the_resume_on(patch: Patch) -> None:
    """Random streams count the steps since the run was resumed."""
    first = [0]
    after_restoring(lambda run: first.__setitem__(0, run.steps_done))(patch)
    plain = executor.stream_key
    patch.setattr(executor, "stream_key", lambda seed, word, step, *rest: plain(seed, word, step - first[0], *rest))


# --- precision and update -------------------------------------------------------------------------------


def changed_gradient(name: str, factor: float) -> Callable[[Patch], None]:
    """The gradient of one parameter is multiplied by `factor`."""

    def plant(patch: Patch) -> None:
        plain = gradients.GradientSum.divide

        def divide(self: Any, divisor: float) -> None:
            plain(self, divisor)
            for slot in self._slots:
                if slot.name == name:
                    slot.gradient.mul_(factor)

        patch.setattr(gradients.GradientSum, "divide", divide)

    return plant


zeroed_gradient, flipped_gradient = changed_gradient("first.weight", 0.0), changed_gradient("first.weight", -1.0)
gradient_of_a_bias_doubled = changed_gradient("last.bias", 2.0)


def lost_weight_decay(patch: Patch) -> None:
    plain = updater.build_optimizer

    def build(*given: Any) -> Any:
        optimizer = plain(*given)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        return optimizer

    patch.setattr(updater, "build_optimizer", build)


def sums_in_bfloat16(patch: Patch) -> None:
    """Sums of gradients over microbatches are rounded to bfloat16."""
    plain = gradients.GradientSum._take

    def take(self: Any, bucket: Any, slot: Any, parameter: torch.Tensor, *leaves: bool) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.bfloat16())
        plain(self, bucket, slot, parameter, *leaves)

    patch.setattr(gradients.GradientSum, "_take", take)


def one_lost_element(patch: Patch) -> None:
    """One element of one gradient is left out."""
    plain = gradients.GradientSum.divide

    def divide(self: Any, divisor: float) -> None:
        plain(self, divisor)
        self._slots[0].gradient.view(-1)[1] = 0

    patch.setattr(gradients.GradientSum, "divide", divide)


def scale_left_in(patch: Patch) -> None:
    """The gradient of float16 is divided by half of its scale."""
    plain = updater.first_scale
    patch.setattr(updater, "first_scale", lambda *given: plain(*given))
    divide = gradients.GradientSum.divide
    patch.setattr(gradients.GradientSum, "divide", lambda self, divisor: divide(self, divisor / 2))


@dataclass(frozen=True)
class Case:
    """A fault, the run that it is planted in, and how the reason of its row begins."""

    fault: Callable[[Patch], None]
    plan: str
    reason: str
    job: str = "classifier"
    dtype: str = "float64"


JOBS: dict[str, Callable[..., evenly.Job]] = {
    "classifier": classifier_job, "tower": tower_job, "heads": heads_job, "tied": PIPELINE_JOBS["tied"],
}  # fmt: skip

CASES = {
    "mean of means": Case(mean_of_means, "ddp", "loss at step 1"),
    "repeated evaluation sample": Case(repeated_evaluation_sample, "ddp", "evaluation loss at step 1"),
    "double reduction": Case(double_reduction, "ddp", "grad_norm at step 1"),
    "averaged gradients": Case(averaged_gradients, "ddp", "grad_norm at step 1"),
    "dropout by rank": Case(dropout_by_rank, "ddp", "loss at step 1"),
    "augmentation by rank": Case(augmentation_by_rank, "ddp", "loss at step 1"),
    "unclipped": Case(unclipped, "ddp", "first.weight at step 1"),
    "clipped by a local norm": Case(clipped_by_local_norm, "ddp", "grad_norm at step 1 on rank 1"),
    "lost microbatch": Case(lost_microbatch, "ddp", "loss at step 1"),
    "schedule by rank steps": Case(schedule_by_rank_steps, "ddp", "learning rate of group 0 at step 1"),
    "statistics of own rank": Case(statistics_of_own_rank, "ddp", "norm.running_mean at step 1"),
    "zeros for unused": Case(zeros_for_unused, "ddp", "never at step 1"),
    "other order": Case(other_order, "ddp", "loss at step 1"),
    "forgotten unused share": Case(forgotten_unused_share, "ddp", "grad_norm at step 2"),
    "small gradients not zeroed": Case(small_gradients_not_zeroed, "ddp", "grad_norm at step 2"),
    "lost evaluation samples": Case(lost_evaluation_samples, "ddp", "evaluation loss at step 1"),
    "evaluation in training mode": Case(evaluation_in_training_mode, "ddp", "evaluation loss at step 1"),
    "training in evaluation mode": Case(training_in_evaluation_mode, "ddp", "loss at step 2"),
    "rows of others not gathered": Case(rows_of_others_not_gathered, "zero1", "first.weight at step 1"),
    "first bucket not gathered": Case(first_bucket_not_gathered, "zero2", "first.weight at step 1"),
    "rounds overwrite": Case(rounds_overwrite, "zero2", "grad_norm at step 1"),
    "norm of own rows": Case(norm_of_own_rows, "zero1", "grad_norm at step 1"),
    "undivided rows": Case(undivided_rows, "zero1", "first.weight at step 1"),
    "unclipped rows": Case(unclipped_rows, "zero2", "first.weight at step 1"),
    "all rows used": Case(all_rows_used, "zero1", "never at step 1"),
    "totals in half": Case(totals_in_half, "zero1", "grad_norm at step 1"),
    "averaged shards": Case(averaged_shards, "zero3", "grad_norm at step 1", "tower"),
    "fillers count": Case(fillers_count, "zero3", "grad_norm at step 1", "tower"),
    "norm of own shards": Case(norm_of_own_shards, "zero3", "grad_norm at step 1", "tower"),
    "unclipped shards": Case(unclipped_shards, "zero3", "blocks.0.feed.0.bias at step 1", "tower"),
    "lost shards": Case(lost_shards, "zero3", "blocks.2.feed.3.bias at step 1", "tower"),
    "partial sums not added": Case(partial_sums_not_added, "tensor=2", "loss at step 1", "heads"),
    "input gradients not added": Case(input_gradients_not_added, "tensor=2", "grad_norm at step 1", "heads"),
    "everyone's first part": Case(everyones_first_part, "tensor=2", "loss at step 1", "heads"),
    "gathered in float32": Case(gathered_in_float32, "tensor=2", "blocks.0", "heads"),
    "split gradients counted once": Case(split_gradients_counted_once, "tensor=2", "grad_norm at step 1", "heads"),
    "dropout by rank of a pair": Case(dropout_by_rank, "tensor=2", "loss at step 1", "heads"),
    "ties not summed": Case(ties_not_summed, "pipeline=2", "grad_norm at step 1", "tied"),
    "ties counted twice": Case(ties_counted_twice, "pipeline=2", "grad_norm at step 1", "tied"),
    "gradients not returned": Case(gradients_not_returned, "pipeline=2", "grad_norm at step 1", "tied"),
    "messages in float32": Case(messages_in_float32, "pipeline=2", "grad_norm at step 1", "tied"),
    "messages reversed": Case(messages_of_the_samples_reversed, "pipeline=2", "loss at step 1", "tied"),
    "lost weight gradient": Case(
        lost_weight_gradient, "pipeline=2 schedule=zero-bubble", "grad_norm at step 1", "tied"
    ),
    "dropout of blocks by rank": Case(dropout_of_blocks_by_rank, "pipeline=2", "loss at step 1", "tied"),
    "stale replicas": Case(stale_replicas, "dp", "evaluation loss at step 1"),
    "lost replica": Case(lost_replica, "balanced-dp", "grad_norm at step 1"),
    "statistics of the first replica": Case(statistics_of_first_replica, "dp", "norm.running_mean at step 1"),
    "forgotten momenta": Case(forgotten_momenta, "ddp>ddp", "exp_avg of"),
    "forgotten step numbers": Case(forgotten_step_numbers, "ddp>zero1", "step of"),
    "forgotten statistics": Case(forgotten_statistics, "zero1>ddp", "norm.running_mean at step 1"),
    "forgotten schedule": Case(forgotten_schedule, "ddp>ddp", "learning rate of group 0 at step 2"),
    "narrowed weights": Case(narrowed_weights, "zero3>ddp", "blocks.0", "tower"),
    "streams from the resume on": Case(streams_from_the_resume_on, "ddp>ddp", "loss at step 2"),
    "zeroed gradient": Case(zeroed_gradient, "ddp", "first.weight at step 1", dtype="bfloat16"),
    "flipped gradient": Case(flipped_gradient, "ddp", "first.weight at step 1", dtype="bfloat16"),
    "gradient of a bias doubled": Case(
        gradient_of_a_bias_doubled, "ddp", "exp_avg of last.bias at step 1", dtype="bfloat16"
    ),
    "lost weight decay": Case(lost_weight_decay, "ddp", "first.weight at step 1", dtype="bfloat16"),
    "lost weight decay in float32": Case(lost_weight_decay, "zero1", "first.weight at step 1", dtype="float32"),
    "sums in bfloat16": Case(sums_in_bfloat16, "ddp", "grad_norm at step 1", dtype="float32"),
    "one lost element": Case(one_lost_element, "ddp", "exp_avg of", dtype="float32"),
    "scale left in": Case(scale_left_in, "ddp", "norm.bias at step 2", dtype="float16"),
}


def make_job(name: str, dtype: str) -> evenly.Job:
    return JOBS[name](precision=dtype)


def references(name: str, dtype: str, kind: Disturbance, folder: Path) -> None:
    """As before a plan is called different: with all draws of rounding."""
    keep_measured_reference(make_job(name, dtype), STEPS, folder, [kind])
    measure_again(make_job(name, dtype), STEPS, folder, kind)


def compare(name: str, plans: str, job: str, dtype: str, kind: Disturbance, folder: Path) -> list[RankComparison]:
    """The comparisons of a run, planted with the fault of this name if there is one; of plans in turns, of each."""
    found: list[RankComparison] = []
    with pytest.MonkeyPatch.context() as patch:
        if name:
            CASES[name].fault(patch)
            for look in ("check_job", "check_update"):  # which find some of them first
                patch.setattr(f"evenly.train.run.{look}", lambda *_, **__: [])
        segments = plans.split(">")
        for number, plan in enumerate(segments):
            first, last = number, STEPS if number == len(segments) - 1 else number + 1
            out = folder / f"run {name} {plans}" if len(segments) > 1 else None
            found.append(
                compare_steps(make_job(job, dtype), PlanSteps(_fitted(plan), first, last, out), STEPS, folder, kind)
            )
    return found


def _fitted(plan: str) -> Any:
    spec = parse_plan(plan)
    return spec.fit(2 if spec.replicas is not None else int(os.environ["WORLD_SIZE"]))


Reference = Callable[[str, str, str], tuple[Disturbance, Path]]


@pytest.fixture(scope="module")
def reference(ranks: KeptRanks, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Makes the references of a job in a precision for a plan, once."""
    made: dict[tuple[str, str, Disturbance], Path] = {}

    def make(job: str, dtype: str, plan: str) -> tuple[Disturbance, Path]:
        kind: Disturbance = "forward" if "tensor" in plan else "sums"
        if (key := (job, dtype, kind)) not in made:
            made[key] = tmp_path_factory.mktemp("faults")
            ranks.run(references, *key, made[key], size=1)
        return kind, made[key]

    return make


def row_of(plan: str, found: Sequence[Any]) -> Any:
    return judge(plan, [comparison for comparisons in found for comparison in comparisons])


SOUND = sorted({(case.plan, case.job, case.dtype) for case in CASES.values()})


@pytest.mark.full_but(
    "dp classifier float64",
    "ddp classifier float32",
    "ddp classifier float64",
    "pipeline=2 tied float64",
    "tensor=2 heads float64",
    "zero3 tower float64",
    "ddp>zero1 classifier float64",
)
@pytest.mark.parametrize("run", SOUND, ids=" ".join)
def test_without_a_fault_nothing_is_found(run: tuple[str, str, str], ranks: KeptRanks, reference: Reference) -> None:
    plan, job, dtype = run
    kind, folder = reference(job, dtype, plan)
    row = row_of(plan, ranks.run(compare, "", *run, kind, folder, size=1 if plan in ("dp", "balanced-dp") else 2))
    assert (row.status, row.reason) == ("equal", "")


@pytest.mark.full_but(
    "mean of means",
    "lost evaluation samples",
    "double reduction",
    "unclipped",
    "schedule by rank steps",
    "statistics of own rank",
    "zeros for unused",
    "clipped by a local norm",
    "rows of others not gathered",
    "rounds overwrite",
    "lost shards",
    "partial sums not added",
    "ties not summed",
    "lost replica",
    "forgotten momenta",
    "forgotten step numbers",
    "narrowed weights",
    "one lost element",
    "scale left in",
)
@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found_and_named(name: str, ranks: KeptRanks, reference: Reference) -> None:
    case = CASES[name]
    kind, folder = reference(case.job, case.dtype, case.plan)
    size = 1 if case.plan in ("dp", "balanced-dp") else 2
    row = row_of(case.plan, ranks.run(compare, name, case.plan, case.job, case.dtype, kind, folder, size=size))
    print(name, "|", row.reason)
    assert row.status == "different"
    assert row.reason.startswith(f"first difference: {case.reason}")
