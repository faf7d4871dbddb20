"""An evaluation of a run: loss, metrics and figures over the job's `eval_data`, every sample exactly once.

It changes nothing that training goes on from: random states, training mode and the order of batches stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evenly.comm.collectives import decided_by_first, gather_to_first
from evenly.data.generators import seed, undisturbed
from evenly.data.loader import Share, share_of_evaluation
from evenly.data.stream import stream_key
from evenly.engine.executor import Batch
from evenly.engine.outputs import joined_outputs
from evenly.engine.step_totals import StepTotals
from evenly.errors import RunError, UserError
from evenly.job import Job, is_stream
from evenly.train.average import in_model
from evenly.train.figures import figures
from evenly.train.keep_state import keeping_state
from evenly.train.nonfinite import check_evaluation
from evenly.train.reports import Evaluation
from evenly.train.streaming import evaluate_stream

if TYPE_CHECKING:
    from evenly.train.run import Run


def evaluate(run: Run, *, average: bool = True) -> Evaluation:
    """Evaluates `run` as it is, and records what was found; called by all ranks.

    average: whether of the averaged weights, once there are any.
    """
    if run.job.eval_data is None:
        raise UserError("run.evaluate()", "the job has no eval_data", "give the Job eval_data")
    with (
        keeping_state(run, evaluating=True),
        run.world.during("evaluating"),
        in_model(run, average) as averaged,
        nullcontext() if averaged else run.updaters.evaluating(),
    ):
        sets = {
            name: _evaluate_set(run, run.job.with_eval_data(data), name) for name, data in run.job.eval_sets.items()
        }
    run.evaluation_due = False
    sets = {name: replace(found, averaged=averaged) for name, found in sets.items()}
    evaluation = replace(next(iter(sets.values())), sets={} if "" in sets else sets)
    if average:  # of what the job's own evaluations are
        run.updaters.end_evaluation(run.steps_done, {**evaluation.metrics, "loss": evaluation.loss})
    run.recorder.evaluated(run.steps_done, evaluation)
    run.clock = time.perf_counter()
    return evaluation


def _evaluate_set(run: Run, job: Job, name: str) -> Evaluation:
    outputs = run.executor.outputs = None if job.evaluate is None else {}
    try:
        totals, share = _totals(run, job)
    finally:
        run.executor.outputs = None
    check_evaluation(totals, share, run.steps_done, name)
    metrics = totals.values
    if outputs is not None:
        metrics = _with_figures(metrics, _figures_of_all(run, job, outputs))
    return Evaluation(totals.loss, totals.weight, share.samples, metrics)


def _totals(run: Run, job: Job) -> tuple[StepTotals, Share]:
    if is_stream(job.eval_data):
        assert run.hands is not None
        return evaluate_stream(run, job, run.hands)
    data = run.world.group("data")
    share = run.fitted(share_of_evaluation(job, rank=data.position, ranks=data.size))
    loader = run.loader(job)
    return run.executor.evaluate(Batch(share, loader.read(iter([share])), loader)), share


def _with_figures(metrics: Mapping[str, float], figures: Mapping[str, float]) -> dict[str, float]:
    if both := metrics.keys() & figures.keys():
        raise RunError(
            "metrics of the loss and figures of evaluate have names of their own",
            f"both have {min(both)}",
            "rename one of them",
        )
    return {**metrics, **figures}


def _figures_of_all(run: Run, job: Job, outputs: dict[int, Any]) -> dict[str, float]:
    """What the job's `evaluate` makes of the outputs of all ranks; of these, this one has some by microbatch."""
    world = run.world.group("world")
    by_rank = gather_to_first(outputs, world)

    def act() -> dict[str, float]:
        by_microbatch = {number: part for found in by_rank for number, part in found.items()}
        joined = joined_outputs([by_microbatch[number] for number in sorted(by_microbatch)])
        with undisturbed():
            seed(stream_key(job.seed, "evaluate"))
            return figures(job.evaluate, joined)

    return decided_by_first(act, world)
