"""What neighbouring stages of a pipeline send each other: tensors forward, and their gradients back.

Shapes may differ from microbatch to microbatch, but are determined by the shapes of the microbatch itself, which every
rank knows (its *shape key*). The first microbatch of each shape key sends the metadata of its tensors first, and the
forms of what the blocks of the stages before have returned (`result_forms`); later ones reuse them. Where shapes follow
from numbers the key is None, and metadata comes first every time. Tensors arrive with the layout in memory that they
have where they were made (`memory_layout`), and gradients with that of their tensor. A gradient is sent with one extra
element that says whether the tensor has a gradient: an unused one has none.
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
from evenly.parallel.pipeline.memory_layout import gradient_strides, laid_out, packed, packed_size
from evenly.parallel.pipeline.result_forms import META_NUMBERS, ResultForms, TensorMeta, decoded_forms, encoded_forms

Payload = list[torch.Tensor | None]  # a stage's inputs, in order; None where this microbatch has none
MessageKey = tuple[int, int, bool]  # the later of the two stages, the microbatch, and whether it carries gradients

MAX_TENSORS = 1024  # per message, two of metadata included
METAS, FORMS = MAX_TENSORS - 1, MAX_TENSORS - 2  # the numbers of these two in a message


@dataclass(eq=False)
class StageChannel:
    """Sends and receives the messages of one rank of a pipeline.

    group:  the ranks of the pipeline axis. stages: their number over all ranks.

    A sent tensor stays alive until it has been delivered: until a later message of its receiver implies so
    (`acknowledged`), or the end of the step. Some backends do not report it.
    """

    group: Group
    stages: int
    _sent: dict[MessageKey, list[tuple[Pending[None], torch.Tensor]]] = field(default_factory=dict[Any, Any])
    _metas: dict[Hashable, list[TensorMeta]] = field(default_factory=dict[Hashable, list[TensorMeta]])

    # --------------------------------------------------------------------------------------------------- forward
    def sends_forms(self, stage: int, shape_key: Hashable) -> bool:
        """Whether the next message to `stage` of this key says what blocks have returned."""
        return shape_key is None or ("to", stage, shape_key) not in self._metas

    def send(
        self,
        payload: Payload,
        to: int,
        *,
        stage: int,
        microbatch: int,
        shape_key: Hashable,
        forms: ResultForms | None = None,
    ) -> None:
        """Begins to send the inputs of `stage` to rank `to`; shape_key: determines the shapes of the tensors.

        forms: of what the blocks before `stage` have returned, sent where the message `sends_forms`.
        """
        metas, sent = [TensorMeta.of(tensor) for tensor in payload], (stage, microbatch, False)
        known = metas if shape_key is None else self._metas.setdefault(("to", stage, shape_key), metas)
        if known is metas:
            listed = encoded_forms(forms or [])
            numbers = [len(listed), *(number for meta in metas for number in meta.encode())]
            self._send(torch.tensor(numbers, device=self.group.device), to, sent, METAS)
            if listed:
                self._send(torch.tensor(listed, device=self.group.device), to, sent, FORMS)
        elif known != metas:
            raise RunError(
                f"sending to stage {stage} of the pipeline",
                f"a microbatch of the same shapes gave other shapes or strides before: {known} and now {metas}",
                "let shapes within the model follow from those of the batch, or use a plan without pipeline",
            )
        for number, tensor in enumerate(payload):
            if tensor is not None:
                self._send(packed(tensor.detach()), to, sent, number)

    def nothing(self, stage: int, shape_key: Hashable, tensors: int) -> Payload:
        """Inputs of `stage` without numbers of the job; of the shapes that it expects, if it does."""
        metas = self._metas.get(("to", stage, shape_key)) or [TensorMeta.of(None)] * tensors
        found: Payload = []
        for one in metas:
            found.append(None)
            if one.shape is not None:
                zeros = torch.zeros(packed_size(one.shape, one.strides), dtype=one.dtype, device=self.group.device)
                found[-1] = laid_out(zeros, one.shape, one.strides).requires_grad_(one.requires_grad)
        return found

    def expects(self, stage: int, shape_key: Hashable) -> bool:
        """Whether the metadata of the inputs of `stage` is known, so that receives can be posted early."""
        return shape_key is not None and ("from", stage, shape_key) in self._metas

    def begin_recv(
        self, source: int, *, tensors: int, stage: int, microbatch: int, shape_key: Hashable
    ) -> IncomingTensors:
        """Begins to receive the inputs of `stage`, `tensors` of them; waits for their metadata if it is unknown."""
        key, forms = ("from", stage, shape_key), ResultForms()
        if shape_key is None or key not in self._metas:
            listed, *metas = self._recv_numbers(1 + tensors * META_NUMBERS, source, (stage, microbatch, False), METAS)
            self._metas[key] = [
                TensorMeta.decode(metas[i : i + META_NUMBERS]) for i in range(0, len(metas), META_NUMBERS)
            ]
            if listed:
                forms = decoded_forms(self._recv_numbers(listed, source, (stage, microbatch, False), FORMS))
        incoming: list[Any] = []
        for number, meta in enumerate(self._metas[key]):
            tag = self._tag(stage, microbatch, False, number)
            size = 0 if meta.shape is None else packed_size(meta.shape, meta.strides)
            incoming.append(None if meta.shape is None else self._recv(size, meta.dtype, source, tag))
        return IncomingTensors(incoming, self._metas[key], forms)

    # -------------------------------------------------------------------------------------------------- backward
    def send_gradients(self, inputs: Payload, to: int, *, stage: int, microbatch: int) -> None:
        """Begins to send the gradients of the `inputs` of `stage` to the rank that sent them."""
        for number, tensor in enumerate(inputs):
            if tensor is not None and tensor.requires_grad:
                sent = tensor.new_empty(tensor.numel() + 1)
                sent[-1].fill_(tensor.grad is not None)  # what is assigned is copied from the host, which waits
                if tensor.grad is not None:  # else the receiver ignores these elements
                    sent[:-1].copy_(packed(tensor.grad, gradient_strides(tensor)))
                self._send(sent, to, (stage, microbatch, True), number)

    def begin_recv_gradients(self, outputs: Payload, source: int, *, stage: int, microbatch: int) -> IncomingGradients:
        """Begins to receive the gradients of `outputs`, which were sent to `stage`."""
        incoming: list[Any] = []
        for number, tensor in enumerate(outputs):
            tag = self._tag(stage, microbatch, True, number)
            if tensor is None or not tensor.requires_grad:
                incoming.append(None)
            else:
                incoming.append(self._recv(tensor.numel() + 1, tensor.dtype, source, tag))
        return IncomingGradients(incoming, outputs)

    def finish(self) -> None:
        """Waits until all messages are delivered."""
        for sent in [*self._sent]:
            self._release(sent)

    def acknowledged(self, stage: int, microbatch: int, *, is_gradient: bool) -> None:
        """Releases the tensors, or gradients, between `stage - 1` and `stage`: the receiver has them."""
        self._release((stage, microbatch, is_gradient))

    # --------------------------------------------------------------------------------------------------- helpers
    def _release(self, sent: MessageKey) -> None:
        for pending, _ in self._sent.pop(sent, ()):
            pending.wait()

    def _tag(self, stage: int, microbatch: int, is_gradient: bool, number: int) -> int:
        return ((microbatch * self.stages + stage) * 2 + is_gradient) * MAX_TENSORS + number

    def _send(self, tensor: torch.Tensor, to: int, sent: MessageKey, number: int) -> None:
        tag = self._tag(*sent, number)
        self._sent.setdefault(sent, []).append((send.begin(tensor, to, self.group, tag=tag), tensor))

    def _recv_numbers(self, count: int, source: int, sent: MessageKey, number: int) -> list[int]:
        numbers = torch.empty(count, dtype=torch.int64, device=self.group.device)
        return recv(numbers, source, self.group, tag=self._tag(*sent, number)).tolist()

    def _recv(self, size: int, dtype: torch.dtype, source: int, tag: int) -> Pending[torch.Tensor]:
        buffer = torch.empty(size, dtype=dtype, device=self.group.device)
        return recv.begin(buffer, source, self.group, tag=tag)


def arrived_s(pending: Sequence[Pending[torch.Tensor] | None]) -> float | None:
    """When all messages were there, on the clock of `time.perf_counter`; None where that was not noted of each."""
    times = [None if one.timing is None else one.timing.complete_s for one in pending if one is not None]
    return None if None in times else max((one for one in times if one is not None), default=None)


@dataclass(eq=False)
class IncomingTensors:
    """Tensors that a stage is receiving; forms: of what blocks have returned, where the message said so."""

    pending: list[Pending[torch.Tensor] | None]
    metas: list[TensorMeta]
    forms: ResultForms

    @property
    def arrived_s(self) -> float | None:
        """When all were there, as `arrived_s` has it."""
        return arrived_s(self.pending)

    def wait(self) -> Payload:
        """Waits for the tensors; returns leaves, which require a gradient where the sent tensors did."""
        found: Payload = []
        for pending, meta in zip(self.pending, self.metas, strict=True):
            found.append(None)
            if pending is not None and meta.shape is not None:
                found[-1] = laid_out(pending.wait(), meta.shape, meta.strides).requires_grad_(meta.requires_grad)
        return found


@dataclass(eq=False)
class IncomingGradients:
    """Gradients of the `outputs` of a stage that it is receiving."""

    pending: list[Pending[torch.Tensor] | None]
    outputs: Payload

    @property
    def arrived_s(self) -> float | None:
        """When all were there, as `arrived_s` has it."""
        return arrived_s(self.pending)

    def wait(self) -> list[torch.Tensor | None]:
        """Waits for the gradient of each output; None where it has none."""
        gradients: list[torch.Tensor | None] = []
        for pending, output in zip(self.pending, self.outputs, strict=True):
            gradients.append(None)
            if pending is not None and output is not None and bool((found := pending.wait())[-1]):
                gradients[-1] = laid_out(found[:-1], output.shape, gradient_strides(output))
        return gradients
