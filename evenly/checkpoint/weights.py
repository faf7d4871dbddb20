"""Pretrained weights: the tensors of safetensors files, read straight into each rank's part of a model.

Under a plan that splits the model, a rank reads of every large tensor only the slice that it keeps while the model is
composed (`ShardedInit`), so that the ranks together read the files once. What is small, and the model of a plan that
does not split it, every rank reads whole, a few megabytes at a time. Nothing is unpickled.

Names are those of the model's `state_dict`; of tied weights one name is enough. Where the model holds another one in an
attribute, as `self.net`, the names of the files may lack the `net.` that all of its own begin with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenly.checkpoint.export import FLOATS, INDEX
from evenly.checkpoint.manifest import Unsound, first_of
from evenly.checkpoint.pieces import Piece, pieces_in, read_elements, size_bytes
from evenly.checkpoint.ranks import Ranks
from evenly.comm.world import World
from evenly.errors import UserError
from evenly.job import PICKLES, TO_CONVERT
from evenly.parallel.core.sharded_init import BYTES_AT_ONCE, ShardedInit
from evenly.torch_private import memory_key, plain_name

ONE_FILE = "model.safetensors"
SAMPLES, SAMPLE_BYTES = 16, 4096  # of each file, that the ranks compare
NAMED = 100  # of the tensors that do not fit, in a message
Pieces = Mapping[str, Piece]


@dataclass(frozen=True)
class _Match:
    """A tensor of the model, under all its names, and the piece that it gets its values from."""

    names: tuple[str, ...]
    tensor: Tensor
    piece: Piece


def find_weights(path: Path) -> dict[str, Piece]:
    """name -> piece, of all tensors of the file or folder `path`. Raises `UserError` for what is not safetensors."""
    asked = f"weights={str(path)!r}"
    try:
        files = _files(asked, path)
        found = {file: pieces_in(file) for file in dict.fromkeys(files.values())} if files else {path: pieces_in(path)}
    except Unsound as reason:
        raise UserError(asked, str(reason), "download or save these weights again") from None
    if not files:
        pieces = found[path]
    else:
        lacking = [f"{name} is not in {file.name}" for name, file in files.items() if name not in found[file]]
        if lacking:
            raise UserError(asked, f"its index is of other files: {first_of(lacking)}", "save these weights again")
        pieces = {name: found[file][name] for name, file in files.items()}
    if any(any(piece.offsets) for piece in pieces.values()):
        raise UserError(
            asked, "its files hold parts of tensors, as a checkpoint does", "give what evenly export makes of the run"
        )
    return pieces


def load_weights(path: Path, world: World) -> Callable[[nn.Module, ShardedInit | None], None]:
    """What fills a model, just built, from the files of `path`; both are collectives.

    Raises `UserError`, on all ranks alike, where a rank does not find them, or other ones than the first rank.
    """
    ranks, asked = Ranks(world.group("files")), f"weights={str(path)!r}"
    pieces: dict[str, Piece] = {}

    def find() -> str:
        pieces.update(find_weights(path))
        return _fingerprint(pieces.values())

    prints = ranks.together(asked, find)
    for rank, found in enumerate(prints):
        if found != prints[0]:
            raise UserError(asked, f"rank {rank} finds other files there than rank 0", "give all the same files")

    def load(model: nn.Module, init: ShardedInit | None) -> None:
        matches: list[_Match] = []
        ranks.together(asked, lambda: matches.extend(match(asked, model, pieces)))
        ranks.first(asked, lambda: _check_ties(asked, matches, pieces))
        ranks.together(asked, lambda: _fill(matches, init))

    return load


def check_weights(path: Path, model: nn.Module) -> None:
    """Raises `UserError` where the files of `path` do not fit `model`, which may be without memory."""
    match(f"weights={str(path)!r}", model, find_weights(path))


def match(asked: str, model: nn.Module, pieces: Pieces) -> list[_Match]:
    """For every tensor of the model's state the piece with its values. Raises `UserError` that lists all misfits."""
    tensors = _state(model)
    prefix = _prefix([name for names, _ in tensors for name in names], pieces)
    given = {prefix + name: piece for name, piece in pieces.items()}
    expected = {name for names, _ in tensors for name in names}
    problems: list[str] = []
    matches: list[_Match] = []
    for names, tensor in tensors:
        found = [given[name] for name in names if name in given]
        if not found or not isinstance(tensor, Tensor):
            problems.append(f"{names[0]} is missing")
        else:
            matches.append(_Match(names, tensor, found[0]))
            problems += [_misfit(name, tensor, given[name]) for name in names if name in given]
    problems += [f"{name.removeprefix(prefix)} is not in the model" for name in given if name not in expected]
    if problems := [*filter(None, problems)]:
        raise UserError(
            asked,
            f"it is not of this model: {first_of(problems, NAMED)}",
            "give the weights of this model, or load in `model=` what only a part of it starts from",
        )
    return matches


