"""What a run computed, step by step, as files: one process writes them, those of every plan read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from evenly.verify.compare import Rounding, Spreads, difference, figure_difference, spread_of
from evenly.verify.disturb import Disturbance


@dataclass(frozen=True)
class Scalars:
    """The numbers of a run; of lists, one entry a step.

    losses, grad_norms: of the whole batch. rates: after the step, the learning rate of each parameter group.
    eval_losses:        by step, after which the job was evaluated.
    groups:             by step, the parameter groups as of `ReferenceStep`.
    figures:            metrics of the step and of the evaluation after it, as `named_figures` has them.
    cast_eps:           as of `Disturber`.
    """

    losses: list[float] = field(default_factory=list[float])
    grad_norms: list[float] = field(default_factory=list[float])
    rates: list[list[float]] = field(default_factory=list[list[float]])
    eval_losses: dict[int, float] = field(default_factory=dict[int, float])
    figures: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    cast_eps: float = 0.0
    groups: list[list[list[list[str]]]] = field(default_factory=list[list[list[list[str]]]])

    def add(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        rates: list[float],
        eval_loss: float | None,
        groups: Sequence[list[list[str]]] = (),
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Adds the numbers of `step`, the next one."""
        self.groups.append([*groups])
        self.figures.append(dict(figures or {}))
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)
        self.rates.append(rates)
        if eval_loss is not None:
            self.eval_losses[step] = eval_loss


@dataclass(frozen=True)
class Trajectory:
    """One folder: per step a safetensors file of the model and one of the optimizer's state; the scalars as JSON."""

    folder: Path

    def add_tensors(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Saves parameters and buffers, and the optimizer's state, after `step`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind, named in (("model", tensors), ("state", state or {})):
            save_file({name: tensor.contiguous() for name, tensor in named.items()}, self._file(step, kind))

    def finish(self, scalars: Scalars) -> None:
        """Saves the numbers of all steps."""
        (self.folder / "scalars.json").write_text(json.dumps(asdict(scalars)))

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Parameters and buffers after `step`, by name."""
        return load_file(self._file(step, "model"))

    def state(self, step: int) -> dict[str, torch.Tensor]:
        """The optimizer's state after `step`, by parameter and key."""
        return load_file(self._file(step, "state"))

    def scalars(self) -> Scalars:
        saved: dict[str, Any] = json.loads((self.folder / "scalars.json").read_text())
        saved["eval_losses"] = {int(step): loss for step, loss in saved["eval_losses"].items()}
        return Scalars(**saved)

    def _file(self, step: int, kind: str) -> Path:
        return self.folder / f"step-{step}.{kind}.safetensors"


def named_figures(metrics: Mapping[str, float], evaluation: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step, and of the sets that were evaluated after it, under one name each."""
    found = {f"metric {name}": value for name, value in metrics.items()}
    for of_set, values in evaluation.items():
        where = f"evaluation of {of_set}" if of_set else "evaluation"
        found |= {f"{name} of the {where}": value for name, value in values.items()}
    return found


def trajectory_folder(folder: Path, kind: Disturbance, draw: int = 1) -> Path:
    return folder / ("reference" if kind == "none" else f"disturbed-{kind}-{draw}")


def measure_rounding(folder: Path, kind: Disturbance, draw: int = 1) -> None:
    """Writes how far the run with a `draw` of `kind` of rounding added strayed from the reference, or another draw did.

    All are in `folder`. Does nothing if that run came to no end.
    """
    reference, disturbed = Trajectory(trajectory_folder(folder, "none")), trajectory_folder(folder, kind, draw)
    if not (disturbed / "scalars.json").exists():
        return
    path = folder / f"rounding-{kind}.json"
    found = rounding_of(reference, Trajectory(disturbed), kind)
    path.write_text(json.dumps(asdict(found.joined(read_rounding(path)))))


def rounding_of(reference: Trajectory, disturbed: Trajectory, kind: Disturbance) -> Rounding:
    one, other = reference.scalars(), disturbed.scalars()
    scalars: list[float] = [0.0]
    figures: list[float] = [0.0]
    tensors: list[Spreads] = [{}]
    states: list[Spreads] = [{}]
    for step in range(1, len(one.losses) + 1):
        pairs = [
            (run.losses[step - 1], run.grad_norms[step - 1], run.eval_losses.get(step, 0.0)) for run in (other, one)
        ]
        scalars.append(max(scalars[-1], *(difference(a, b) for a, b in zip(*pairs, strict=True))))
        other_figures = other.figures[step - 1]
        apart = (figure_difference(other_figures.get(name), value) for name, value in one.figures[step - 1].items())
        figures.append(max(figures[-1], *apart, 0.0))
        tensors.append(spread_of(disturbed.tensors(step), reference.tensors(step)))
        states.append(spread_of(disturbed.state(step), reference.state(step)))
    return Rounding(scalars, tensors, states, kind, other.cast_eps, figures)


def read_rounding(path: Path) -> Rounding:
    """What `write_rounding` wrote; nothing where no disturbed run was made."""
    return Rounding(**json.loads(path.read_text())) if path.exists() else Rounding()
