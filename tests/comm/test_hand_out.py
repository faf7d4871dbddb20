"""Messages from the first rank to each of the others; what is packed comes out as it went in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks, group_of_all

from evenly.comm.hand_out import FIRST_BYTES, hand_out, packed, unpacked

LENGTHS = (0, 1, FIRST_BYTES, FIRST_BYTES + 1, 5 * FIRST_BYTES + 3)


def message(length: int, rank: int) -> bytes:
    return bytes((n + rank) % 251 for n in range(length))


def handed() -> list[bytes]:
    with group_of_all() as every, every.open("stream", range(every.size), backend="gloo") as group:
        first = group.position == 0
        return [bytes(hand_out([message(n, r) for r in range(group.size)] if first else None, group)) for n in LENGTHS]


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_its_own(size: int, ranks: KeptRanks) -> None:
    found = ranks.run(handed, size=size)
    assert found == [[message(length, rank) for length in LENGTHS] for rank in range(size)]


TENSORS = [
    torch.randn(3, 4, dtype=torch.float64),
    torch.tensor(True),
    torch.arange(6).view(2, 3).t(),
    torch.empty(0, 3, dtype=torch.int32),
    torch.randn(2, 2, dtype=torch.complex64).conj(),
    torch.randn(5).bfloat16(),
    torch.eye(3).to_sparse(),
]


@pytest.mark.parametrize(
    "tensor", TENSORS, ids=["float64", "scalar", "transposed", "empty", "conjugated", "bfloat16", "sparse"]
)
def test_a_tensor_is_packed_as_it_is(tensor: torch.Tensor) -> None:
    value: Any = {"x": [tensor, "text"], "y": (1.5, None)}
    found = unpacked(packed(value))
    (back, text), rest = found["x"], found["y"]
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and (text, rest) == ("text", (1.5, None))
    assert torch.equal(back.to_dense(), tensor.to_dense())
    back.zero_()  # its memory is its own
