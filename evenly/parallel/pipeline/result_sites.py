"""Names for what functions return between blocks, or in one that is run through: the same on every stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from evenly.data.nest import tensors_in
from evenly.parallel.pipeline.stages import BEGIN, CallId, TensorSite
from evenly.torch_private import has_memory, memory_key


class ResultSites:
    """The results of functions, counted by the name of the function since the code came to its place.

    place: the last call, and whether the code is inside of it or after it; None inside, where nothing there counts.
    """

    def __init__(self, *, inside: bool) -> None:
        self.place: tuple[CallId, str] | None = ((BEGIN, 0), "between")
        self._counts_inside = inside
        self._begun = 0  # calls of the model's forward so far
        self._counts: dict[str, int] = {}
        self._inside: list[tuple[str, int, torch.Tensor]] = []

    def begin(self) -> None:
        """The model's forward begins; what its hooks returned does not count."""
        self._begun += 1
        self.move((BEGIN, self._begun), "between")

    def move(self, call: CallId, side: str) -> None:
        """The code is now inside of a call, or after it."""
        self.place = (call, side) if side == "between" or self._counts_inside else None
        self._counts.clear()

    def add(self, function: str, results: Any) -> list[tuple[TensorSite, torch.Tensor]]:
        """The results of a function with their sites; those inside of a call come from `leave`."""
        found: list[tuple[TensorSite, torch.Tensor]] = []
        for tensor in results if isinstance(results, list | tuple) else [results]:
            if self.place is None or not isinstance(tensor, torch.Tensor):
                continue
            call, side = self.place
            number = self._counts[function] = self._counts.get(function, 0) + 1
            if side == "inside":
                self._inside.append((function, number, tensor))
            else:
                found.append((TensorSite(call, side, f"{function} {number}"), tensor))
        return found

    def leave(self, call: CallId) -> Iterable[tuple[TensorSite, torch.Tensor]]:
        """The results inside of `call`, which has ended, with their sites.

        By how many there are in all, too: a stage that counts otherwise than another finds none, not a wrong one.
        """
        found = [
            (TensorSite(call, "inside", f"{function} {number} of {self._counts[function]}"), tensor)
            for function, number, tensor in self._inside
        ]
        self._inside.clear()
        return found

    def clear(self) -> None:
        """Drops all tensors."""
        self._inside.clear()


class NotesResults(Protocol):
    """A run of the model's code to which functions report what they return."""

    def note_results(self, function: str, results: Any, *, new: bool) -> Any:
        """What the code gets in place of `results`; new: whether they are in memory that no argument is in."""


class ResultRecorder(TorchFunctionMode):
    """Within, reports the results of all torch functions to `run`."""

    def __init__(self, run: NotesResults) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        new = type(results) is torch.Tensor and has_memory(results)
        if new:
            memory = memory_key(results)
            new = all(not has_memory(one) or memory_key(one) != memory for one in tensors_in((args, kwargs or {})))
        return self._run.note_results(getattr(func, "__name__", ""), results, new=new)
