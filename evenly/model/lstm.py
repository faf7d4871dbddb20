"""The layer of an LSTM on the CPU, which torch hands to oneDNN as one operation: what it keeps and computes.

Without numbers torch runs it with an empty workspace, and its flop counter does not know it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from evenly.model.parts import OpCost

FORWARD = torch.ops.aten.mkldnn_rnn_layer
BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward
GATES = 4
_PAGE, _LINE = 4096, 64  # bytes


def with_workspace(results: tuple[torch.Tensor, ...], given: Any) -> tuple[torch.Tensor, ...]:
    """The results of the operation as it has them with numbers; `given` are its arguments."""
    output, hidden, cell, workspace = results
    size = workspace_bytes(*given[0].shape, hidden=hidden.shape[-1], itemsize=given[0].element_size())
    return output, hidden, cell, workspace.new_empty(size)


def workspace_bytes(steps: int, samples: int, width: int, *, hidden: int, itemsize: int) -> int:
    """What one direction of a layer keeps for its backward pass besides its results, with the room that this will need.

    steps, samples, width: of its input. Source: `set_offsets` and `get_good_ld` of oneDNN's src/cpu/rnn/rnn_utils.cpp:
    each kind of state has two layers of steps + 1 entries, and a page of its own to begin at.
    """
    widest = max(width, hidden)
    rows = [
        (steps, _row(GATES * hidden, itemsize)),
        (steps, _row(hidden, itemsize)),
        (2 * (steps + 1), _row(widest, itemsize)),  # what layers hand on
        (2 * (steps + 1), hidden * itemsize),  # cells
        # Their gradients are never narrower than float32.
        (2 * (steps + 1), _row(widest, 4)),
        (2 * (steps + 1), _row(widest, 4)),
        (2 * (steps + 1), hidden * 4),
    ]
    return sum(-(-count * samples * size // _PAGE) * _PAGE for count, size in rows)


def _row(elements: int, itemsize: int) -> int:
    """Bytes from one row to the next: whole cache lines, and one more where rows would share the same of a cache."""
    line = _LINE // itemsize
    length = -(-elements // line) * line
    return (length + line if length % 256 == 0 else length) * itemsize


def products(packet: Any, given: Any) -> Iterator[OpCost]:
    """The products of an operation of either pass: of the whole input at once, of the states step by step."""
    data, layer, state = given[:3]
    steps, samples, width = data.shape
    back = packet is BACKWARD  # by input and by weights
    for rows, inner, times in ((steps * samples, width, 1), (samples, state.shape[-1], steps)):
        yield OpCost(
            kind="matmul",
            flops=2.0 * rows * inner * layer.shape[0],
            moved_bytes=float((rows * (inner + layer.shape[0]) + inner * layer.shape[0]) * data.element_size()),
            rows=rows,
            inner=inner,
            columns=layer.shape[0],
            times=2 * times if back else times,
        )
