"""An optimizer over sharded parameters: each rank steps its own pieces.

The job builds its optimizer over the model's parameters, so that it can sort them into groups; then the pieces replace
them: plain tensors, for optimizers that are known to update every element by itself.

With `offload` the optimizer steps copies in host memory, where its state stays too. Before an update gradients and
parameters are copied to the host (the job may change parameters between steps), after it parameters are copied back.

A checkpoint needs names, global shapes and offsets: `as_dtensors` presents parameters and state in that form.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from evenly.errors import RunError
from evenly.parallel.core.memory import HOST, local, on
from evenly.plan import Offload
from evenly.torch_private import dtensor_like

State = Mapping[str, Any]  # what an optimizer keeps for one parameter


@dataclass(frozen=True, eq=False)
class OwnedRows:
    """The rows of one parameter, cut along dim 0, that this rank steps.

    parameter: the model's, full or sharded.
    piece:     a DTensor that shares memory with this rank's rows; `parameter` itself if it is sharded or not cut.
    rows:      the rows of the full parameter that this rank steps.
    """

    name: str
    parameter: nn.Parameter
    piece: Any
    rows: slice

    @property
    def own(self) -> torch.Tensor:
        """This rank's rows, sharing memory with the model."""
        if self.piece is self.parameter:
            return local(self.parameter).detach()  # detaching a DTensor costs more
        return self.parameter.detach()[self.rows]

    @property
    def address(self) -> int:
        """The address of the memory that the model has of the parameter."""
        whole = local(self.parameter) if self.piece is self.parameter else self.parameter  # `local` takes a while
        return whole.data_ptr()


