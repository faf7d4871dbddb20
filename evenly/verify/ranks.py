"""The functions that the processes of a verification run: the reference, and each plan's ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from evenly.checkpoint.manifest import AVERAGE, OPTIMIZER
from evenly.comm.connect import find_device
from evenly.data.alone import looking
from evenly.data.generators import undisturbed, undisturbed_past_torch
from evenly.errors import EvenlyError, JobWarning, PlanError, describe
from evenly.job import HOOKS, Job, Precision, hooks_of
from evenly.jobfile import Loop, loop_of
from evenly.launcher.environment import find_here
from evenly.plan import PlanSpec, with_microbatch
from evenly.torch_private import plain_name, without_subclasses
from evenly.train.loop import load_job_on_rank, run_loop
from evenly.train.reports import StepReport
from evenly.train.run import Run, start
from evenly.verify.additive import loss_not_additive
from evenly.verify.compare import RankComparison
from evenly.verify.data_rules import broken_data_rule
from evenly.verify.disturb import Disturbance, Disturber, LiftedCasts
from evenly.verify.full import full_tensors
from evenly.verify.hidden_state import find_hidden_state
from evenly.verify.reference import (
    OwnCodeError,
    ReferenceRun,
    ReferenceStep,
    evaluates,
    named_groups,
    rate_of,
    reference_steps,
    saves,
)
from evenly.verify.shorten import shortened, shortened_in_words
from evenly.verify.tasks import FURTHER_DRAWS, KEPT_CASTS, LEFT_OUT, FoundInJob, PlanSteps, say_shortened
from evenly.verify.trajectory import (
    Scalars,
    Trajectory,
    measure_rounding,
    named_figures,
    read_rounding,
    trajectory_folder,
)


@looking()
def write_references(
    path: Path,
    settings: dict[str, Any],
    dtype: Precision,
    plan: PlanSpec,
    steps: int,
    folder: Path,
    runs: list[tuple[Disturbance, int]],
) -> PlanError | FoundInJob:
    """Trains the job of file `path` in the plain loop, on each rank with another of `runs`: kind of rounding, and draw.

    Each saves its trajectory in a folder of its own (`trajectory_folder`), and looks at a part of the job: returns what
    it has found, or the error, without training, if `plan` does not fit the job. Of `plan`, only the microbatch counts.
    """
    torch.set_num_threads(1)
    place = find_here()
    kind, draw = runs[place.rank]
    device = find_device(replace(place, local_rank=0, local_size=1))  # a GPU draws other numbers than the CPU

    def load() -> Job:
        with undisturbed(), undisturbed_past_torch():  # every load finds the generators as a rank does
            return with_microbatch(replace(load_job_on_rank(path, settings), precision=dtype), plan)

    try:
        job = load()
    except PlanError as problem:
        return problem
    said: list[str] = []
    if kind == "none":
        say_shortened(folder, shortened_in_words(shortened(job, steps)))

    def train() -> str:
        def keep() -> None:
            again, loop = _job_of(folder, load, path)
            to = trajectory_folder(folder, kind, draw)
            keep_reference(shortened(again, steps), steps, to, kind, draw, device=device, loop=loop)

        said.extend(_train_as_can_be(keep, folder, dtype))
        return ""

    found = FoundInJob()
    if kind == "none":
        train()  # without it there is nothing to compare with
        looks = {"broken_rule": partial(broken_data_rule, job), "note": partial(loss_not_additive, job)}
    else:
        found = _all_found({"rounding": train})
        looks = {"hidden_state": partial(find_hidden_state, job)} if draw == 1 else {}
    with default_type(dtype):
        return FoundInJob(unseen="; ".join(said)) | found | _all_found(looks)


def _train_as_can_be(train: Callable[[], None], folder: Path, dtype: Precision) -> Iterator[str]:
    """Call `train`, again without lifted casts, hooks and loop where it fails for them; yield what was done."""
    while True:
        casts = lifted_casts(folder, dtype)
        try:
            with casts or nullcontext(), undisturbed(), undisturbed_past_torch():
                train()
            if casts is not None and casts.count:
                yield "float32 casts of the job are computed in float64 (--keep-casts: as they are)"
            return
        except OwnCodeError as problem:
            yield f"not verified, and left out: the job's hooks and loop ({problem.asked}: {problem.found})"
            (folder / LEFT_OUT).touch()
        except Exception as problem:
            if casts is None:
                raise
            yield f"float32 casts are kept: the job fails without ({describe(problem)})"
            (folder / KEPT_CASTS).touch()


def lifted_casts(folder: Path, dtype: Precision) -> LiftedCasts | None:
    """Return what lifts casts of a job in `dtype`; None where they are kept."""
    return LiftedCasts() if dtype == "float64" and not (folder / KEPT_CASTS).exists() else None


def _job_of(folder: Path, load: Callable[[], Job], path: Path) -> tuple[Job, Loop | None]:
    """Return a job and its loop; without hooks and loop where the reference in `folder` had to leave them out."""
    job = load()
    return (without_hooks(job), None) if (folder / LEFT_OUT).exists() else (job, loop_of(path))


def without_hooks(job: Job) -> Job:
    """`job` without its hooks."""
    return replace(job, on_step=(), on_evaluation=(), on_save=())


# By field of `FoundInJob`, or "rounding": the subject of the check.
CHECKED = {
    "broken_rule": "the order of the data", "note": "whether the loss is a sum over samples",
    "hidden_state": "state that microbatches pass on", "rounding": "the effect of rounding on this job",
}  # fmt: skip


def _all_found(looks: Mapping[str, Callable[[], str]]) -> FoundInJob:
    """Run every check of the job; say which ones fail, since none decides whether plans are equal."""
    found: dict[str, str] = {}
    unseen: list[str] = []
    for name, look in looks.items():
        try:
            found[name] = look()
        except Exception as problem:
            why = f"{problem.asked}: {problem.found}" if isinstance(problem, EvenlyError) else describe(problem)
            unseen.append(f"not checked: {CHECKED[name]} ({why})")
    found.pop("rounding", None)
    return FoundInJob(**found, unseen="; ".join(unseen))


@contextmanager
def default_type(precision: Precision) -> Generator[None]:
    """Within, what the job's code makes without stating a type (noise, a mask) is of that of a float64 model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision == "float64" else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@looking()
