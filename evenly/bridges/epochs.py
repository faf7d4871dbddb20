"""Schedules that count epochs, in a run that counts steps."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class EveryEpoch(LRScheduler):
    """Steps the schedule `inner` at the end of every epoch of `per_epoch` steps."""

    def __init__(self, inner: LRScheduler, per_epoch: int) -> None:
        # Not that of the base class, which would set learning rates of its own.
        self.optimizer, self._inner, self._per_epoch, self._steps = inner.optimizer, inner, per_epoch, 0

    def step(self, epoch: int | None = None) -> None:
        """Counts a step."""
        self._steps += 1
        if self._steps % self._per_epoch == 0:
            self._inner.step()

    def get_last_lr(self) -> list[Any]:
        return self._inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Steps so far, and the state of the inner schedule."""
        return {"steps": self._steps, "inner": self._inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._steps = state_dict["steps"]
        self._inner.load_state_dict(state_dict["inner"])
