"""What neighbouring stages of a pipeline send each other: tensors forward, their gradients back.

Shapes may differ from microbatch to microbatch. They follow from the shapes of the microbatch itself, which every rank
has: only the first of such a shape is announced by its *forms*, one number after the other, and later ones are expected
to be the same. A gradient travels with one element more, which says whether there is one: what was not used has none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evenly.comm.collectives import recv, send
from evenly.comm.groups import Group
from evenly.comm.transport import Pending
from evenly.errors import RunError

Payload = list[torch.Tensor | None]  # what a stage receives, by its needs; None where this microbatch has nothing there
Sent = tuple[int, int, bool]  # the later of the two stages, the microbatch, and whether it is gradients: they go back

MOST_DIMS = 8
NUMBERS = MOST_DIMS + 3  # of a form: dims, dtype, whether it requires a gradient, and the dims' lengths
MOST_TENSORS = 64
TYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


@dataclass(frozen=True)
class Form:
    """The form of a tensor that is sent; `shape` is None where this microbatch has none."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> Form:
        if tensor is None:
            return cls(None, torch.float32, False)
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def numbers(self) -> list[int]:
        """As numbers, of which `from_numbers` is the inverse."""
        shape = self.shape or ()
        if len(shape) > MOST_DIMS:
            raise RunError(
                "sending a tensor to the next stage", f"it has {len(shape)} dims", f"use at most {MOST_DIMS}"
            )
        dims = -1 if self.shape is None else len(shape)
        return [dims, TYPES.index(self.dtype), int(self.requires_grad), *shape, *[0] * (MOST_DIMS - len(shape))]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Form:
        """The form that `numbers` were made of."""
        dims, dtype, requires_grad, *shape = numbers
        return cls(None if dims < 0 else tuple(shape[:dims]), TYPES[dtype], bool(requires_grad))