def keep_reference(
    job: Job,
    steps: int,
    folder: Path,
    kind: Disturbance = "none",
    draw: int = 1,
    *,
    device: str = "cpu",
    loop: Loop | None = None,
) -> None:
    """Trains `job` in the plain loop, with a `draw` of `kind` of rounding added; saves its trajectory in `folder`.

    loop: of the job's own, in place of the plain one. Raises `OwnCodeError` for errors of its hooks or its loop.
    """
    trajectory, scalars, disturber = Trajectory(folder), Scalars(), Disturber(kind, draw)

    def keep(record: ReferenceStep) -> None:
        trajectory.add_tensors(record.step, record.tensors, record.state)
        scalars.add(
            record.step,
            loss=record.loss,
            grad_norm=record.grad_norm,
            rates=record.rates,
            eval_loss=record.eval_loss,
            groups=record.groups,
            figures=named_figures(record.metrics, record.evaluation),
        )

    around = disturber.around_microbatch
    with default_type(job.precision):
        if loop is not None:
            try:
                run_loop(loop, ReferenceRun(job, steps, device, around, keep))
                scalars.losses[0]
            except EvenlyError:
                raise
            except Exception as problem:  # without a step too
                raise OwnCodeError("loop(run) in a plain loop", describe(problem)) from problem
        else:
            for record in reference_steps(job, steps, device=device, around=around):
                keep(record)
    trajectory.finish(replace(scalars, cast_eps=disturber.cast_eps))


def measure_again(job: Job, steps: int, folder: Path, kind: Disturbance) -> None:
    """Adds what further draws of `kind` of rounding do to what `keep_measured_reference` has measured in `folder`."""
    for draw in FURTHER_DRAWS:
        keep_reference(job, steps, trajectory_folder(folder, kind, draw), kind, draw)
        measure_rounding(folder, kind, draw)


def keep_measured_reference(job: Job, steps: int, folder: Path, kinds: Sequence[Disturbance]) -> None:
    """Trains `job` in the plain loop, as it is and with each of `kinds` of rounding added, in this process.

    `folder` then has what `compare_steps` compares with, under any of `kinds`.
    """
    for kind in ("none", *kinds):
        keep_reference(job, steps, trajectory_folder(folder, kind), kind)
    for kind in kinds:
        measure_rounding(folder, kind)


def compare_file(
    path: Path, settings: dict[str, Any], dtype: Precision, part: PlanSteps, steps: int, folder: Path, kind: Disturbance
) -> RankComparison:
    """Runs a part of the job of file `path` on this rank and compares it with the trajectory in `folder`."""
    with lifted_casts(folder, dtype) or nullcontext():
        job, loop = _job_of(folder, lambda: replace(load_job_on_rank(path, settings), precision=dtype), path)
        return compare_steps(shortened(job, steps), part, steps, folder, kind, loop)


def compare_job(job: Job, plan: str | PlanSpec, steps: int, folder: Path, kind: Disturbance = "sums") -> RankComparison:
    """Runs `job` under `plan` on this rank and compares every step with the trajectory `folder`/reference."""
    return compare_steps(job, PlanSteps(plan, 0, steps), steps, folder, kind)  # type: ignore[arg-type]