def _files(asked: str, path: Path) -> dict[str, Path]:
    """The file of each tensor, by an index; empty where `path` is a file itself, or raises `UserError`."""
    if path.name.endswith(".index.json"):
        return _indexed(asked, path)
    if path.is_file():
        if path.suffix != ".safetensors":
            kind = "a pickle" if path.suffix in PICKLES else "no file of safetensors"
            raise UserError(asked, f"it is {kind}", TO_CONVERT)
        return {}
    if not path.is_dir():
        raise UserError(asked, "there is no such file or folder", "give one that all ranks see")
    if (path / INDEX).exists():
        return _indexed(asked, path / INDEX)
    files = [path / ONE_FILE] if (path / ONE_FILE).exists() else sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise UserError(asked, f"it has {len(files)} files of safetensors and no {INDEX}", "give one of the files")
    if not files:
        pickles = sorted(one.name for one in path.iterdir() if one.suffix in PICKLES)
        found = f"it holds pickles alone ({pickles[0]})" if pickles else "it holds no safetensors"
        raise UserError(asked, found, TO_CONVERT)
    return dict.fromkeys(pieces_in(files[0]), files[0])


def _indexed(asked: str, index: Path) -> dict[str, Path]:
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: index.parent / file for name, file in places.items()}
        outside = [file for file in places.values() if Path(file).name != file]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(asked, f"{index.name} is malformed ({error})", "save these weights again") from None
    if outside:
        raise UserError(asked, f"{index.name} names {outside[0]!r}", "keep all files in one folder")
    if not files:
        raise UserError(asked, f"{index.name} names no tensor", "save these weights again")
    return files


def _fingerprint(pieces: Iterable[Piece]) -> str:
    """Of the places and forms of all tensors, and of some bytes of each file: it tells other weights apart."""
    pieces = [*pieces]
    hashed = hashlib.blake2b(repr([(p.path.name, p.start, p.form) for p in pieces]).encode())
    for path in dict.fromkeys(piece.path for piece in pieces):
        size = path.stat().st_size
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(size * number // SAMPLES)
                hashed.update(file.read(SAMPLE_BYTES))
    return hashed.hexdigest()


def _state(model: nn.Module) -> list[tuple[tuple[str, ...], Any]]:
    """(all names, value) of everything in the model's state, that which is tied once."""
    found: dict[object, tuple[list[str], Any]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(_identity(value), ([], value))[0].append(plain_name(name))
    return [((*names,), value) for names, value in found.values()]


def _identity(value: Any) -> object:
    """Equal for tensors that are the same numbers in the same memory."""
    if not isinstance(value, Tensor) or value.numel() == 0:
        return id(value)
    return memory_key(value), value.storage_offset(), value.dtype, value.shape, value.stride()


def _prefix(names: Sequence[str], pieces: Pieces) -> str:
    parts = names[0].split(".") if names else [""]
    prefixes = ["".join(f"{part}." for part in parts[:count]) for count in range(len(parts))]
    known = set(names)
    return max(prefixes, key=lambda prefix: sum(prefix + name in known for name in pieces))


def _misfit(name: str, tensor: Tensor, piece: Piece) -> str:
    """What keeps the values of `piece` from being those of `tensor`; '' for nothing."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if shape != piece.form.shape:
        return f"{name} is {piece.form} in the file, {dtype}{list(shape)} in the model"
    if dtype != piece.form.dtype and not (dtype in FLOATS and piece.form.dtype in FLOATS):
        return f"{name} is of {piece.form.dtype} in the file, of {dtype} in the model"
    return ""


def _check_ties(asked: str, matches: Iterable[_Match], pieces: Pieces) -> None:
    """Raises `UserError` where tied weights are in the files under several names with several values."""
    prefix_free = {piece: name for name, piece in pieces.items()}
    for one in matches:
        others = [pieces[name] for name in one.names if name in pieces and pieces[name] != one.piece]
        for other in others:
            if not _same(one.piece, other):
                found = f"{prefix_free[one.piece]} and {prefix_free[other]} differ, which the model has tied"
                raise UserError(asked, found, "give weights that agree, or a model that does not tie them")


def _same(one: Piece, other: Piece) -> bool:
    if one.form != other.form:
        return False
    return all((read_elements(one, *part) == read_elements(other, *part)).all() for part in _parts(one))


def _parts(piece: Piece) -> Iterable[tuple[int, int]]:
    """Runs of elements that are read at once."""
    count = max(1, torch.Size(piece.form.shape).numel())
    step = max(1, BYTES_AT_ONCE * count // max(1, size_bytes(piece.form)))
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _fill(matches: Iterable[_Match], init: ShardedInit | None) -> None:
    with torch.no_grad():
        for one in matches:
            if init is None or not init.write(one.tensor, partial(_bytes, one)):
                _copy(one.tensor, one.piece)


def _bytes(one: _Match, first: int, end: int) -> Tensor:
    element = one.tensor.itemsize
    begin = first // element
    values = _elements(one.piece, begin, -(-end // element)).to(one.tensor.dtype).view(torch.uint8)
    return values[first - begin * element : end - begin * element]


def _elements(piece: Piece, first: int, end: int) -> Tensor:
    content = torch.from_numpy(read_elements(piece, first, end))
    return content.view(getattr(torch, piece.form.dtype))


def _copy(tensor: Tensor, piece: Piece) -> None:
    if not tensor.numel():
        return
    if not tensor.is_contiguous():
        tensor.copy_(_elements(piece, 0, tensor.numel()).view(tensor.shape))
        return
    flat = tensor.view(-1)
    for first, end in _parts(piece):
        flat[first:end].copy_(_elements(piece, first, end))
