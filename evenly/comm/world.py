"""The `World` of one rank: who it is, what it runs on, and the groups it talks to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from evenly.errors import UserError
from evenly.observe.recorder import Recorder, State

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's place among all ranks; passed to whatever needs it, never looked up.

    rank, size:             of this process among all, counted from 0 over the nodes in order.
    local_rank, local_size: the same within its node.
    node, nodes:            the node's number and how many there are.
    device:                 'cpu' or 'cuda:1'.
    backend:                what its groups talk through.
    groups:                 name of an axis -> its `comm.groups.Group`.
    recorder:               of this rank, where a launcher watches it.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    node: int
    nodes: int
    device: str
    backend: Backend
    groups: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        # A view of a copy: neither this field nor the caller's mapping can change the world afterwards.
        object.__setattr__(self, "groups", MappingProxyType(dict(self.groups)))

    @classmethod
    def alone(cls, device: str = "cpu") -> World:
        """The world of one process."""
        backend: Backend = "nccl" if device.startswith("cuda") else "gloo"
        return cls(rank=0, local_rank=0, size=1, local_size=1, node=0, nodes=1, device=device, backend=backend)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def during(self, state: State) -> AbstractContextManager[None]:
        """Within, this rank is in `state`, for whoever watches it."""
        return nullcontext() if self.recorder is None else self.recorder.during(state)

    @property
    def waited_s(self) -> float:
        """For how long this rank has waited for others so far, in seconds, where a launcher watches it."""
        return 0.0 if self.recorder is None else self.recorder.waited_s

    def tick(self) -> None:
        """Notes that this rank gets on."""
        if self.recorder is not None:
            self.recorder.tick()

    def group(self, axis: str) -> Any:
        """The group of `axis`. Raises `UserError` for an unknown axis."""
        if axis not in self.groups:
            known = ", ".join(self.groups) or "none"
            raise UserError(
                f"the group of axis {axis!r} was asked for",
                f"this world has the axes: {known}",
                "name one of these, or give the axis a size in the plan",
            )
        return self.groups[axis]
