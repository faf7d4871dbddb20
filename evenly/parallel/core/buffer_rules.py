"""Buffers that a forward changes by a rule, so that ranks together can leave in them what one device would have.

During a step every rank sees the buffers as the step began; what the calls of its own microbatches do is recorded, and
one sum over ranks ends the step (`statistics.RunningStatistics`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Term = tuple[float, torch.Tensor]  # a factor, and a tensor of shape (width,) of any floating type
LOOK = -1  # the number of a microbatch whose forward leaves no trace


class BufferRule(ABC):
    """What the calls of `module`, named `name`, change in its buffers in a step.

    microbatch: which is running; None outside of a recorded forward.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.microbatch: int | None = None

    @property
    @abstractmethod
    def buffers(self) -> list[str]:
        """Names of the buffers that change, within the module."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the buffers are."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many numbers the sum over ranks has."""

    @property
    def record_bytes(self) -> int:
        return self.width * getattr(self.module, self.buffers[0]).itemsize

    @abstractmethod
    def attach(self) -> list[Any]:
        """Begins to record; returns the handles of the hooks."""

    def detach(self) -> None:  # noqa: B027, what `attach` returns is removed by whoever has it
        """Undoes what `attach` does not return."""

    @abstractmethod
    def calls(self, microbatch: int) -> int:
        """How often the forward of `microbatch`, here in this step, called the module."""

    def begin(self, microbatch: int | None) -> None:
        """Begins the forward of `microbatch`, `LOOK` or None for one that leaves no trace."""
        self.microbatch = microbatch

    def end(self) -> None:
        """Ends it, also where it raised."""
        self.microbatch = None

    def share(self, first: Any) -> None:  # noqa: B027, not all rules need it
        """Shares with `first`, of the same module on another device of this process, what both need to know."""

    @abstractmethod
    def drop(self) -> None:
        """Ends a step that is not to count: the buffers are as it began."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Takes over what `other`, of the same module of a copy of the model, recorded in this step."""

    @abstractmethod
    def terms(self, calls: Sequence[int]) -> list[Term]:
        """What this rank adds to the sum, one after the other.

        calls: of every microbatch of the step.
        """

    @classmethod
    @abstractmethod
    def apply(cls, rules: Sequence[Any], sums: Sequence[torch.Tensor], calls: Sequence[Sequence[int]]) -> None:
        """Ends the step for all `rules` of this class: from their sums over ranks, the buffers as on one device.

        sums: in float64, each of shape (width,). calls: of every microbatch of the step, for each rule.
        """
