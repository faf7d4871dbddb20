"""An optimizer whose parameters are dealt to the ranks, each whole to one of them: its *owner*.

For optimizers that are known to look at one whole parameter at a time: orthogonalised matrices (Muon), rows and columns
(Adafactor). Before an update the pieces of every
gradient go to its owner, with those of the parameter where that is sharded; the owner alone steps it and keeps its
state; afterwards its pieces go back. Parameters that are not cut (without dims, say) are stepped by every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn, optim

from evenly.comm.groups import Group
from evenly.comm.operations import all_to_all
from evenly.parallel.core.between_steps import Outside
from evenly.parallel.core.param_groups import WholeParameter, remove_parameters
from evenly.parallel.data.grouping import deal_out
from evenly.parallel.data.optimizer import OwnedRows, pieces_as_dtensors, replace_parameters
from evenly.parallel.data.row_layout import RowLayout

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RowExchange:
    """Between the pieces of parameters, cut along dim 0 over `group`, and whole ones at their owners.

    shapes: of the whole ones. owners: positions in the group. Both by name, and in the same order on all ranks.
    """

    shapes: Mapping[str, Sequence[int]]
    owners: Mapping[str, int]
    group: Group

    def to_owners(self, pieces: Tensors) -> dict[str, torch.Tensor]:
        """The whole of those that this rank owns, from each rank's piece of all; a collective."""
        found: dict[str, torch.Tensor] = {}
        for names in _by_dtype(pieces):
            kept, sent = self._owned(names), [pieces[name] for rank in self._ranks for name in self._owned(names, rank)]
            there, back = self._sizes(names)
            landing = all_to_all(_packed(sent, pieces[names[0]]), self.group, sizes=there, received=back)
            found |= {name: landing.new_empty(tuple(self.shapes[name])) for name in kept}
            targets = [found[name][self._rows(name, rank)] for rank in self._ranks for name in kept]
            _unpack(landing, targets)
        return found

    def to_pieces(self, wholes: Tensors, pieces: Tensors) -> None:
        """The inverse: fills each rank's piece of all from the whole ones at their owners; a collective."""
        for names in _by_dtype(pieces):
            sent = [wholes[name][self._rows(name, rank)] for rank in self._ranks for name in self._owned(names)]
            there, back = self._sizes(names)
            landing = all_to_all(_packed(sent, pieces[names[0]]), self.group, sizes=back, received=there)
            _unpack(landing, [pieces[name] for rank in self._ranks for name in self._owned(names, rank)])

    @property
    def _ranks(self) -> range:
        return range(self.group.size)

    def _owned(self, names: Sequence[str], rank: int | None = None) -> list[str]:
        """Those of `names` that the rank at this position owns; by default this rank."""
        position = self.group.position if rank is None else rank
        return [name for name in names if self.owners[name] == position]

    def _rows(self, name: str, rank: int) -> slice:
        return RowLayout.of(self.shapes[name], self.group.size).own(rank)

    def _sizes(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Elements that go from this rank to each owner, and from each rank to this owner."""
        mine = self.group.position
        there = [sum(self._elements(name, mine) for name in self._owned(names, rank)) for rank in self._ranks]
        return there, [sum(self._elements(name, rank) for name in self._owned(names)) for rank in self._ranks]

    def _elements(self, name: str, rank: int) -> int:
        rows = self._rows(name, rank)
        return (rows.stop - rows.start) * torch.Size(self.shapes[name][1:]).numel()


def _by_dtype(tensors: Tensors) -> list[list[str]]:
    found: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.dtype, []).append(name)
    return [*found.values()]


def _packed(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """All elements, 1D; of the dtype and device of `like` where there are none."""
    return torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])


def _unpack(packed: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    parts = packed.split([target.numel() for target in targets])
    for part, target in zip(parts, targets, strict=True):
        target.copy_(part.view(target.shape))


class OwnedOptimizer:
    """Lets `optimizer`, built over the parameters of `model` and not yet used, step those that this rank owns.

    cuts: what the data axis has cut, over `group`. outside: knows when it steps.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, cuts: Sequence[OwnedRows], group: Group, *, outside: Outside
    ) -> None:
        self._model, self._optimizer, self._outside = model, optimizer, outside
        self._cuts = {cut.name: cut for cut in cuts}
        parameters = {name: cut.parameter for name, cut in self._cuts.items()}
        owners = deal_out(
            {name: p.numel() * p.itemsize * p.requires_grad for name, p in parameters.items()}, group.size
        )
        self._exchange = RowExchange({name: tuple(p.shape) for name, p in parameters.items()}, owners, group)
        self._whole = {
            name: WholeParameter.of(name, p) for name, p in parameters.items() if owners[name] == group.position
        }
        remove_parameters(optimizer, [p for name, p in parameters.items() if name not in self._whole])
        replace_parameters(optimizer, ((parameters[name], whole, dict) for name, whole in self._whole.items()))

    @torch.no_grad()
    def step(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Steps with `gradients`, by name, of this rank's pieces, others having theirs in `grad`; a collective."""
        found = dict(gradients)
        pieces = {name: gradient for name in self._cuts if (gradient := found.get(name)) is not None}
        whole_gradients = self._exchange.to_owners(pieces)
        own = {name: self._cuts[name].own for name in pieces}
        sharded = {name: rows for name, rows in own.items() if self._is_sharded(name)}
        gathered = self._exchange.to_owners(sharded)
        for name, gradient in whole_gradients.items():
            whole, parameter = self._whole[name], self._cuts[name].parameter
            whole.data = gathered[name] if name in gathered else parameter.detach()
            whole.grad = gradient
        with torch.enable_grad(), self._outside.step():
            self._optimizer.step()
        for name in whole_gradients:
            self._whole[name].grad = None
        stepped = {name: self._whole[name].detach() for name in whole_gradients}
        whole_gradients.clear()  # before there is anything else to send
        self._exchange.to_pieces(stepped, own)
        for name in stepped:
            self._whole[name].data = self._whole[name].new_empty(0)

    def _is_sharded(self, name: str) -> bool:
        cut = self._cuts[name]
        return cut.piece is cut.parameter

    def as_dtensors(self) -> AbstractContextManager[None]:
        """Within, cut parameters are DTensors, and state is whole at its owner; what is loaded into them is kept."""
        return pieces_as_dtensors(self._model, self._cuts.values())
