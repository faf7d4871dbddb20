"""What blocks return, as the stages that ran them say to those after them: shapes, strides and types.

A stage that skips a block has to know the form of what it returns. Where a microbatch has shapes that no microbatch had
before, the stages before have just computed it, so that nobody has to find it out again on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenly.data.nest import tensors_by_path
from evenly.errors import RunError

MAX_DIMS = 8
META_NUMBERS = 2 * MAX_DIMS + 3  # per tensor: number of dims, dtype, requires_grad, shape and strides, both padded
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


@dataclass(frozen=True)
class TensorMeta:
    """Metadata of a tensor that is sent; `shape` is None where this microbatch has no such tensor."""

    shape: tuple[int, ...] | None
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor | None) -> TensorMeta:
        if tensor is None:
            return cls(None, (), torch.float32, False)
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def encode(self) -> list[int]:
        """`META_NUMBERS` integers; `decode` is the inverse."""
        shape = self.shape or ()
        if len(shape) > MAX_DIMS:
            raise RunError("sending a tensor to the next stage", f"it has {len(shape)} dims", f"use at most {MAX_DIMS}")
        dims = -1 if self.shape is None else len(shape)
        padding = [0] * (MAX_DIMS - len(shape))
        return [dims, DTYPES.index(self.dtype), int(self.requires_grad), *shape, *padding, *self.strides, *padding]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> TensorMeta:
        dims, dtype, requires_grad, *sizes = numbers
        shape, strides = sizes[: max(dims, 0)], sizes[MAX_DIMS : MAX_DIMS + max(dims, 0)]
        return cls(None if dims < 0 else tuple(shape), tuple(strides), DTYPES[dtype], bool(requires_grad))


@dataclass(frozen=True)
class ResultForm:
    """Of the tensors of a block's result, in order: their metadata, and as which of its arguments' tensors each was
    given to the block; -1 for one that is new.
    """

    metas: tuple[TensorMeta, ...]
    arguments: tuple[int, ...]


ResultForms = list[ResultForm | None]  # of the calls of blocks in order, from the first on; None where it is not known


def form_of(result: Any, arguments: Any) -> ResultForm | None:
    """The form of what a block returned for `arguments`; None where a tensor has too many dims."""
    tensors = [tensor for _, tensor in tensors_by_path(result)]
    if any(tensor.dim() > MAX_DIMS for tensor in tensors):
        return None
    given = {id(tensor): number for number, (_, tensor) in enumerate(tensors_by_path(arguments))}
    return ResultForm(tuple(map(TensorMeta.of, tensors)), tuple(given.get(id(tensor), -1) for tensor in tensors))


def encoded_forms(forms: ResultForms) -> list[int]:
    """As numbers, of which `decoded_forms` is the inverse: for each form how many tensors, or -1, and these."""
    found: list[int] = []
    for form in forms:
        found.append(-1 if form is None else len(form.metas))
        for meta, argument in zip(form.metas, form.arguments, strict=True) if form else ():
            found += [argument, *meta.encode()]
    return found


def decoded_forms(numbers: Sequence[int]) -> ResultForms:
    return [*_decoded(numbers)]


def _decoded(numbers: Sequence[int]) -> Iterator[ResultForm | None]:
    at = 0
    while at < len(numbers):
        tensors = numbers[at]
        starts = range(at + 1, at + 1 + max(tensors, 0) * (1 + META_NUMBERS), 1 + META_NUMBERS)
        metas = tuple(TensorMeta.decode(numbers[n + 1 : n + 1 + META_NUMBERS]) for n in starts)
        yield None if tensors < 0 else ResultForm(metas, tuple(numbers[n] for n in starts))
        at += 1 + len(starts) * (1 + META_NUMBERS)
