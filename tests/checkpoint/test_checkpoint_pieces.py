"""The pieces of a tensor make up the whole: none is missing, none lies over another."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from evenly.checkpoint.manifest import TensorForm, Unsound
from evenly.checkpoint.pieces import find_pieces, read_tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, shape


def written(folder: Path, boxes: list[Box]) -> list[str]:
    """A file for each box of one tensor, as torch's distributed checkpoint has them; all bytes are the box's number."""
    for number, (offsets, shape) in enumerate(boxes):
        content = bytes([number]) * int(np.prod(shape))
        row = {"dtype": "U8", "shape": shape, "data_offsets": [0, len(content)]}
        places = json.dumps({"w": {"saved_offsets": offsets}})
        header = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": places}, "w": row}).encode()
        (folder / f"{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    return [f"{number}.safetensors" for number in range(len(boxes))]


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (4, 6))],
        [((0, 0), (1, 6)), ((1, 0), (3, 6))],
        [((0, 0), (4, 1)), ((0, 1), (4, 5)), ((4, 0), (0, 6))],
        [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (1, 3)), ((1, 3), (3, 3))],
    ],
)
def test_pieces_that_cover_a_tensor_are_found(boxes: list[Box], tmp_path: Path) -> None:
    form = TensorForm("uint8", (4, 6))
    pieces = find_pieces(tmp_path, written(tmp_path, boxes), {"w": form})["w"]
    whole = read_tensor(form, pieces)[..., 0]
    for number, (offsets, shape) in enumerate(boxes):
        part = whole[tuple(slice(at, at + n) for at, n in zip(offsets, shape, strict=True))]
        assert part.shape == shape and (part == number).all()


@pytest.mark.parametrize(
    ("boxes", "reason"),
    [
        ([((0, 0), (2, 6)), ((1, 0), (2, 6)), ((3, 5), (1, 1))], "parts are missing of w"),
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "its files and its manifest differ"),
        # As many elements as there are: twice the second row, and a hole in place of the third.
        ([((0, 0), (2, 6)), ((1, 0), (1, 6)), ((3, 0), (1, 6))], "parts overlap of w"),
        ([((0, 0), (4, 3)), ((0, 2), (2, 3)), ((2, 3), (2, 3))], "parts overlap of w"),
        ([((0, 0), (4, 3)), ((0, 2), (3, 3)), ((3, 3), (1, 3))], "parts overlap of w"),
    ],
)
def test_pieces_with_a_hole_are_refused(boxes: list[Box], reason: str, tmp_path: Path) -> None:
    with pytest.raises(Unsound, match=reason):
        find_pieces(tmp_path, written(tmp_path, boxes), {"w": TensorForm("uint8", (4, 6))})
