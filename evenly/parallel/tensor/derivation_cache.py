"""Derivations cached in a folder, each under a key of all that it depends on.

The key covers the tree of modules with their classes and plain settings (head counts and the like), the source files
of these classes and of the loss, the parameters and their ties, shapes and types of the batch, and the versions of
torch and evenly. It does not cover code in other files that a model calls; a derivation that is out of date costs
communication, never a number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenly.data.nest import map_tensors
from evenly.parallel.tensor.splits import Derivation, ParameterSplit, SplitGroup

OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # and seen elsewhere, as far as they matter
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, type(None))


def cached(folder: Path, key: str, derive: Callable[[], Derivation]) -> Derivation:
    """The derivation that is cached in `folder` under `key`; else that of `derive`, which is then cached."""
    path = folder / f"{key}.json"
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):  # none, or none that is whole
        derivation = derive()
    own = path.with_suffix(f".{os.getpid()}")  # ranks may write at the same time
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(to_json(derivation), encoding="utf-8")
        own.replace(path)
    except OSError:  # a folder that cannot be written: to be derived again
        pass
    return derivation


def to_json(derivation: Derivation) -> str:
    """The inverse of `from_json`."""
    return json.dumps(dataclasses.asdict(derivation))


def from_json(text: str) -> Derivation:
    """The inverse of `to_json`; `ValueError`, `KeyError` or `TypeError` for another text."""
    fields: dict[str, Any] = json.loads(text)
    return Derivation(
        groups=tuple(_group(one) for one in fields["groups"]),
        elements=fields["elements"],
        aliases=fields["aliases"],
        forbidden={name: tuple(reasons) for name, reasons in fields["forbidden"].items()},
    )


def _group(fields: dict[str, Any]) -> SplitGroup:
    fields["parameters"] = tuple(ParameterSplit(**one) for one in fields["parameters"])
    fields["sums"] = tuple(fields["sums"])
    return SplitGroup(**fields)


def key_of(model: nn.Module, loss: Callable[..., Any], batch: Any) -> str:
    """The hash of everything that the derivation of `loss(model, batch)` depends on; the same in every process."""
    digest = hashlib.sha256()
    for line in _lines(model, loss, batch):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def _lines(model: nn.Module, loss: Callable[..., Any], batch: Any) -> Iterator[str]:
    here = Path(__file__).parent
    yield _digest(*sorted(here.glob("*.py")), *sorted((here.parents[1] / "model").glob("*.py")))
    seen: dict[int, int] = {}
    homes: dict[str, None] = {"torch": None, loss.__module__: None}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        homes[kind.__module__] = None
        yield f"{name} {kind.__module__}.{kind.__qualname__} {_settings(module, seen)}"
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        same_as = seen.setdefault(id(tensor), len(seen))
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad} {same_as}"
    shapes: list[str] = []
    map_tensors(lambda tensor: _noted(tensor, shapes), batch)
    yield " ".join(shapes)
    yield getattr(loss, "__qualname__", type(loss).__qualname__)
    for home in homes:
        package = sys.modules.get(home.partition(".")[0])
        yield f"{home} {getattr(package, '__version__', '')} {_source(home)}"


def _noted(tensor: torch.Tensor, shapes: list[str]) -> torch.Tensor:
    shapes.append(f"{tuple(tensor.shape)} {tensor.dtype}")
    return tensor


def _settings(owner: object, seen: dict[int, int], depth: int = 2) -> str:
    """The plain attributes of a module, and of objects that it holds (its configuration), each of those once."""
    parts: list[str] = []
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, nn.Module | torch.Tensor) or name in OF_EVERY_MODULE or "hash" in name:
            continue  # Python's hashes differ from process to process
        if _is_plain(value):
            parts.append(f"{name}={value!r}")
        elif callable(value):
            parts.append(f"{name}={getattr(value, '__qualname__', type(value).__qualname__)}")
        elif depth and hasattr(value, "__dict__"):
            first = id(value) not in seen
            at = seen.setdefault(id(value), len(seen))
            parts.append(f"{name}=#{at}" + (f"({_settings(value, seen, depth - 1)})" if first else ""))
    return " ".join(parts)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN)


@cache
def _source(home: str) -> str:
    """A digest of the file that a module of Python was read from."""
    path = getattr(sys.modules.get(home), "__file__", None)
    return _digest(Path(path)) if path else ""


@cache
def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in files if path.is_file())).hexdigest()