class ShardedOptimizer:
    """Lets `optimizer`, built over the parameters of `model` and not yet used, step the pieces of `cuts`.

    offload: as in the plan.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, cuts: Sequence[OwnedRows], *, offload: Offload = "none"
    ) -> None:
        self._model, self._optimizer, self._offload = model, optimizer, offload == "optimizer"
        self._cuts = {cut.name: cut for cut in cuts}
        with torch.no_grad(), self._device_context():
            self._stepped: dict[str, Any] = {c.name: _on_host(c.own) if self._offload else c.own for c in cuts}
            self._addresses = {cut.name: cut.address for cut in cuts}
            # Pinned once next to a GPU: pinning takes longer than the copy.
            self._gradients = {cut.name: _on_host(cut.own) for cut in cuts} if self._offload else {}
        self._replace((cut.parameter, self._stepped[cut.name], self._to_rows(cut)) for cut in cuts)

    def step(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Steps with `gradients`, by name, of this rank's pieces; other parameters have theirs in `grad`."""
        with torch.no_grad(), self._device_context():
            for name, gradient in gradients:
                if (stepped := self._stepped.get(name)) is not None:
                    stepped.grad = self._gradient_of(name, stepped, gradient)
        with self._device_context():
            if self._offload and torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # the copies must have ended
            self._optimizer.step()
        with torch.no_grad(), self._device_context():
            for name, stepped in self._stepped.items():
                if self._offload:
                    self._cuts[name].own.copy_(stepped, non_blocking=True)
                stepped.grad = None  # `Gradients` owns and frees them

    @contextmanager
    def as_dtensors(self) -> Generator[None]:
        """Within, parameters and optimizer state are DTensors; values loaded into them are kept afterwards."""
        views = {name: self._checkpoint_parameter(cut) for name, cut in self._cuts.items()}
        self._replace(
            (stepped, views[name], self._to_dtensor(self._cuts[name])) for name, stepped in self._stepped.items()
        )
        try:
            with replaced_in(self._model, {id(cut.parameter): views[name] for name, cut in self._cuts.items()}):
                yield
        finally:
            self._replace((views[name], stepped, local) for name, stepped in self._stepped.items())
            with torch.no_grad():
                for name, cut in self._cuts.items():
                    if views[name] is not cut.parameter:
                        cut.own.copy_(local(views[name]))

    def _replace(self, pairs: Iterable[tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]]) -> None:
        replace_parameters(self._optimizer, ((old, new, each_tensor(convert)) for old, new, convert in pairs))

    def _device_context(self) -> AbstractContextManager[None]:
        return on(HOST, carrying=True) if self._offload else nullcontext()

    def _gradient_of(self, name: str, stepped: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """`gradient` in the form of `stepped`; with offload also copies the current parameter to the host."""
        if self._offload:
            stepped.copy_(self._cuts[name].own, non_blocking=True)
            return None if gradient is None else self._gradients[name].copy_(gradient, non_blocking=True)
        if self._cuts[name].address != self._addresses[name]:
            raise RunError(
                f"stepping {name}", "its memory has moved since the run began", "leave the model where it is"
            )
        return gradient

    def _checkpoint_parameter(self, cut: OwnedRows) -> Any:
        """The parameter as a checkpoint sees it.

        A piece gets its own memory, since torch stages a view together with its whole base tensor.
        """
        if self._offload:
            return nn.Parameter(as_piece(_on_host(cut.own), cut.piece))
        if cut.piece is cut.parameter:
            return cut.parameter
        return nn.Parameter(as_piece(cut.own.clone(), cut.piece))

    def _to_rows(self, cut: OwnedRows) -> Callable[[torch.Tensor], torch.Tensor]:
        """Converts state that the optimizer made for the full parameter when it was built."""

        def convert(value: torch.Tensor) -> torch.Tensor:
            if value.shape != cut.parameter.shape:
                return value
            if isinstance(value, DTensor):
                rows = local(value)
            else:
                rows = value[cut.rows].clone() if value.dim() else value.clone()
            return rows.cpu() if self._offload else rows

        return convert

    def _to_dtensor(self, cut: OwnedRows) -> Callable[[torch.Tensor], torch.Tensor]:
        shape = cut.own.shape
        return lambda value: as_piece(value, cut.piece) if value.shape == shape else value


def replace_parameters(optimizer: optim.Optimizer, pairs: Iterable[tuple[Any, Any, Callable[[State], State]]]) -> None:
    """Replaces parameters of `optimizer`, given (old, new, conversion of its state)."""
    by_id: dict[int, torch.Tensor] = {}
    state: Any = optimizer.state
    for old, new, convert in pairs:
        by_id[id(old)] = new
        if old is not new and old in state:
            state[new] = dict(convert(state.pop(old)))
    for group in optimizer.param_groups:
        group["params"] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], State]:
    """Converts the state of a parameter tensor by tensor."""
    return lambda state: {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}


@contextmanager
def replaced_in(model: nn.Module, by_id: Mapping[int, nn.Parameter]) -> Generator[None]:
    """Within, `model` has others in the place of its parameters of these ids."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if by_id.get(id(parameter), parameter) is not parameter
    ]
    for module, name, parameter in places:
        setattr(module, name, by_id[id(parameter)])
    try:
        yield
    finally:
        for module, name, parameter in places:
            setattr(module, name, parameter)


@contextmanager
def pieces_as_dtensors(model: nn.Module, cuts: Iterable[OwnedRows]) -> Generator[None]:
    """Within, the cut parameters of `model` are DTensors; values loaded into them are kept afterwards."""
    views = {
        id(cut.parameter): (cut, nn.Parameter(as_piece(cut.own.clone(), cut.piece)))
        for cut in cuts
        if cut.piece is not cut.parameter
    }
    try:
        with replaced_in(model, {key: view for key, (_, view) in views.items()}):
            yield
    finally:
        with torch.no_grad():
            for cut, view in views.values():
                cut.own.copy_(local(view))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` in the host's memory; pinned next to a GPU, so that copies need not wait for each other."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def as_piece(rows: torch.Tensor, template: Any) -> Any:
    """`rows` as the local part of a DTensor like `template`; `rows` itself if that is none."""
    return dtensor_like(template, rows.detach()) if isinstance(template, DTensor) else rows
