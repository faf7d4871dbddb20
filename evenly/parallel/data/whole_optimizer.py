"""An optimizer that every rank steps whole, over parameters of which each rank holds a part.

For all optimizers of which is not known what they look at. The job builds its optimizer over full parameters, which are
filled before an update; afterwards each rank keeps its part. State is whole on each rank and in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from evenly.parallel.core.between_steps import Outside
from evenly.parallel.core.memory import local
from evenly.parallel.core.param_groups import WholeParameter
from evenly.parallel.data.optimizer import OwnedRows, as_piece, pieces_as_dtensors

Named = Sequence[tuple[str, nn.Parameter]]


class WholeOptimizer:
    """An optimizer over full parameters in place of the `named` ones of `model`.

    build: makes the optimizer over parameters of these names. cuts: what the data axis has cut. gather: by name, the
    full tensor of a local one; a collective. part: by name, what the tensor axis leaves of a full one. outside: knows
    when it steps. offload: whether it steps, and keeps its state, on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Named,
        build: Callable[[Named], optim.Optimizer],
        cuts: Sequence[OwnedRows],
        *,
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        part: Callable[[str, torch.Tensor], torch.Tensor],
        outside: Outside,
        offload: bool,
    ) -> None:
        self._model, self._outside, self._gather, self._part = model, outside, gather, part
        self._cuts = {cut.name: cut for cut in cuts}
        self._local = dict(named)
        self._full = {name: WholeParameter.of(name, p, on_host=offload) for name, p in named}
        self._offload = offload
        self._fill()
        self.optimizer = build([*self._full.items()])
        stepped = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self._full = {name: full for name, full in self._full.items() if id(full) in stepped}
        self._release()

    def step(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Steps with `gradients`, by name: this rank's pieces; a collective."""
        found = dict(gradients)
        self._fill()
        for name, full in self._full.items():
            cut = self._cuts.get(name)
            gradient = self._local[name].grad if cut is None else found.get(name)
            if gradient is not None:
                piece = gradient.detach() if cut is None else as_piece(gradient, cut.piece)
                full.grad = self._gather(name, piece).to(full.device)
        with self.filled(filled=True), self._outside.step():
            self.optimizer.step()

    @contextmanager
    def filled(self, *, filled: bool = False) -> Generator[None]:
        """Within, the optimizer has the numbers of its parameters, which the model then gets; a collective.

        The model's parameters have the memory of the full ones too, where they are plain: hooks may hold either.
        """
        if not filled:
            self._fill()
        plain = {n: p for n in self._full if not (isinstance(p := self._local[n], DTensor) or self._offload)}
        before = {name: (p.data, p.grad) for name, p in plain.items()}
        for name, p in plain.items():
            p.data, p.grad = self._full[name].data, self._full[name].grad
        try:
            yield
        finally:
            for name, (data, gradient) in before.items():
                plain[name].data, plain[name].grad = data, gradient
        with torch.no_grad():
            for name, full in self._full.items():
                mine = self._part(name, full.detach())
                if isinstance(self._local[name], DTensor):
                    mine = mine[self._cuts[name].rows]
                local(self._local[name]).copy_(mine)
        self._release()

    @contextmanager
    def as_dtensors(self) -> Generator[None]:
        """Within, cut parameters are DTensors and the state is whole; what is loaded is kept; a collective."""
        self._fill()  # a state_dict of the optimizer's own may look at its parameters
        with pieces_as_dtensors(self._model, [cut for n, cut in self._cuts.items() if n in self._local]):
            yield
        self._release()

    @torch.no_grad()
    def _fill(self) -> None:
        for name, full in self._full.items():
            full.data = self._gather(name, self._local[name].detach()).to(full.device)

    def _release(self) -> None:
        for full in self._full.values():
            full.grad, full.data = None, full.new_empty(0)
