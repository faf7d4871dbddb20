"""An optimizer that every rank steps whole, over parameters of which each rank holds a part.

For optimizers that look at more than single elements where no rank could say what they need: norms asked for as
numbers, rows and columns, matrices made orthogonal, hooks. Before an update gradients and parameters are gathered,
afterwards each rank keeps its part. All ranks compute the same: the numbers are those of one device, and the
optimizer's state is whole on each rank. A checkpoint sees the state in parts, as that of any other optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from evenly.parallel.core.between_steps import Outside
from evenly.parallel.core.memory import local
from evenly.parallel.data.optimizer import OwnedRows, State, as_piece, each_tensor, replace_parameters, replaced_in


class WholeOptimizer:
    """Lets `optimizer`, built over the local parameters of `model` and not yet used, step full ones.

    named: those of its parameters that it may step. cuts: what the data axis has cut. gather: by name, the full tensor
    of a local one; a collective. part: by name, what the tensor axis leaves of a full one. outside: knows when it
    steps.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Iterable[tuple[str, nn.Parameter]],
        optimizer: optim.Optimizer,
        cuts: Sequence[OwnedRows],
        *,
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        part: Callable[[str, torch.Tensor], torch.Tensor],
        outside: Outside,
    ) -> None:
        self._outside = outside
        self._model, self._optimizer, self._gather, self._part = model, optimizer, gather, part
        self._cuts = {cut.name: cut for cut in cuts}
        self._local = {name: p for name, p in named if p.requires_grad and not p.is_meta}
        self._full = {name: nn.Parameter(torch.empty(0, dtype=p.dtype)) for name, p in self._local.items()}
        self._shapes: dict[str, torch.Size] = {}  # by name, of the full parameters, as far as they were seen
        self._saved: dict[str, tuple[State, State]] = {}  # by name, state in parts and whole
        replace_parameters(
            optimizer, ((p, self._full[name], each_tensor(self._whole_of(name))) for name, p in self._local.items())
        )

    def step(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Steps with `gradients`, by name: this rank's pieces; a collective."""
        found = dict(gradients)
        with torch.no_grad():
            for name, full in self._full.items():
                gradient = found[name] if name in self._cuts else self._local[name].grad
                full.data = self._gather(name, self._local[name].detach())
                self._shapes[name] = full.shape
                full.grad = None if gradient is None else self._gather(name, self._as_piece(name, gradient))
        with self._whole(), self._outside.step():
            self._optimizer.step()
        with torch.no_grad():
            for name, full in self._full.items():
                mine = self._part(name, full.detach())
                if isinstance(self._local[name], DTensor):
                    mine = mine[self._cuts[name].rows]
                local(self._local[name]).copy_(mine)
                full.grad, full.data = None, full.new_empty(0)

    @contextmanager
    def _whole(self) -> Generator[None]:
        """Within, the model's parameters have the memory of the full ones too: hooks may hold either."""
        before = {name: (p.data, p.grad) for name, p in self._local.items() if not isinstance(p, DTensor)}
        for name in before:
            self._local[name].data, self._local[name].grad = self._full[name].data, self._full[name].grad
        try:
            yield
        finally:
            for name, (data, gradient) in before.items():
                self._local[name].data, self._local[name].grad = data, gradient

    @contextmanager
    def as_dtensors(self) -> Generator[None]:
        """Within, parameters and optimizer state are DTensors or parts; what is loaded into them is kept."""
        views = {name: self._checkpoint_parameter(name) for name in self._local}
        self._saved.clear()
        replace_parameters(
            self._optimizer, ((full, views[name], self._split(name)) for name, full in self._full.items())
        )
        with replaced_in(self._model, {id(p): views[name] for name, p in self._local.items()}):
            yield
        replace_parameters(
            self._optimizer, ((views[name], full, self._joined(name)) for name, full in self._full.items())
        )
        with torch.no_grad():
            for name, parameter in self._local.items():
                if views[name] is not parameter:
                    self._cuts[name].own.copy_(local(views[name]))

    def _checkpoint_parameter(self, name: str) -> Any:
        cut = self._cuts.get(name)
        if cut is None or cut.piece is cut.parameter:
            return self._local[name]
        return nn.Parameter(as_piece(cut.own.clone(), cut.piece))

    def _as_piece(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        cut = self._cuts.get(name)
        return rows if cut is None else as_piece(rows, cut.piece)

    # ----------------------------------------------------------------------------------------- the state
    def _split(self, name: str) -> Callable[[State], State]:
        """Cuts what the optimizer keeps for a parameter as the parameter is cut."""

        def convert(whole: State) -> State:
            parts = each_tensor(self._part_of(name))(whole)
            self._saved[name] = parts, whole
            return parts

        return convert

    def _joined(self, name: str) -> Callable[[State], State]:
        """The inverse; what was not loaded meanwhile is still there whole."""

        def convert(parts: State) -> State:
            before, whole = self._saved.get(name, ({}, {}))
            if parts.keys() == before.keys() and all(parts[key] is before[key] for key in parts):
                return whole
            return each_tensor(self._whole_of(name))(parts)

        return convert

    def _part_of(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def convert(whole: torch.Tensor) -> torch.Tensor:
            if whole.shape != self._shapes.get(name) or not whole.dim():
                return whole
            part, cut = self._part(name, whole), self._cuts.get(name)
            return part if cut is None else as_piece(part[cut.rows].clone(), cut.piece)

        return convert

    def _whole_of(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def convert(value: torch.Tensor) -> torch.Tensor:
            if value.shape != self._local[name].shape or not value.dim():
                return value
            whole = self._gather(name, value)
            self._shapes[name] = whole.shape
            return whole

        return convert
