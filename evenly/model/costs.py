"""What operations cost, counted as torch runs them, of fake tensors too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from evenly.data.nest import tensors_in
from evenly.model import lstm
from evenly.torch_private import ATTENTION_BACKWARD_ON_CPU, ATTENTION_ON_CPU, UNSAFE_VIEW, TorchDispatchMode

_aten = torch.ops.aten
# Of torch's flop counter, on a GPU: it does not know the CPU's kernels. By (query, key) among the arguments.
_ATTENTION_ON_CPU = {ATTENTION_ON_CPU: (4.0, 0), ATTENTION_BACKWARD_ON_CPU: (10.0, 1)}


# What makes a tensor and neither reads nor writes one, besides views.
_MAKES_ONLY = {
    UNSAFE_VIEW,
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


def moves_bytes(func: Any) -> bool:
    """Whether an operation reads or writes memory: not a view, nor a query such as on which device a tensor is."""
    return not func.is_view and func.namespace != "prim" and func.overloadpacket not in _MAKES_ONLY


def flops_of(func: Any, args: Any, kwargs: Any, results: Any) -> float:
    """The operations of matrix products, convolutions, attention and LSTM layers; 0 for all else."""
    packet = func.overloadpacket
    if packet in _ATTENTION_ON_CPU:
        factor, first = _ATTENTION_ON_CPU[packet]
        query, key = args[first : first + 2]
        return factor * math.prod(query.shape[:-1]) * key.shape[-2] * query.shape[-1]
    if packet in (lstm.FORWARD, lstm.BACKWARD):
        return sum(work.flops * work.times for work in lstm.products(packet, args))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=results))


class CostCounter(TorchDispatchMode):
    """Counts the operations that run within it.

    flops: as of `flops_of`. moved_bytes: read and written by all operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(func, args, kwargs, result)
        return result

    def add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Counts an operation that has run."""
        if moves_bytes(func):
            moved = tensors_in((args, kwargs, result))
            self.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in moved)
            self.flops += flops_of(func, args, kwargs, result)
