"""What operations cost, counted as torch runs them, with or without numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from evenly.data.nest import tensors_in

_aten = torch.ops.aten
# Of torch's flop counter, on a GPU: it does not know the CPU's kernel.
_ATTENTION_ON_CPU = _aten._scaled_dot_product_flash_attention_for_cpu.default


# What makes a tensor and neither reads nor writes one, beside views.
_MAKES_ONLY = {
    _aten._unsafe_view,
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


def moves_bytes(func: Any) -> bool:
    """Whether an operation reads or writes memory: not a view, nor a question such as on which device a tensor is."""
    return not func.is_view and func.namespace != "prim" and func.overloadpacket not in _MAKES_ONLY


class CostCounter(TorchDispatchMode):
    """Counts the operations that run within it.

    flops: of matrix products, convolutions and attention. moved_bytes: read and written by all operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not moves_bytes(func):
            return result
        self.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, kwargs, result)))
        if func is _ATTENTION_ON_CPU:
            query, key = args[0], args[1]
            self.flops += 4.0 * math.prod(query.shape[:-1]) * key.shape[-2] * query.shape[-1]
        elif (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result
