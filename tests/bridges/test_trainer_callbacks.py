"""Callbacks of a Trainer that have a state: they do what they do there, and go on from a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from kept_ranks import KeptRanks
from trainer_job import make_trainer
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

import evenly
from evenly.bridges.callbacks import CallbackHooks
from evenly.errors import ResumeError, UserError
from evenly.launcher.environment import without_ranks
from evenly.plan import parse_plan
from evenly.train.loop import train
from evenly.train.options import RunOptions
from evenly.train.run import start_with_options

pytestmark = pytest.mark.filterwarnings("ignore:evenly.from_trainer")


def hooks_of(job: evenly.Job) -> Any:
    (hook,) = job.on_step  # type: ignore[misc]
    assert isinstance(hook, CallbackHooks)
    return hook


def ended(job: evenly.Job, folder: Path, plan: str = "single", steps: int | None = None, resume: bool = False) -> int:
    """Trains, and returns how many steps were done."""
    with start_with_options(job, RunOptions(out=folder, steps=steps, resume=resume, plan=parse_plan(plan))) as run:
        train(run)
        return run.steps_done


@pytest.mark.parametrize(
    ("metric", "greater", "patience", "threshold"),
    [("accuracy", True, 2, 0.02), ("eval_accuracy", True, 1, 0.0), ("accuracy", False, 2, 0.0)],
)
def test_early_stopping_stops_where_the_trainer_does(
    metric: str, greater: bool, patience: int, threshold: float, tmp_path: Path
) -> None:
    def make() -> tuple[Any, EarlyStoppingCallback]:
        callback = EarlyStoppingCallback(early_stopping_patience=patience, early_stopping_threshold=threshold)
        more: dict[str, Any] = {"metric_for_best_model": metric, "greater_is_better": greater, "eval_steps": 2}
        return make_trainer(str(tmp_path / "trainer"), callbacks=[callback], **more), callback

    trainer, theirs = make()
    trainer.train()
    other, mine = make()
    job = evenly.from_trainer(other)
    assert trainer.state.global_step < 30  # it did stop
    assert ended(job, tmp_path / "run") == trainer.state.global_step
    assert mine.state() == theirs.state()
    assert hooks_of(job)._state.best_metric == pytest.approx(trainer.state.best_metric)


def test_early_stopping_without_a_metric_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(str(tmp_path), callbacks=[EarlyStoppingCallback()])
    with pytest.raises(UserError, match="EarlyStoppingCallback follows metric_for_best_model, which is not given"):
        evenly.from_trainer(trainer)


class Falling(TrainerCallback, ExportableState):
    """Counts by how much the loss falls, and notes the length of the history."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.fallen, self.last = scale, 0.0, math.nan
        self.lengths: list[int] = []

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **more: Any) -> None:
        if "loss" in logs:
            self.fallen += self.scale * max(0.0, self.last - logs["loss"])
            self.last = logs["loss"]
            self.lengths.append(len(state.log_history))

    def state(self) -> dict[str, Any]:
        attributes = {"fallen": self.fallen, "last": self.last, "lengths": self.lengths}
        return {"args": {"scale": self.scale}, "attributes": attributes}


def falling_job(folder: Path, scale: float = 1.0) -> tuple[evenly.Job, Falling]:
    falling = Falling(scale)
    stopping = EarlyStoppingCallback(early_stopping_patience=3)
    more: dict[str, Any] = {"metric_for_best_model": "accuracy", "max_steps": 9, "eval_steps": 2}
    return evenly.from_trainer(make_trainer(str(folder), callbacks=[falling, stopping], **more)), falling


def went_on(folder: Path, plan: str, steps: int | None, resume: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the callback ends with, and what a checkpoint would have of all."""
    with without_ranks():
        job, falling = falling_job(folder, 1.0 if resume else 2.0)
    ended(job, folder / "run", plan, steps, resume)
    return falling.state(), hooks_of(job).state_dict()


@pytest.mark.full_but("single")  # ranks take long to import the Trainer
@pytest.mark.parametrize("plan", ["single", "zero3"])
def test_callbacks_with_a_state_go_on_under_another_plan(plan: str, ranks: KeptRanks, tmp_path: Path) -> None:
    whole, kept = went_on(tmp_path / "whole", "single", None, False)
    went_on(tmp_path / "parts", "single", 4, False)
    arguments = (tmp_path / "parts", plan, None, True)
    (resumed, kept_there), *_ = found = [went_on(*arguments)] if plan == "single" else ranks.run(went_on, *arguments)
    assert resumed["args"] == {"scale": 2.0}  # as the Trainer has it: of the checkpoint, and not of the script
    assert resumed["attributes"]["lengths"] == whole["attributes"]["lengths"]
    assert resumed["attributes"]["fallen"] == pytest.approx(whole["attributes"]["fallen"], rel=1e-4)
    assert kept_there["state"]["best_metric"] == pytest.approx(kept["state"]["best_metric"])
    assert [row["step"] for row in kept_there["state"]["log_history"]] == [
        row["step"] for row in kept["state"]["log_history"]
    ]
    assert kept_there["callbacks"][1] == kept["callbacks"][1]
    assert all(one == found[0] for one in found)  # on all ranks alike


def test_the_state_of_other_callbacks_is_refused(tmp_path: Path) -> None:
    job, _ = falling_job(tmp_path)
    other = evenly.from_trainer(make_trainer(str(tmp_path), callbacks=[Falling()]))
    with pytest.raises(ResumeError, match="those with a state are Falling; in the checkpoint, Falling, EarlyStopping"):
        hooks_of(other).load_state_dict(hooks_of(job).state_dict())


def test_a_state_is_a_copy(tmp_path: Path) -> None:
    job, falling = falling_job(tmp_path)
    saved = hooks_of(job).state_dict()
    falling.lengths.append(3)
    hooks_of(job)._state.log_history.append({"step": 1})
    assert saved["callbacks"][0][1]["attributes"]["lengths"] == [] and saved["state"]["log_history"] == []
