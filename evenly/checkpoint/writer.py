"""One safetensors file, written from memory as it is and hashed on the way: no copy of it, and no second reading."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128

from evenly.checkpoint.manifest import FileRecord, TensorForm
from evenly.checkpoint.pieces import METADATA, OFFSETS, PLACES, TYPES, stored_type

PIECE_BYTES = 1 << 18  # hashed and written while it is in the processor's cache
FORMAT = {"DCP_VERSION": "1.0", "format": "pt"}  # what torch's distributed checkpoint writes


def form_of(tensor: Tensor) -> TensorForm:
    return TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def write_file(
    path: Path, tensors: Mapping[str, tuple[Tensor, Sequence[int]]], tick: Callable[[], None] = lambda: None
) -> FileRecord:
    """Writes and syncs a new file; what is in it.

    tensors: name -> contiguous tensor in CPU memory, and the offsets in the whole tensor at which it begins.
    tick: called whenever it gets on.
    Raises `OSError` where it cannot be written.
    """
    # The order of the safetensors library, by which each tensor is aligned to its elements.
    order = sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name))
    hashed, written = xxh3_128(), 0
    with path.open("xb", buffering=0) as file:
        for block in (_header(tensors, order), *(_bytes_of(tensors[name][0]) for name in order)):
            for begin in range(0, len(block), PIECE_BYTES):
                piece = block[begin : begin + PIECE_BYTES]
                hashed.update(piece)
                while piece:
                    sent = file.write(piece)
                    written, piece = written + sent, piece[sent:]
                    tick()
        os.fsync(file.fileno())
    return FileRecord(written, hashed.hexdigest())


def _header(tensors: Mapping[str, tuple[Tensor, Sequence[int]]], order: Sequence[str]) -> memoryview:
    places = {name: {OFFSETS: list(tensors[name][1])} for name in order}
    header: dict[str, object] = {METADATA: {PLACES: json.dumps(places), **FORMAT}}
    end = 0
    for name in order:
        form = form_of(tensors[name][0])
        kind = stored_type(form)
        begin, end = end, end + math.prod(form.shape) * TYPES[kind][1]
        header[name] = {"dtype": kind, "shape": list(form.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(struct.pack("<Q", len(text)) + text)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().reshape(-1)
    # A tensor of one element may have any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
