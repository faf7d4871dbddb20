"""Train any PyTorch model on any number of devices, evenly shared, with the numbers of one device.

Names are loaded when first used, so that `import evenly` is instant and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenly import data as data
    from evenly import nn as nn
    from evenly.bridges.lightning import from_lightning as from_lightning
    from evenly.bridges.trainer import from_trainer as from_trainer
    from evenly.comm.world import World as World
    from evenly.errors import EvenlyError as EvenlyError
    from evenly.errors import RunError as RunError
    from evenly.errors import UserError as UserError
    from evenly.job import EMA as EMA
    from evenly.job import SWA as SWA
    from evenly.job import Job as Job
    from evenly.job import Phase as Phase
    from evenly.loss import Loss as Loss
    from evenly.loss import Sum as Sum
    from evenly.observe.loggers.csv import CSVLogger as CSVLogger
    from evenly.observe.loggers.mlflow import MLFlowLogger as MLFlowLogger
    from evenly.observe.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
    from evenly.observe.loggers.wandb import WandbLogger as WandbLogger
    from evenly.plan import Plan as Plan
    from evenly.plan import PlanSpec as PlanSpec
    from evenly.train.hooks import EarlyStopping as EarlyStopping
    from evenly.train.launch_job import launch as launch
    from evenly.train.run import Run as Run
    from evenly.train.run import start as start

_HOMES = {
    "CSVLogger": "evenly.observe.loggers.csv",
    "EMA": "evenly.job",
    "EarlyStopping": "evenly.train.hooks",
    "EvenlyError": "evenly.errors",
    "Job": "evenly.job",
    "Loss": "evenly.loss",
    "Phase": "evenly.job",
    "MLFlowLogger": "evenly.observe.loggers.mlflow",
    "Plan": "evenly.plan",
    "PlanSpec": "evenly.plan",
    "Run": "evenly.train.run",
    "RunError": "evenly.errors",
    "SWA": "evenly.job",
    "Sum": "evenly.loss",
    "TensorBoardLogger": "evenly.observe.loggers.tensorboard",
    "UserError": "evenly.errors",
    "WandbLogger": "evenly.observe.loggers.wandb",
    "World": "evenly.comm.world",
    "from_lightning": "evenly.bridges.lightning",
    "from_trainer": "evenly.bridges.trainer",
    "launch": "evenly.train.launch_job",
    "start": "evenly.train.run",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in ("data", "nn"):  # packages of their own: evenly.data.packed
        return import_module(f"evenly.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'evenly' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
