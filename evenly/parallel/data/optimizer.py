"""An optimizer over parameters that are cut over ranks: each rank steps the pieces it holds.

The job builds its optimizer over the model's parameters, so that it can sort them into groups; then the pieces take
their places. The optimizers of torch.optim that treat every element by itself are given plain tensors. All others
are given DTensors, on which a norm, say, is that of the whole; slower, and right for whatever they compute.

With `offload` the optimizer steps copies in the host's memory, where its state so stays: before an update gradients
and values are copied there, then the values back. The values too, since a job may change them between steps.

A checkpoint knows parameters and state by name, shape and place in the whole: `as_dtensors` shows both in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from evenly.errors import RunError, UserError
from evenly.parallel.core.memory import HOST, local, on
from evenly.plan import Offload

# Of these classes themselves: what derives from one may do more.
ELEMENTWISE = frozenset(
    [
        optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD,
    ]
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class OwnedRows:
    """One parameter that is cut along dim 0.

    parameter: as the model has it, whole or not.
    piece:     a DTensor over the memory of this rank's rows; the parameter itself where the model is cut, or nothing.
    rows:      those of the whole that this rank holds.
    """

    name: str
    parameter: nn.Parameter
    piece: Any
    rows: slice

    @property
    def own(self) -> torch.Tensor:
        """What this rank steps of it, in the memory of the model."""
        if self.piece is self.parameter:
            return local(self.parameter).detach()  # to detach a DTensor costs more
        return self.parameter.detach()[self.rows]

    @property
    def address(self) -> int:
        """Where `own` begins in memory."""
        whole = local(self.parameter)
        if self.piece is self.parameter or not whole.numel():
            return whole.data_ptr()
        return whole.data_ptr() + self.rows.start * whole.stride(0) * whole.element_size()


class ShardedOptimizer:
    """Lets `optimizer`, built over the parameters of `model` and not yet used, step the pieces of `cuts`.

    offload: as in the plan. Raises `UserError` for a class that would need the ranks' GPUs for what lies on the host.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, cuts: Sequence[OwnedRows], *, offload: Offload = "none"
    ) -> None:
        self._model, self._optimizer, self._offload = model, optimizer, offload == "optimizer"
        elementwise = type(optimizer) in ELEMENTWISE
        if offload != "none" and not elementwise and any(isinstance(cut.piece, DTensor) for cut in cuts):
            raise UserError(
                f"optimizer {type(optimizer).__name__} under offload={offload}",
                "it may need whole parameters, and each rank has a part of them on the host",
                "use an optimizer of torch.optim that treats every element by itself (AdamW, SGD), or no offload",
            )
        self._plain = self._offload or elementwise
        self._cuts = {cut.name: cut for cut in cuts}
        with torch.no_grad(), self._at_work():
            self._held = {cut.name: self._hold(cut) for cut in cuts}
            self._addresses = {cut.name: cut.address for cut in cuts}
            # Beside a GPU pinned once: pinning takes longer than the copy.
            self._gradients = {cut.name: _on_host(cut.own) for cut in cuts} if self._offload else {}
        self._replace((cut.parameter, self._held[cut.name], self._to_rows(cut)) for cut in cuts)

    def step(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """One step with `gradients`, by name, of this rank's pieces. Parameters that are not cut have theirs."""
        with torch.no_grad(), self._at_work():
            for name, gradient in gradients:
                if (held := self._held.get(name)) is not None:
                    held.grad = self._adopted(name, held, gradient)
        with self._at_work():
            if self._offload and torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # what was copied is there
            self._optimizer.step()
        with torch.no_grad(), self._at_work():
            for name, held in self._held.items():
                if self._offload:
                    self._cuts[name].own.copy_(held, non_blocking=True)
                if self._plain:
                    held.grad = None  # who made the gradients frees them

    @contextmanager
    def as_dtensors(self) -> Generator[None]:
        """Within, the parameters of the model and the optimizer's state are DTensors; what is filled in stays."""
        shown = {name: self._shown(cut) for name, cut in self._cuts.items()}
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
                        cut.own.copy_(local(shown[name]))

    def _at_work(self) -> AbstractContextManager[None]:
        return on(HOST, carrying=True) if self._offload else nullcontext()

    def _hold(self, cut: OwnedRows) -> Any:
        """Makes the optimizer step these tensors."""
        if self._offload:
            return _on_host(cut.own)
        return cut.own if self._plain else cut.piece

    def _adopted(self, name: str, held: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """`gradient` as `held` takes it, and with it the values that the model has now."""
        if self._offload:
            held.copy_(self._cuts[name].own, non_blocking=True)
            return None if gradient is None else self._gradients[name].copy_(gradient, non_blocking=True)
        if self._cuts[name].address != self._addresses[name]:
            raise RunError(
                f"stepping {name}", "its memory is another than when the run began", "leave the model where it is"
            )
        return gradient if gradient is None or self._plain else _dtensor(gradient, held)

    def _shown(self, cut: OwnedRows) -> Any:
        """The parameter for a checkpoint, which makes state besides it.

        With memory of its own where it is cut, since torch stages a view with all that it is a view of.
        """
        if self._offload:
            return nn.Parameter(_dtensor(_on_host(cut.own), cut.piece))
        if cut.piece is cut.parameter:
            return cut.parameter
        return nn.Parameter(_dtensor(cut.own.clone(), cut.piece))

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

    def _to_rows(self, cut: OwnedRows) -> Callable[[torch.Tensor], torch.Tensor]:
        """For state that the optimizer made at once, for the parameter as the model has it."""

        def convert(value: torch.Tensor) -> torch.Tensor:
            if value.shape != cut.parameter.shape:
                return value
            rows = local(value) if cut.piece is cut.parameter else value[cut.rows].clone()
            if self._offload:
                return rows.cpu()
            return rows if self._plain else _dtensor(rows, cut.piece)

        return convert

    def _to_dtensor(self, cut: OwnedRows) -> Callable[[torch.Tensor], torch.Tensor]:
        if not self._plain:
            return _same
        shape = cut.own.shape
        return lambda value: _dtensor(value, cut.piece) if value.shape == shape else value


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` in the host's memory; pinned next to a GPU, so that copies need not wait for each other."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _dtensor(rows: torch.Tensor, like: Any) -> Any:
    """`rows` as this rank's part of a DTensor that is cut as `like` is, if it is one."""
    if not isinstance(like, DTensor):
        return rows
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
