"""The layout of a tensor in memory, which it keeps on its way to another stage.

Where its numbers lie decides what the code computes from them: a dropout draws its mask in the order of memory, and
`view` asks for it. A tensor is sent as its numbers in that order, each once, and laid out where it arrives as it is
where it was made: transposed, expanded, or with gaps between its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from evenly.comm.transport import is_plain


def packed_size(shape: Sequence[int], strides: Sequence[int]) -> int:
    return math.prod(_unexpanded(shape, strides))


def packed(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """The numbers of `tensor`, of one dim, in the order of memory that `strides` describe: by default its own.

    Those of a dim that is expanded come once.
    """
    if (strides is None or tensor.stride() == strides) and is_plain(tensor):  # most of all there is
        return tensor.as_strided((tensor.numel(),), (1,))
    strides = tensor.stride() if strides is None else strides
    for dim, size in enumerate(_unexpanded(tensor.shape, strides)):
        tensor = tensor.narrow(dim, 0, size)
    tensor = tensor.resolve_conj().resolve_neg().permute(_memory_order(strides)).contiguous()
    return tensor.as_strided((tensor.numel(),), (1,))  # `view` keeps the stride 0 of a single number


def laid_out(numbers: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The inverse of `packed`, in the memory of `numbers` where that layout has no gaps and nothing overlaps."""
    if _is_contiguous(shape, strides):
        return numbers.as_strided(shape, strides)
    once = _unexpanded(shape, strides)
    if not is_dense(once, strides):
        order = _memory_order(strides)
        spread = torch.empty_strided(once, strides, dtype=numbers.dtype, device=numbers.device)
        spread.permute(order).copy_(numbers.view([once[dim] for dim in order]))
        numbers = spread
    return numbers.as_strided(shape, strides)


def gradient_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a gradient of `tensor`: its own where it is dense, as autograd has it, else contiguous ones."""
    if is_dense(tensor.shape, tensor.stride()):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of that layout fills its memory without gaps, each number in a place of its own."""
    if _is_contiguous(shape, strides):
        return True
    expected = 1
    for dim in reversed(_memory_order(strides)):
        if shape[dim] != 1 and strides[dim] != expected:
            return 0 in shape  # nothing has any layout
        expected *= shape[dim]
    return True


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether numbers lie in the order of the dims, and nothing is expanded."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def _unexpanded(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [min(size, 1) if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]


def _memory_order(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])
