"""The tensors of a checkpoint as bytes: where their pieces are in its files, and one whole tensor at a time.

A safetensors file is eight bytes of length, that many bytes of JSON (name -> type, shape, place), then the tensors'
bytes. Of a tensor whose pieces several ranks wrote, torch's distributed checkpoint notes in each file at which offsets
of the whole its piece begins. No torch here, and no process group: only the requested tensor is in memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from evenly.checkpoint.manifest import TensorForm, Unsound, differences, first_of

METADATA, PLACES, OFFSETS = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"
HEADER_BYTES = 100_000_000  # the most that safetensors reads
# Name in safetensors -> name in torch, bytes of one element.
TYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
NAMES = {name: stored for stored, (name, _) in TYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: `form.shape` elements from `offsets` of the whole on, at byte `start` of the file `path`."""

    path: Path
    start: int
    offsets: tuple[int, ...]
    form: TensorForm


def stored_type(form: TensorForm) -> str:
    return NAMES[form.dtype]


def size_bytes(form: TensorForm) -> int:
    return math.prod(form.shape) * TYPES[NAMES[form.dtype]][1]


def find_pieces(folder: Path, files: Iterable[str], forms: Mapping[str, TensorForm]) -> dict[str, list[Piece]]:
    """name -> pieces, of all tensors in the files. Raises `Unsound` unless they make up those of `forms`, all whole."""
    found: dict[str, list[Piece]] = {}
    for file in sorted(files):
        for name, piece in pieces_in(folder / file).items():
            found.setdefault(name, []).append(piece)
    wrong = differences({name: _complete_form(pieces) for name, pieces in found.items()}, forms)
    if wrong:
        raise Unsound(f"its files and its manifest differ: {first_of(wrong)}")
    elements = {name: sum(math.prod(piece.form.shape) for piece in found[name]) for name in forms}
    torn = [name for name, form in forms.items() if elements[name] != math.prod(form.shape)]
    if torn:
        raise Unsound(f"parts are missing of {first_of(torn)}")
    # As many elements as there are, none twice: then none is missing.
    twice = [name for name in forms if _overlap(found[name])]
    if twice:
        raise Unsound(f"parts overlap of {first_of(twice)}")
    return found


def _overlap(pieces: Sequence[Piece]) -> bool:
    """Whether two of the boxes, which have the same number of dims, share an element."""
    if len(pieces) == 1:
        return False
    starts = np.array([piece.offsets for piece in pieces])
    ends = starts + np.array([piece.form.shape for piece in pieces])
    return any(
        bool(((starts[n] < ends[n + 1 :]) & (starts[n + 1 :] < ends[n])).all(1).any()) for n in range(len(pieces) - 1)
    )


def read_tensor(form: TensorForm, pieces: Sequence[Piece]) -> NDArray[np.uint8]:
    """The bytes of a tensor: an array of its shape and one dim more, which is of the bytes of one element.

    Raises `OSError` where a file cannot be read, or ends too early.
    """
    whole = np.empty((*form.shape, TYPES[NAMES[form.dtype]][1]), dtype=np.uint8)
    for piece in pieces:
        _read_into(whole, piece)
    return whole


def read_elements(piece: Piece, first: int, end: int) -> NDArray[np.uint8]:
    """The bytes of elements `first` to `end` of a piece, in its order. Raises `OSError` as `read_tensor` does."""
    element = TYPES[NAMES[piece.form.dtype]][1]
    content = np.empty((end - first) * element, dtype=np.uint8)
    with piece.path.open("rb") as file:
        file.seek(piece.start + first * element)
        if file.readinto(content.data) != content.nbytes:
            raise OSError(f"{piece.path.name} ends too early")
    return content


def pieces_in(path: Path) -> dict[str, Piece]:
    """The pieces of one file, by name. Raises `Unsound` for a malformed header."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, HEADER_BYTES):
                raise ValueError("its header is longer than the file may be")
            header = json.loads(file.read(length))
        places = json.loads(header.get(METADATA, {}).get(PLACES, "{}"))
        rows = {name: row for name, row in header.items() if name != METADATA}
        return {name: _piece(path, 8 + length, size, row, places.get(name)) for name, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise Unsound(f"the header of {path.name} is malformed ({error})") from None


def _piece(path: Path, base: int, size: int, row: Mapping[str, Any], place: Mapping[str, Any] | None) -> Piece:
    """The piece of one row of a header whose tensors' bytes begin at `base`; an error for what does not fit."""
    form = TensorForm(TYPES[row["dtype"]][0], _counts(row["shape"]))
    start, end = _counts(row["data_offsets"])
    if end - start != size_bytes(form) or base + end > size:
        raise ValueError(f"{form} from byte {start} to {end}")
    offsets = (0,) * len(form.shape) if place is None else _counts(place[OFFSETS])
    if len(offsets) != len(form.shape):
        raise ValueError(f"{form} at {offsets}")
    return Piece(path, base + start, offsets, form)


def _counts(values: object) -> tuple[int, ...]:
    numbers = cast("list[object]", values) if isinstance(values, list) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple(cast("list[int]", numbers))


def _complete_form(pieces: Sequence[Piece]) -> TensorForm:
    """The least form that holds all the pieces; of no type where theirs differ."""
    ends = [tuple(map(sum, zip(piece.offsets, piece.form.shape, strict=True))) for piece in pieces]
    types = {piece.form.dtype for piece in pieces}
    if len(types) > 1 or len({len(end) for end in ends}) > 1:
        return TensorForm("of several forms", ())
    return TensorForm(types.pop(), tuple(map(max, zip(*ends, strict=True))))


def _read_into(whole: NDArray[np.uint8], piece: Piece) -> None:
    corners = zip(piece.offsets, piece.form.shape, strict=True)
    box = whole[tuple(slice(offset, offset + size) for offset, size in corners)]
    # Whole tensors and blocks of rows are read where they belong; columns need memory of their own.
    landing = box if box.flags.c_contiguous else np.empty(box.shape, dtype=np.uint8)
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        if file.readinto(landing.data) != landing.nbytes:
            raise OSError(f"{piece.path.name} ends too early")
    if landing is not box:
        box[...] = landing
