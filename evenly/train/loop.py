"""The loop of `evenly run`: every batch in order, evaluations and checkpoints when they are due.

A launcher imports this module to name what its ranks call; what trains takes a second to import and is left to them.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenly.job import Job
from evenly.jobfile import Loop, load_job, loop_of, with_defaults
from evenly.launcher.environment import is_in_notebook, without_ranks
from evenly.observe.progress import Watcher, describe_evaluation, make_watcher
from evenly.observe.run_folder import RunFolder
from evenly.train.interrupt import Interrupt
from evenly.train.options import RunOptions
from evenly.train.reports import Evaluation, StepReport

if TYPE_CHECKING:
    from evenly.launcher.environment import ProcessInfo
    from evenly.train.run import Run


@dataclass(frozen=True)
class Summary:
    """The results of a run.

    steps:       done in all, including those before a resume; losses and `seconds` are of this run alone.
    steps_asked: length of the whole run.
    first_step:  the first step of this run; None if there was nothing left to do.
    eval_averaged: whether `eval_loss` is of the averaged weights.
    stopped:     whether a stop was requested before the last step.
    ended_early: whether the job has ended the run before its last step (`run.stop`).
    metrics, eval_metrics: of the last step, and of the last evaluation, of its first set.
    """

    job: str
    plan: str
    world: int
    steps: int
    steps_asked: int
    first_step: int | None
    first_loss: float | None
    loss: float | None
    eval_loss: float | None
    seconds: float
    stopped: bool
    out: str | None
    eval_averaged: bool = False
    ended_early: bool = False
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    eval_metrics: dict[str, float] = field(default_factory=dict[str, float])


def run_job_file(
    path: Path, settings: dict[str, Any], options: RunOptions, json_only: bool, place: ProcessInfo | None = None
) -> Summary:
    """Trains the job of file `path` on this rank; every rank of the world calls it."""
    from evenly.train.run import left_early

    if json_only:
        send_stdout_to_stderr()
    recorded = RunFolder(options.out).plan if options.resume and options.out is not None else None
    if recorded is not None and recorded.exists() and not sys.argv[1:]:
        sys.argv[1:] = shlex.split(json.loads(recorded.read_text()).get("settings", {}).get("--", ""))
    try:
        job = load_job_on_rank(path, settings)
        arguments = {"--": shlex.join(sys.argv[1:])} if sys.argv[1:] else {}
        options = replace(options, settings={**with_defaults(path, settings), **arguments})
        return run_job(job, options, place, loop_of(path))
    except SystemExit as ended:
        raise left_early(ended) from ended


def load_job_on_rank(path: Path, settings: dict[str, Any]) -> Job:
    """The job of file `path`, in which no library finds a rank or a world of its own."""
    with without_ranks():
        return load_job(path, settings)


def run_job(job: Job, options: RunOptions, place: ProcessInfo | None = None, loop: Loop | None = None) -> Summary:
    """Trains `job` on this rank, in its own `loop` if any; every rank of the world calls it."""
    from evenly.train.run import start_with_options

    with start_with_options(job, options, place=place) as run:
        return train(run, quiet=options.quiet, loop=loop)


def run_script(path: Path, json_only: bool) -> int:
    """Runs a script that owns its loop, as `python PATH ARGUMENTS...` would; returns `Interrupt.was_asked`."""
    if json_only:
        send_stdout_to_stderr()
    sys.argv[0] = str(path)
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")
    return Interrupt.was_asked


def run_loop(loop: Loop, run: Any) -> None:
    """Has the job's own `loop` train `run`; what it draws follows from the job's seed, the same on all ranks."""
    from evenly.data.generators import seeded
    from evenly.data.stream import stream_key

    with seeded(stream_key(run.job.seed, "loop"), run.world.device):
        loop(run)


def train(run: Run, *, quiet: bool = False, loop: Loop | None = None) -> Summary:
    """Trains `run` to its end, or until a stop is requested, by `loop` if any; quiet: shows nothing on the way."""
    progress, run.evaluates_later = _Progress(run, quiet=quiet), loop is None
    try:
        if loop is not None:  # evaluates and saves when it wants to
            run.hooks.append("on_step", lambda _, report: progress.add(report))
            run_loop(loop, run)
            return progress.summary()
        if run.evaluation_due:
            progress.run_due_actions()
        for batch in run.batches():
            progress.add(run.step(batch))
            progress.run_due_actions()
        progress.end()
    finally:
        progress.watcher.close()
    return progress.summary()


def unit_of(weight: float, samples: int) -> str:
    """What a batch of `weight` is counted in: a whole number above that of its samples counts tokens."""
    return "tokens" if weight > samples and float(weight).is_integer() else "samples"


class _Progress:
    """The state of the loop between steps."""

    def __init__(self, run: Run, *, quiet: bool) -> None:
        self.run, self.shows = run, run.world.is_main and not quiet
        self.unit = "samples"
        self.watcher: Watcher = make_watcher(main=False, steps=0, done=0, unit="")
        self.first: StepReport | None = None
        self.last: StepReport | None = None
        self.evaluation: Evaluation | None = None
        self.evaluated_at = -1
        self.seconds = 0.0

    def add(self, report: StepReport) -> None:
        if self.first is None:
            self.first = report
            self._begin_watching(report)
        self.last = report
        self.seconds += report.step_s
        self.watcher.on_step(report)
        for text in self.run.slow_ranks:
            self.watcher.on_text(text)

    def run_due_actions(self) -> None:
        job, step = self.run.job, self.run.steps_done
        if job.eval_every and step % job.eval_every == 0:
            self._evaluate()
        if job.save_every and step % job.save_every == 0:
            self._save()

    def end(self) -> None:
        if self.run.stopped:
            self.watcher.on_text(f"stopped after step {self.run.steps_done} as asked")
            self._save()
            return
        if self.run.ended_early and self.last is not None:
            self.watcher.on_text(f"stopped early after step {self.run.steps_done}, by the job")
        if self.run.job.eval_data is not None and (self.last is not None or self.run.evaluation_due):
            self._evaluate()
        self._save()

    def summary(self) -> Summary:
        run = self.run
        return Summary(
            job=run.job.name,
            plan=str(run.plan),
            world=run.world.size,
            steps=run.steps_done,
            steps_asked=run.steps,
            first_step=self.first and self.first.step,
            first_loss=self.first and self.first.loss,
            loss=self.last and self.last.loss,
            eval_loss=self.evaluation and self.evaluation.loss,
            seconds=self.seconds,
            stopped=run.stopped,
            out=run.out and str(run.out),
            eval_averaged=self.evaluation is not None and self.evaluation.averaged,
            ended_early=run.ended_early and run.steps_done < run.steps,
            metrics=self.last.metrics if self.last else {},
            eval_metrics=self.evaluation.metrics if self.evaluation else {},
        )

    def _begin_watching(self, report: StepReport) -> None:
        self.unit = unit_of(report.weight, report.samples)
        run = self.run
        self.watcher = make_watcher(
            main=self.shows, steps=run.steps, done=run.steps_done, unit=self.unit, notebook=is_in_notebook()
        )

    def _evaluate(self) -> None:
        if self.evaluated_at != self.run.steps_done:
            self.evaluated_at = self.run.steps_done
            self.evaluation = self.run.evaluate()
            for text in describe_evaluation(self.evaluation):
                self.watcher.on_text(f"step {self.evaluated_at}: {text}")

    def _save(self) -> None:
        if self.run.out is not None:
            current = self.evaluated_at == self.run.steps_done and self.evaluation is not None
            self.run.save(score=self.evaluation.loss if current and self.evaluation else None)


def send_stdout_to_stderr() -> None:
    """Keeps this rank's prints off the launcher's stdout, which carries one JSON document."""
    sys.stdout.flush()
    os.dup2(2, 1)
