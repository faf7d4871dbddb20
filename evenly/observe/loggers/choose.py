"""Loggers by name, as on the command line: tensorboard, wandb=PROJECT, mlflow=EXPERIMENT, csv."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenly.errors import UserError
from evenly.observe.loggers.csv import CSVLogger
from evenly.observe.loggers.logger import Logger
from evenly.observe.loggers.mlflow import MLFlowLogger
from evenly.observe.loggers.tensorboard import TensorBoardLogger
from evenly.observe.loggers.wandb import WandbLogger

ALONE: dict[str, Callable[[], Logger]] = {"tensorboard": TensorBoardLogger, "csv": CSVLogger}
NAMED: dict[str, tuple[str, Callable[[str], Logger]]] = {
    "wandb": ("PROJECT", WandbLogger),
    "mlflow": ("EXPERIMENT", MLFlowLogger),
}
FORMS = [*ALONE, *(f"{name}={what}" for name, (what, _) in NAMED.items())]


def make_loggers(texts: Sequence[str]) -> list[Logger]:
    """The loggers that are named so.

    Raises `UserError` for a name that is unknown, comes twice, or lacks its project, and where a package is missing.
    """
    loggers = [_make(text) for text in texts]
    names = [logger.name for logger in loggers]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(f"--log {twice[0]}", "it is given twice", "give it once")
    return loggers


def _make(text: str) -> Logger:
    name, _, value = text.partition("=")
    if name in ALONE and not value:
        return ALONE[name]()
    if name in NAMED and value:
        return NAMED[name][1](value)
    if name in NAMED:
        raise UserError(f"--log {text}", f"it names no {NAMED[name][0].lower()}", f"--log {name}={NAMED[name][0]}")
    if name in ALONE:
        raise UserError(f"--log {text}", f"{name} takes no name", f"--log {name}")
    raise UserError(f"--log {text}", "there is no such logger", f"one of {', '.join(FORMS)}")
