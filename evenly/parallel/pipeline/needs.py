"""What only a run of a stage shows that it needs; the run is then begun again with it.

- *written*: a tensor that the code makes on every stage, and writes tensors of other stages into. It is remote from the
  start, and received as it has become.
- *early*: a tensor of another stage of which the code asks numbers before the stage's first block. It is received, as
  all else, before the stage runs, and filled as soon as the code has come to where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from evenly.parallel.pipeline.stages import TensorSite
from evenly.torch_private import has_memory, memory_key


class NeedFound(Exception):
    """Ends a run that lacked something; `problem` is raised where nothing helps."""

    def __init__(
        self,
        *,
        written: frozenset[TensorSite] = frozenset(),
        early: frozenset[TensorSite] = frozenset(),
        problem: Exception,
    ) -> None:
        super().__init__("the run of a stage begins again")
        self.written, self.early, self.problem = written, early, problem


@dataclass
class Needs:
    """All that were found for a model.

    all_false: what early conditions are taken for while stages are found; by default they are true.
    """

    written: set[TensorSite] = field(default_factory=set[TensorSite])
    early: set[TensorSite] = field(default_factory=set[TensorSite])
    all_false: bool = False

    def add(self, found: NeedFound) -> bool:
        """Adds what was found; whether any of it is new."""
        new = bool(found.written - self.written or found.early - self.early)
        self.written |= found.written
        self.early |= found.early
        return new


class Made:
    """The tensors that a run has made, by their memory, which views share; kept alive so that it stays theirs."""

    def __init__(self) -> None:
        self._by_memory: dict[int, tuple[torch.Tensor, TensorSite]] = {}

    def note(self, site: TensorSite, tensor: torch.Tensor) -> None:
        """Adds a new tensor."""
        self._by_memory.setdefault(memory_key(tensor), (tensor, site))

    def need(self, target: torch.Tensor, problem: Exception) -> Exception:
        """What writing into `target` shows: a need, or `problem` where the run has not made it."""
        found = self._by_memory.get(memory_key(target)) if has_memory(target) else None
        return problem if found is None else NeedFound(written=frozenset({found[1]}), problem=problem)