def compare_steps(
    job: Job, part: PlanSteps, steps: int, folder: Path, kind: Disturbance = "sums", loop: Loop | None = None
) -> RankComparison:
    """Runs a part of `job` on this rank and compares every step with the trajectory `folder`/reference.

    kind: of rounding that its plan may add. loop: of the job's own. With exact=bitwise the engine's own run on one
    device is saved as `folder`/single, and the bits of later plans are compared with it.
    """
    expected, single = Trajectory(folder / "reference"), Trajectory(folder / "single")
    scalars, rounding = expected.scalars(), read_rounding(folder / f"rounding-{kind}.json")
    job, last = replace(job, steps=max(job.steps, steps)), min(part.last, len(scalars.losses))
    own = loop is not None or any(hooks_of(job, event) for event in HOOKS)  # which may save
    options: dict[str, Any] = {"out": part.out or (folder / f"run of {part.plan}" if own else None)}
    options["steps"] = None if loop is None else part.last
    quiet = warnings.catch_warnings(action="ignore", category=JobWarning)  # the report has notes
    with quiet, default_type(job.precision), start(job, plan=part.plan, resume=part.first > 0, **options) as run:
        run.interrupt.close()  # a stop need not wait for the end of a step
        comparison = RankComparison(job.precision, run.world.rank, rounding, sharded=run.composed.sharded)
        if part.first:
            _compare_state(run, comparison, expected)

        def compare(report: StepReport) -> None:
            if report.step > last:
                comparison.add_loss(report.step, report.loss, math.inf)  # the reference has no such step
                return
            comparison.add_loss(report.step, report.loss, scalars.losses[report.step - 1])
            comparison.add_grad_norm(report.step, report.grad_norm, scalars.grad_norms[report.step - 1])
            found = run.evaluate() if loop is None and evaluates(job, report.step, steps) else None
            if loop is None and saves(job, report.step):
                run.save()
            tensors = _compare_state(run, comparison, expected)
            _compare_bits(run, comparison, tensors, single)
            evaluation: dict[str, dict[str, float]] = {}
            if found is not None:  # after the state, which it follows from
                comparison.add_evaluation(report.step, found.loss, scalars.eval_losses[report.step])
                evaluation = {name: {"loss": one.loss, **one.metrics} for name, one in found.by_name.items()}
            figures = named_figures(report.metrics, evaluation)
            comparison.add_figures(report.step, figures, scalars.figures[report.step - 1])
            _compare_groups(run, comparison, scalars)

        if loop is not None:
            run.hooks.append("on_step", lambda _, report: compare(report))
            run_loop(loop, run)
        else:
            for batch in run.batches():
                compare(run.step(batch))
                if run.steps_done == part.last:
                    break
        if run.steps_done < last:
            comparison.add_loss(run.steps_done + 1, math.inf, scalars.losses[run.steps_done])
    return comparison


def _compare_groups(run: Run, comparison: RankComparison, scalars: Scalars) -> None:
    """Compares the parameter groups after a step, and after the evaluation that a learning rate may follow."""
    step, groups = run.steps_done, run.optimizer.param_groups
    comparison.add_rates(step, [rate_of(group) for group in groups], scalars.rates[step - 1])
    with run.inside():
        named = run.composed.named_parameters()
    comparison.add_groups(step, named_groups(named, run.optimizer), scalars.groups[step - 1])


def _compare_state(run: Run, comparison: RankComparison, expected: Trajectory) -> dict[str, torch.Tensor]:
    """Compares what this rank has of the model and of the optimizer's state; returns the model's tensors."""
    step, pipeline = run.steps_done, run.composed.pipeline
    with run.inside():
        named = {n: one.detach() for n, one in chain(run.model.named_parameters(), run.model.named_buffers())}
        if pipeline is not None:
            named = {name: tensor for name, tensor in named.items() if name not in pipeline.placeholders}
        with without_subclasses():  # of what they are, however they are shown
            joined = full_tensors(named)
        whole = {name: run.composed.full_view(name, tensor) for name, tensor in joined.items()}
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in whole.items()}
    state, averages = _full_state(run)
    tensors |= averages
    comparison.add_tensors(step, tensors, expected.tensors(step))
    comparison.add_state(step, state, expected.state(step))
    return tensors


def _full_state(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The optimizer's state and the averages that this rank saves, in full, named as in the reference; a collective."""
    # Takes a second to import, which the launcher need not wait for.
    from evenly.checkpoint.state import parameter_of
    from evenly.train.resume import snapshot

    saved = snapshot(run)
    state = full_tensors({n: tensor for n, tensor in saved.tensors.items() if n.startswith((OPTIMIZER, AVERAGE))})
    averages = {
        f"average of {parameter_of(name)}": tensor.detach().cpu().clone()
        for name, tensor in state.items()
        if name.startswith(AVERAGE)
    }
    found = {
        f"{name.rpartition('.')[2]} of {plain_name(parameter_of(name))}": tensor.detach().cpu()
        for name, tensor in state.items()
        if name.startswith(OPTIMIZER) and "/" not in name
    }
    for owner, values in saved.values["optimizer"]["state"].items():
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        found |= {f"{key} of {owner}": torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
    return found, averages


def _compare_bits(run: Run, comparison: RankComparison, tensors: dict[str, torch.Tensor], single: Trajectory) -> None:
    if run.plan.exact != "bitwise":
        return
    if run.plan.devices == 1:
        single.add_tensors(run.steps_done, tensors)
    comparison.add_bits(run.steps_done, tensors, single.tensors(run.steps_done))
