"""The manifest of a checkpoint: what it holds, how large every file is and what it hashes to.

Pure: text in, a `Manifest` out, every field checked by hand. The last field is a digest of all others,
so that a manifest that was changed afterwards is seen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from xxhash import xxh3_128

T = TypeVar("T")

FORMAT = "evenly-checkpoint"
VERSION = 2
MODEL, OPTIMIZER, AVERAGE = "model.", "optimizer.", "average."  # what names of tensors begin with
# A plain name in the checkpoint's own folder: no separator, no leading dot.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Unsound(Exception):
    """A checkpoint that must not be loaded; the message is the reason."""


@dataclass(frozen=True)
class TensorForm:
    """Type and global shape of a tensor; `dtype` as torch names it, without "torch."."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class FileRecord:
    """Size and XXH3 hash of 128 bits (hex) of one file: it finds damage, at the speed of memory."""

    size_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """Everything about one checkpoint but the tensors' numbers.

    score:   evaluation loss at this step, if there was an evaluation; lower is better.
    files:   file name -> record.
    tensors: name -> form.
    values:  plain values in the form of `plain.encode`.
    """

    step: int
    score: float | None
    files: dict[str, FileRecord]
    tensors: dict[str, TensorForm]
    values: dict[str, Any]


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON; `from_text` is the inverse."""
    fields = _fields(manifest)
    return json.dumps({**fields, "digest": _digest(fields)}, indent=1, allow_nan=False) + "\n"


def fingerprint(manifest: Manifest) -> str:
    """Equal for equal manifests, on every rank."""
    return _digest(_fields(manifest))


def from_text(text: str) -> Manifest:
    """Raises `Unsound` with the reason for anything that `to_text` did not write, or not in this version."""
    fields = _parse(text)
    _need(fields.get("format") == FORMAT, f"its manifest is not of the format {FORMAT!r}")
    version = fields.get("version")
    _need(_is_count(version), "the version in its manifest is not a number")
    _need(version == VERSION, f"it has format version {version}, this evenly reads {VERSION}")
    digest = fields.pop("digest", None)
    _need(
        isinstance(digest, str) and digest == _digest_or_none(fields),
        "its manifest was altered: the digest in it does not agree",
    )
    return _checked(fields)


def hash_file(path: Path) -> str:
    """XXH3 of a file's content, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def differences(saved: Mapping[str, TensorForm], wanted: Mapping[str, TensorForm]) -> list[str]:
    found = [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
    found += [f"{name} is in the checkpoint only" for name in saved if name not in wanted]
    both = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    return found + [f"{name} is {saved[name]} in the checkpoint, {wanted[name]} here" for name in both]


def first_of(phrases: list[str], most: int = 3) -> str:
    more = len(phrases) - most
    return "; ".join(phrases[:most]) + (f"; and {more} more" if more > 0 else "")


def _fields(manifest: Manifest) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, **asdict(manifest)}


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _digest_or_none(fields: Mapping[str, Any]) -> str | None:
    try:
        return _digest(fields)
    except (ValueError, RecursionError):  # a number too large for a float reads as infinity
        return None


def _parse(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Unsound(f"its manifest is not JSON ({error})") from None
    _need(isinstance(fields, dict), "its manifest is not a JSON object")
    return cast("dict[str, Any]", fields)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _checked(fields: dict[str, Any]) -> Manifest:
    score = fields.get("score")
    _need(_is_count(fields.get("step")), "the step in its manifest is not a whole number")
    _need(score is None or type(score) in (int, float), "the score in its manifest is not a number")
    values = fields.get("values")
    _need(isinstance(values, dict), "the values in its manifest are not an object")
    return Manifest(
        step=fields["step"],
        score=score,
        files=_table(fields, "files", _file_record),
        tensors=_table(fields, "tensors", _tensor_form),
        values=cast("dict[str, Any]", values),
    )


def _table(fields: dict[str, Any], table: str, read: Callable[[str, dict[str, Any]], T]) -> dict[str, T]:
    _need(isinstance(fields.get(table), dict), f"the {table} in its manifest are not an object")
    rows = cast("dict[str, Any]", fields[table])
    _need(all(isinstance(row, dict) for row in rows.values()), f"the {table} in its manifest are malformed")
    return {name: read(name, row) for name, row in rows.items()}


def _file_record(name: str, row: dict[str, Any]) -> FileRecord:
    _need(
        FILE_NAME.fullmatch(name) is not None,
        f"its manifest names the file {name!r}, which is no name of a checkpoint file",
    )
    size, hashed = row.get("size_bytes"), row.get("xxh3")
    _need(_is_count(size) and isinstance(hashed, str), f"the record of {name} in its manifest is malformed")
    return FileRecord(cast("int", size), cast("str", hashed))


def _tensor_form(name: str, row: dict[str, Any]) -> TensorForm:
    dtype, shape = row.get("dtype"), row.get("shape")
    sound = isinstance(dtype, str) and DTYPE_NAME.fullmatch(dtype) and isinstance(shape, list)
    _need(bool(sound), f"the form of {name} in its manifest is malformed")
    sizes = cast("list[Any]", shape)
    _need(all(_is_count(size) for size in sizes), f"the shape of {name} in its manifest is malformed")
    return TensorForm(cast("str", dtype), tuple(sizes))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsound(reason)
