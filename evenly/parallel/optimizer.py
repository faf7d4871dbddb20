"""An optimizer over parameters that are cut over ranks: each rank steps the pieces it holds.

The job builds its optimizer over the model's parameters, so that it can sort them into groups; then the pieces take
their places. The optimizers of torch.optim that treat every element by itself are given plain tensors. All others
are given DTensors, on which a norm, say, is that of the whole; slower, and right for whatever they compute.

A checkpoint knows parameters and state by name, shape and place in the whole: `as_dtensors` shows both in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from evenly.errors import RunError
from evenly.parallel.memory import local

# Of these classes themselves: what derives from one may do more.
ELEMENTWISE = frozenset(
    [
        optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD,
    ]
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Cut:
    """One parameter that is cut along dim 0.

    parameter: as the model has it, whole or not.
    piece:     a DTensor over the memory of this rank's rows; the parameter itself where the model is cut.
    rows:      those of the whole that this rank holds.
    """

    name: str
    parameter: nn.Parameter
    piece: Any
    rows: slice


class CutOptimizer:
    """Lets `optimizer`, built over the parameters of `model` and not yet used, step the pieces of `cuts`."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, cuts: Sequence[Cut]) -> None:
        self._model, self._optimizer = model, optimizer
        self._plain = type(optimizer) in ELEMENTWISE
        with torch.no_grad():
            self._held = {cut.name: local(cut.piece).detach() if self._plain else cut.piece for cut in cuts}
        self._cuts = {cut.name: cut for cut in cuts}
        self._replace((cut.parameter, self._held[cut.name], _to_rows(cut, plain=self._plain)) for cut in cuts)

    def step(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """One step with `gradients`, by name, of this rank's pieces. Parameters that are not cut have theirs."""
        with torch.no_grad():
            for name, gradient in gradients:
                if (held := self._held.get(name)) is not None:
                    self._check_place(name, held)
                    held.grad = gradient if gradient is None or self._plain else _dtensor(gradient, held)
        self._optimizer.step()
        for held in self._held.values() if self._plain else ():
            held.grad = None  # who made the gradients frees them

    @contextmanager
    def as_dtensors(self) -> Generator[None]:
        """Within, the parameters of the model and the optimizer's state are DTensors; what is filled in stays."""
        shown = {name: _shown(cut) for name, cut in self._cuts.items()}
        by_id = {id(cut.parameter): shown[name] for name, cut in self._cuts.items()}
        places = [
            (module, name, parameter)
            for module in self._model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if by_id.get(id(parameter), parameter) is not parameter
        ]
        for module, name, parameter in places:
            setattr(module, name, by_id[id(parameter)])
        self._replace((held, shown[name], self._to_dtensor(self._cuts[name])) for name, held in self._held.items())
        try:
            yield
        finally:
            self._replace((shown[name], held, local if self._plain else _same) for name, held in self._held.items())
            for module, name, parameter in places:
                setattr(module, name, parameter)
            with torch.no_grad():
                for name, cut in self._cuts.items():
                    if shown[name] is not cut.parameter:
                        cut.parameter[cut.rows].copy_(local(shown[name]))

    def _replace(self, pairs: Iterable[tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]]) -> None:
        """The optimizer's (old) parameters by (new) ones, with (what becomes of) the state it keeps for them."""
        new: dict[int, torch.Tensor] = {}
        state = self._optimizer.state
        for before, after, convert in pairs:
            new[id(before)] = after
            if before is not after and before in state:
                kept = state.pop(before)
                state[after] = {k: convert(v) if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]

    def _to_dtensor(self, cut: Cut) -> Callable[[torch.Tensor], torch.Tensor]:
        if not self._plain:
            return _same
        shape = local(cut.piece).shape
        return lambda value: _dtensor(value, cut.piece) if value.shape == shape else value

    def _check_place(self, name: str, held: torch.Tensor) -> None:
        cut = self._cuts[name]
        now = local(cut.parameter) if cut.piece is cut.parameter else cut.parameter[cut.rows]
        if local(held).data_ptr() != now.data_ptr():
            raise RunError(
                f"stepping {name}", "its memory is another than when the run began", "leave the model where it is"
            )


def _to_rows(cut: Cut, *, plain: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """For state that an optimizer made at once, for the whole parameter."""

    def convert(value: torch.Tensor) -> torch.Tensor:
        if value.shape != cut.piece.shape:
            return value
        rows = local(value) if isinstance(value, DTensor) else value[cut.rows].clone()
        return rows if plain else _dtensor(rows, cut.piece)

    return convert


def _shown(cut: Cut) -> Any:
    """The parameter as a DTensor; with memory of its own, since torch stages a view with all that it is a view of."""
    if cut.piece is cut.parameter:
        return cut.parameter
    return nn.Parameter(_dtensor(local(cut.piece.detach()).clone(), cut.piece))


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _dtensor(rows: torch.Tensor, like: Any) -> Any:
    """`rows` as this rank's part of a DTensor that is cut as `like` is."""
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
