"""Figures that need all predictions: what a job's `evaluate` makes of the outputs of a whole evaluation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from evenly.errors import EvenlyError, RunError, describe, place_of


def figures(function: Any, outputs: Any) -> dict[str, float]:
    """The figures of `outputs` by name; raises `RunError` where `function` raises, or returns something else."""
    try:
        found = _of_metric(function, outputs) if hasattr(function, "compute") else function(outputs)
    except EvenlyError:
        raise
    except Exception as problem:
        raise RunError(
            "the job's evaluate on the outputs of an evaluation",
            f"{describe(problem)}{place_of(problem)}",
            "try it on outputs of a few samples, as `Loss.outputs` has them",
        ) from problem
    if not isinstance(found, Mapping):
        raise _no_figures(f"it returned a {type(found).__name__}")
    return {str(name): _as_figure(str(name), value) for name, value in found.items()}


def _as_figure(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise _no_figures(f"{name} is {value!r:.80}") from None


def _no_figures(found: str) -> RunError:
    return RunError("the job's evaluate must return numbers by name", found, 'return a mapping such as {"f1": 0.9}')


def _of_metric(metric: Any, outputs: Any) -> Any:
    """What a copy of a torchmetrics Metric or MetricCollection finds in all outputs, without the other ranks."""
    own = copy.deepcopy(metric)
    for one in own.modules():
        if hasattr(one, "distributed_available_fn"):
            one.distributed_available_fn = _not_distributed
    own.reset()
    if isinstance(outputs, Mapping):
        own.update(**outputs)
    else:
        own.update(*(outputs if isinstance(outputs, tuple) else (outputs,)))
    found = own.compute()
    return found if isinstance(found, Mapping) else {type(metric).__name__: found}


def _not_distributed() -> bool:
    return False
