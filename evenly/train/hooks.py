"""The job's hooks: its own code after a step, an evaluation or a save, on all ranks in the same order.

What a hook draws follows from the job's seed, the event and the step: all ranks draw the same, a run that goes on does
too, and nothing that the training draws depends on it.

Order: a hook is called when the engine is done with its event, and finds whole parameters. A stop that any rank has
asked for is agreed on after the hooks of an event, before anything else is done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from evenly.comm.collectives import all_reduce
from evenly.data.alone import alone
from evenly.data.generators import seeded, undisturbed_past_torch
from evenly.data.stream import stream_key
from evenly.errors import EvenlyError, ResumeError, RunError, UserError, describe
from evenly.job import HOOKS, Hook, Job, hooks_of

if TYPE_CHECKING:
    from evenly.train.run import Run


class Hooks:
    """The hooks of `job`, by event. running: the events whose hooks are being called, outermost first."""

    def __init__(self, job: Job) -> None:
        self._hooks = {event: hooks_of(job, event) for event in HOOKS}
        self.running: list[str] = []

    def append(self, event: str, hook: Hook) -> None:
        """Has `hook` called after those of the job, on every rank."""
        self._hooks[event].append(hook)

    def call(self, run: Run, event: str, found: object) -> None:
        """Calls the hooks of `event` with `run` and `found`; a collective where there are any.

        What they do themselves calls no hooks of the same event.
        """
        if not self._hooks[event] or event in self.running:
            return
        self.running.append(event)
        try:
            key = stream_key(run.job.seed, event, run.steps_done)
            with undisturbed_past_torch(), seeded(key, run.world.device), alone():
                for hook in self._hooks[event]:
                    _call(hook, event, run, found)
        finally:
            self.running.pop()
        _agree_on_end(run)
        run.clock = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """The state of each hook that has one, by its place in the job."""
        return {place: hook.state_dict() for place, hook in self._with_state().items()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """The inverse of `state`. Raises `ResumeError` where a hook is missing; others begin afresh."""
        hooks = self._with_state()
        if missing := [place for place in saved if place not in hooks]:
            raise ResumeError(
                "resuming the hooks of the job",
                f"{', '.join(missing)} has a state in the checkpoint, and is not in the job",
                "resume with the hooks of the run that saved it",
            )
        for place, state in saved.items():
            hooks[place].load_state_dict(state)

    def _with_state(self) -> dict[str, Any]:
        return {
            f"{event} {number}: {type(hook).__name__}": hook
            for event, hooks in self._hooks.items()
            for number, hook in enumerate(hooks)
            if hasattr(hook, "state_dict") and hasattr(hook, "load_state_dict")
        }


def _call(hook: Hook, event: str, run: Run, found: object) -> None:
    try:
        hook(run, found)
    except EvenlyError:
        raise
    except Exception as problem:
        name = getattr(hook, "__name__", type(hook).__name__)
        raise RunError(
            f"calling {name} of the job's {event} after step {run.steps_done}",
            describe(problem),
            "correct it, or take it out of the job: the run goes on from its newest checkpoint",
        ) from problem


def _agree_on_end(run: Run) -> None:
    group = run.world.group("world")
    asked = torch.tensor([float(run.asked_to_end)], device=group.device)
    run.ended_early = bool(all_reduce(asked, group, label="whether a hook ends the run") > 0)


class EarlyStopping:
    """A hook for `on_evaluation`: ends the run where the evaluation loss no longer falls.

    patience:  how many evaluations in a row may be no better than the best before them.
    min_delta: by how much the loss has to be below the best to be better.

    An object is for one run. `best` is the lowest loss so far, `bad` the number of evaluations since.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise UserError("EarlyStopping", f"patience is {patience}", "give it at least 1")
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.bad = 0

    def __call__(self, run: Run, evaluation: Any) -> None:
        """Notes `evaluation`, and ends `run` if it is the last that may be no better."""
        if self.best is None or evaluation.loss < self.best - self.min_delta:
            self.best, self.bad = evaluation.loss, 0
        else:
            self.bad += 1
        if self.bad >= self.patience:
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.best, self.bad = state["best"], state["bad"]