@dataclass(eq=False)
class StageChannel:
    """The messages of one rank of a pipeline.

    group:  the ranks of the pipeline axis. stages: of all ranks together.

    What was sent is kept until it is known to have left: once its receiver has answered later messages
    (`acknowledged`), or at the end of the step. Some backends do not tell.
    """

    group: Group
    stages: int
    _sent: dict[Sent, list[tuple[Pending[None], torch.Tensor]]] = field(default_factory=dict[Any, Any])
    _forms: dict[Hashable, list[Form]] = field(default_factory=dict[Hashable, list[Form]])

    # --------------------------------------------------------------------------------------------------- forward
    def send(self, payload: Payload, to: int, *, stage: int, microbatch: int, like: Hashable) -> None:
        """Begins to send what `stage` receives; like: what the forms of its tensors follow from."""
        forms, sent = [Form.of(tensor) for tensor in payload], (stage, microbatch, False)
        known = self._forms.setdefault(("to", stage, like), forms)
        if known is forms:
            numbers = [number for form in forms for number in form.numbers()]
            self._send(torch.tensor(numbers, device=self.group.device), to, sent, MOST_TENSORS - 1)
        elif known != forms:
            raise RunError(
                f"sending to stage {stage} of the pipeline",
                f"a microbatch of the same shapes gave other shapes before: {known} and now {forms}",
                "let shapes within the model follow from those of the batch, or use a plan without pipeline",
            )
        for number, tensor in enumerate(payload):
            if tensor is not None:
                self._send(tensor.detach(), to, sent, number)

    def expects(self, stage: int, like: Hashable) -> bool:
        """Whether the forms of what `stage` receives are known, so that it can be waited for ahead."""
        return ("from", stage, like) in self._forms

    def begin_recv(self, source: int, *, tensors: int, stage: int, microbatch: int, like: Hashable) -> Arriving:
        """Begins to receive the `tensors` that `stage` needs; waits for their forms if it does not know them."""
        key = ("from", stage, like)
        if key not in self._forms:
            numbers = torch.empty(tensors * NUMBERS, dtype=torch.int64, device=self.group.device)
            listed = recv(
                numbers, source, self.group, tag=self._tag(stage, microbatch, False, MOST_TENSORS - 1)
            ).tolist()
            self._forms[key] = [Form.from_numbers(listed[i : i + NUMBERS]) for i in range(0, len(listed), NUMBERS)]
        arriving: list[Any] = []
        for number, form in enumerate(self._forms[key]):
            tag = self._tag(stage, microbatch, False, number)
            arriving.append(None if form.shape is None else self._recv(form.shape, form.dtype, source, tag))
        return Arriving(arriving, self._forms[key])

    # -------------------------------------------------------------------------------------------------- backward
    def send_gradients(self, inputs: Payload, to: int, *, stage: int, microbatch: int) -> None:
        """Begins to send the gradients of what `stage` received, to where it came from."""
        for number, tensor in enumerate(inputs):
            if tensor is not None and tensor.requires_grad:
                packed = tensor.new_empty(tensor.numel() + 1)
                packed[-1] = tensor.grad is not None
                if tensor.grad is not None:  # else nobody looks at the rest
                    packed[:-1].copy_(tensor.grad.reshape(-1))
                self._send(packed, to, (stage, microbatch, True), number)

    def begin_recv_gradients(self, outputs: Payload, source: int, *, stage: int, microbatch: int) -> ArrivingGradients:
        """Begins to receive the gradients of `outputs`, which `stage` was sent."""
        arriving: list[Any] = []
        for number, tensor in enumerate(outputs):
            tag = self._tag(stage, microbatch, True, number)
            if tensor is None or not tensor.requires_grad:
                arriving.append(None)
            else:
                arriving.append(self._recv((tensor.numel() + 1,), tensor.dtype, source, tag))
        return ArrivingGradients(arriving, outputs)

    def finish(self) -> None:
        """Waits until all that was sent has left."""
        for sent in [*self._sent]:
            self._release(sent)

    def acknowledged(self, stage: int, microbatch: int, *, back: bool) -> None:
        """What was sent to `stage`, or the gradients sent `back` from it, arrived: they are kept no longer."""
        self._release((stage, microbatch, back))

    # --------------------------------------------------------------------------------------------------- helpers
    def _release(self, sent: Sent) -> None:
        for pending, _ in self._sent.pop(sent, ()):
            pending.wait()

    def _tag(self, stage: int, microbatch: int, back: bool, number: int) -> int:
        return ((microbatch * self.stages + stage) * 2 + back) * MOST_TENSORS + number

    def _send(self, tensor: torch.Tensor, to: int, sent: Sent, number: int) -> None:
        tensor, tag = tensor.contiguous(), self._tag(*sent, number)
        self._sent.setdefault(sent, []).append((send.begin(tensor, to, self.group, tag=tag), tensor))

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> Pending[torch.Tensor]:
        landing = torch.empty(shape, dtype=dtype, device=self.group.device)
        return recv.begin(landing, source, self.group, tag=tag)


@dataclass(eq=False)
class Arriving:
    """Tensors on their way to a stage."""

    pending: list[Pending[torch.Tensor] | None]
    forms: list[Form]

    def wait(self) -> Payload:
        """The tensors, as leaves that require a gradient where those that were sent did."""
        found = [None if one is None else one.wait() for one in self.pending]
        return [
            None if tensor is None else tensor.requires_grad_(form.requires_grad)
            for tensor, form in zip(found, self.forms, strict=True)
        ]


@dataclass(eq=False)
class ArrivingGradients:
    """Gradients on their way to a stage."""

    pending: list[Pending[torch.Tensor] | None]
    outputs: Payload

    def wait(self) -> list[torch.Tensor | None]:
        """The gradient of each output; None where it has none."""
        return [
            None if one is None or tensor is None else _unpacked(one.wait(), tensor)
            for one, tensor in zip(self.pending, self.outputs, strict=True)
        ]


def _unpacked(packed: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    return packed[:-1].view(tensor.shape) if bool(packed[-1]) else None
