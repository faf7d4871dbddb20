"""A run's losses, gradient norms and tensors after every step, in a folder, for others to be held against."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Trajectory:
    """One folder: a safetensors file per step, and the scalars of all steps as JSON once the run is over."""

    folder: Path

    def add_tensors(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the state after `step`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self._file(step))

    def finish(
        self, *, losses: list[float], grad_norms: list[float], eval_loss: float | None, downcast: str = ""
    ) -> None:
        """Keeps the scalars, by step; downcast: the type, narrower than asked for, that the model computes in."""
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
