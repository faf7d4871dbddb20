"""The functions that the processes of a verification run: the reference, and each plan's ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from evenly.errors import PlanError
from evenly.job import Job, Precision
from evenly.jobfile import load_job
from evenly.plan import PlanSpec, with_microbatch
from evenly.torch_private import TO_COPY, TorchDispatchMode
from evenly.train import Run, start
from evenly.verify.compare import RankComparison
from evenly.verify.reference import loss_not_additive, named_tensors, reference_steps


def write_reference(
    path: Path, settings: dict[str, Any], dtype: Precision, plan: PlanSpec, steps: int, folder: Path
) -> PlanError | str:
    """Trains the job of file `path` in the plain loop and saves its trajectory in `folder`; one process.

    Of `plan`, only the microbatch counts. Returns the error, without training, if it does not fit the job; else a
    warning about the job's loss, or ''.
    """
    torch.set_num_threads(1)
    try:
        job = with_microbatch(replace(load_job(path, settings), precision=dtype), plan)
    except PlanError as problem:
        return problem
    keep_reference(job, steps, folder)
    try:
        return loss_not_additive(job)
    except Exception:  # for example a loss that needs full microbatches
        return ""


def keep_reference(job: Job, steps: int, folder: Path) -> None:
    """Trains `job` in the plain loop and saves its trajectory in `folder`."""
    trajectory, losses, norms, eval_loss = Trajectory(folder), [], [], None
    records = reference_steps(job, steps)
    with DowncastWatch() as downcasts:
        first = next(records)
    for record in chain([first], records):
        if record.step == 0:
            eval_loss = record.loss
            continue
        trajectory.add_tensors(record.step, record.tensors)
        losses.append(record.loss)
        norms.append(record.grad_norm)
    trajectory.finish(losses=losses, grad_norms=norms, eval_loss=eval_loss, downcast=downcasts.found)


def compare_file(
    path: Path, settings: dict[str, Any], dtype: Precision, plan: PlanSpec, steps: int, folder: Path
) -> RankComparison:
    """Runs the job of file `path` under `plan` on this rank and compares it with the trajectory in `folder`."""
    return compare_job(replace(load_job(path, settings), precision=dtype), plan, steps, folder)


def compare_job(job: Job, plan: str | PlanSpec, steps: int, folder: Path) -> RankComparison:
    """Runs `job` under `plan` on this rank and compares every step with the trajectory `folder`/reference.

    With exact=bitwise the engine's own run on one device is saved as `folder`/single, and the bits of later plans are
    compared with it.
    """
    expected, single = Trajectory(folder / "reference"), Trajectory(folder / "single")
    losses, norms, eval_loss, downcast = expected.scalars()
    with start(replace(job, steps=max(job.steps, steps)), plan=plan) as run:
        run.interrupt.close()  # a stop need not wait for the end of a step
        if run.composed.tensor is None:
            downcast = ""  # sums before the cast are in the same order
        comparison = RankComparison(job.precision, run.world.rank, sharded=run.composed.sharded, downcast=downcast)
        for batch in run.batches():
            report = run.step(batch)
            comparison.add_loss(report.step, report.loss, losses[report.step - 1])
            comparison.add_grad_norm(report.step, report.grad_norm, norms[report.step - 1])
            tensors = {name: run.composed.full_view(name, tensor) for name, tensor in named_tensors(run.model).items()}
            comparison.add_tensors(report.step, tensors, _own_stages(run, expected.tensors(report.step)))
            _compare_bits(run, comparison, tensors, single, report.step)
            if report.step == steps:
                break
        if eval_loss is not None:
            comparison.add_loss(steps, run.evaluate().loss, eval_loss, what="evaluation loss")
    return comparison


def _own_stages(run: Run, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The `tensors` that this rank holds, without those of other pipeline stages only."""
    pipeline = run.composed.pipeline
    return {name: t for name, t in tensors.items() if pipeline is None or name not in pipeline.placeholders}


def _compare_bits(
    run: Run, comparison: RankComparison, tensors: dict[str, torch.Tensor], single: Trajectory, step: int
) -> None:
    if run.plan.exact != "bitwise":
        return
    if run.plan.devices == 1:
        single.add_tensors(step, tensors)
    comparison.add_bits(step, tensors, single.tensors(step))


@dataclass(frozen=True)
class Trajectory:
    """One folder: a safetensors file per step, and the scalars of all steps as JSON once the run is over."""

    folder: Path

    def add_tensors(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Saves the state after `step`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._file(step))

    def finish(
        self, *, losses: list[float], grad_norms: list[float], eval_loss: float | None, downcast: str = ""
    ) -> None:
        """Saves the scalars of all steps; downcast: narrower dtype that the model casts to, or ''."""
        scalars = {"losses": losses, "grad_norms": grad_norms, "eval_loss": eval_loss, "downcast": downcast}
        (self.folder / "scalars.json").write_text(json.dumps(scalars))

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self._file(step))

    def scalars(self) -> tuple[list[float], list[float], float | None, str]:
        """Losses and gradient norms by step, the evaluation loss at the end, and `downcast`."""
        scalars = json.loads((self.folder / "scalars.json").read_text())
        return scalars["losses"], scalars["grad_norms"], scalars["eval_loss"], scalars["downcast"]

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step}.safetensors"


class DowncastWatch(TorchDispatchMode):
    """A context manager; `found` is the dtype that float64 tensors were cast to within, or ''."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        converts = func is TO_COPY.default and args[0].dtype == torch.float64
        if converts and result.dtype.is_floating_point and result.dtype != torch.float64:
            self.found = str(result.dtype).removeprefix("torch.")
        return result
