"""Every optimizer class of a few libraries, and how each is built over the parameters of a model."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "zoo"))
import torchvision_names

LIBRARIES = {
    "torch": "torch.optim",
    "timm": "timm.optim",
    "transformers": "transformers.optimization",
    "prodigyopt": "prodigyopt",
    "schedulefree": "schedulefree",
    "pytorch_optimizer": "pytorch_optimizer",
}
# They share nothing with others: a switch of their own says which parameters their rule for matrices takes.
MATRICES = ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
WRAPPERS = ("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC")
SHARPNESS = ("SAM", "LookSAM", "FriendlySAM", "GSAM", "WSAM")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Ranger21": {"num_iterations": 12},
    "BSAM": {"num_data": 24},
    "LBFGS": {"lr": 0.1},
}


def classes(library: str) -> dict[str, type[torch.optim.Optimizer]]:
    """Return the optimizer classes that `library` exports, by name."""
    torchvision_names.declare()
    found = vars(importlib.import_module(LIBRARIES[library])).items()
    return {
        name: kind
        for name, kind in found
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }


def subjects(libraries: Iterator[str] | list[str]) -> list[str]:
    """Return `library:Class` of all classes of `libraries`."""
    return [f"{library}:{name}" for library in libraries for name in sorted(classes(library))]


def maker(subject: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return what builds the optimizer of `subject` from parameters."""
    library, _, name = subject.partition(":")
    return partial(_make, library, name, classes(library)[name])


def _make(library: str, name: str, kind: Any, params: Any) -> torch.optim.Optimizer:
    every = list(params)
    if library == "torch" and name == "Muon":
        return kind([p for p in every if p.ndim == 2])
    if library == "pytorch_optimizer" and name in MATRICES:
        return kind([{"params": [p for p in every if (p.ndim == 2) is use], "use_muon": use} for use in (True, False)])
    if name in WRAPPERS and library in ("pytorch_optimizer", "schedulefree", "timm"):
        return kind(torch.optim.AdamW(every, lr=1e-2))
    if name in SHARPNESS:
        return kind(every, base_optimizer=torch.optim.SGD, lr=1e-2)
    arguments = ARGUMENTS.get(name, {})
    rate = inspect.signature(kind).parameters.get("lr")
    if rate is not None and not isinstance(rate.default, float | torch.Tensor | None):
        arguments = {"lr": 1e-2, **arguments}
    return kind(every, **arguments)
