"""Callbacks of a Trainer as hooks of a job, where they have a meaning there.

What the Trainer keeps for them is kept as it does: the history of its logs, the best metric so far, whether one has
asked to stop. That and the state of callbacks which have one (transformers' `ExportableState`) is saved and resumed.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evenly.errors import ResumeError

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerControl, TrainerState

    from evenly.train.reports import Evaluation, StepReport
    from evenly.train.run import Run

# What a callback may do: it is called after a step, an evaluation and a save, and with what is logged there.
CALLED = ("on_step_end", "on_log", "on_evaluate", "on_save")
# The Trainer's own, in whose place `evenly run` has its screen, its steps and its loggers.
OWN = ("DefaultFlowCallback", "PrinterCallback", "ProgressCallback", "NotebookProgressCallback")
LOGGERS = "transformers.integrations"
CARRIED = ("log_history", "best_metric", "best_global_step")  # of a Trainer's state, what does not follow from the step
CONTROLS = ("should_epoch_stop", "should_save", "should_evaluate", "should_log")


def callback_problems(trainer: Any) -> Iterator[str]:
    for callback in _others(trainer):
        name = type(callback).__name__
        if _steps_optimizer(callback):
            yield f"its callback {name} steps the optimizer itself"
        if asked := [one for one in CONTROLS if one in _names_in(callback)]:
            yield f"its callback {name} sets {', '.join(asked)}: it may ask to stop the training, and for nothing else"
        if _is_early_stopping(callback):
            if trainer.args.metric_for_best_model is None:
                yield f"its callback {name} follows metric_for_best_model, which is not given"
        elif others := [event for event in _events(callback) if event not in CALLED]:
            yield f"its callback {name} is called {', '.join(others)}, for which there is no hook"


def hooks_of_callbacks(trainer: Any, *, steps: int, per_epoch: int) -> dict[str, Sequence[Any]]:
    callbacks = _others(trainer)
    if not callbacks:
        return {}
    hooks = CallbackHooks(trainer, callbacks, steps=steps, per_epoch=per_epoch)
    return {"on_step": [hooks], "on_evaluation": [hooks.on_evaluation], "on_save": [hooks.on_save]}


class CallbackHooks:
    """Calls callbacks with the state that a Trainer would have; heeds `control.should_training_stop`.

    The hook of `on_step`, which carries the state of all.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[TrainerCallback], *, steps: int, per_epoch: int) -> None:
        from transformers import TrainerControl, TrainerState

        self._args, self._callbacks, self._per_epoch = trainer.args, callbacks, per_epoch
        self._state: TrainerState = TrainerState(max_steps=steps, num_train_epochs=math.ceil(steps / per_epoch))
        self._control: TrainerControl = TrainerControl()

    def __call__(self, run: Run, report: StepReport) -> None:
        """After a step, and with its numbers where the Trainer would log them."""
        self._call("on_step_end", run)
        if report.step % max(1, int(self._args.logging_steps)) == 0:
            found = {"loss": report.loss, "grad_norm": report.grad_norm, "learning_rate": report.lr, **report.metrics}
            self._log(run, found)

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """After an evaluation, with its metrics named as the Trainer names them."""
        found: dict[str, float] = {}
        for name, one in evaluation.by_name.items():
            prefix = f"eval_{name}_" if name else "eval_"
            found |= {f"{prefix}{key}": value for key, value in {"loss": one.loss, **one.metrics}.items()}
        self._log(run, found)
        self._call("on_evaluate", run, metrics=found)
        self._note_best(found)

    def on_save(self, run: Run, step: int) -> None:
        """After a save."""
        self._call("on_save", run)

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self._state, name) for name in CARRIED}
        callbacks = [[type(one).__name__, one.state()] for one in self._stateful()]
        return copy.deepcopy({"state": state, "control": self._control.state(), "callbacks": callbacks})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned, with the callbacks' objects that there are.

        Raises `ResumeError` where it is that of other callbacks.
        """
        stateful = self._stateful()
        names, known = [type(one).__name__ for one in stateful], [name for name, _ in saved["callbacks"]]
        if names != known:
            raise ResumeError(
                "resuming the callbacks of the Trainer",
                f"those with a state are {', '.join(names) or 'none'}; in the checkpoint, {', '.join(known) or 'none'}",
                "resume with the callbacks of the run that saved it",
            )
        for callback, (_, state) in zip(stateful, saved["callbacks"], strict=True):
            vars(callback).update(vars(type(callback).from_state(copy.deepcopy(state))))
        for name, value in copy.deepcopy(saved["state"]).items():
            setattr(self._state, name, value)
        self._control = type(self._control).from_state(saved["control"])

    def _stateful(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        return [one for one in self._callbacks if isinstance(one, ExportableState)]

    def _note_best(self, found: Mapping[str, float]) -> None:
        """Keeps the best metric as `Trainer._determine_best_metric` does, after the callbacks have seen it."""
        name = self._args.metric_for_best_model
        if name is None:
            return
        metric, best = found[name if name.startswith("eval_") else f"eval_{name}"], self._state.best_metric
        if best is None:
            best = self._state.best_metric = -math.inf if self._args.greater_is_better else math.inf
        if metric > best if self._args.greater_is_better else metric < best:
            self._state.best_metric, self._state.best_global_step = metric, self._state.global_step

    def _log(self, run: Run, found: dict[str, float]) -> None:
        self._follow(run)
        self._state.log_history.append({**found, "epoch": self._state.epoch, "step": run.steps_done})
        self._call("on_log", run, logs=found)

    def _follow(self, run: Run) -> None:
        self._state.global_step = run.steps_done
        self._state.epoch = run.steps_done / self._per_epoch
        self._state.is_world_process_zero = self._state.is_local_process_zero = run.is_main

    def _call(self, event: str, run: Run, **more: Any) -> None:
        self._follow(run)
        for callback in self._callbacks:
            control = getattr(callback, event)(self._args, self._state, self._control, **more)
            self._control = control or self._control
        if self._control.should_training_stop:
            run.stop()


def _others(trainer: Any) -> list[Any]:
    """Callbacks but the Trainer's own and those of loggers."""
    return [
        callback
        for callback in trainer.callback_handler.callbacks
        if type(callback).__name__ not in OWN and not type(callback).__module__.startswith(LOGGERS)
    ]


def _is_early_stopping(callback: TrainerCallback) -> bool:
    return type(callback).__name__ == "EarlyStoppingCallback"


def _events(callback: TrainerCallback) -> list[str]:
    from transformers import TrainerCallback

    names = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    return [name for name in names if getattr(type(callback), name) is not getattr(TrainerCallback, name)]


def _steps_optimizer(callback: TrainerCallback) -> bool:
    return {"optimizer", "step"} <= _names_in(callback)


def _names_in(callback: TrainerCallback) -> set[str]:
    codes = [function.__code__ for _, function in inspect.getmembers(type(callback), inspect.isfunction)]
    return {name for code in codes for name in (*code.co_names, *code.co_varnames, *map(str, code.co_consts))}


def follows_loss(args: Any) -> bool:
    return args.metric_for_best_model in (None, "loss", "eval_loss") and not args.greater_is_better
