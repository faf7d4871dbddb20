"""Plain Python values as JSON and back, exactly.

JSON has no tuple, no key but a string and no infinity; such a value is written as an object whose key
"$" names its kind: so are numbers of numpy, types of torch, and the names of tensors that are kept elsewhere. Whatever
has no form here is refused by the name of its place.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from evenly.errors import UserError

KIND = "$"


@dataclass(frozen=True)
class NamedTensor:
    """Reference to a tensor of a checkpoint by its name there."""

    name: str


@dataclass(frozen=True)
class SmallTensor:
    """Tensor among the options of an optimizer's group: type, numbers as lists, and whether it lies on the CPU."""

    dtype: str
    items: Any
    on_cpu: bool


def encode(value: object, where: str) -> Any:
    """`value` as JSON can hold it; `decode` is the inverse.

    where: the name of the value in the error.
    Raises `UserError` for all but None, bool, int, float, str, numbers and arrays of numpy, and lists, tuples, dicts
    and Counters of them.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {KIND: "number", "type": value.dtype.name, "value": encode(value.item(), where)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {KIND: "array", "type": value.dtype.name, "items": encode(value.tolist(), where)}
    if isinstance(value, NamedTensor):
        return {KIND: "tensor", "name": value.name}
    if isinstance(value, SmallTensor):
        return {KIND: "values", "dtype": value.dtype, "items": encode(value.items, where), "on_cpu": value.on_cpu}
    if (kind := f"{type(value).__module__}.{type(value).__name__}") == "torch.dtype":
        return {KIND: "dtype", "name": str(value).removeprefix("torch.")}
    if type(value) is list:
        return _encode_items(cast("list[object]", value), where)
    if type(value) is tuple or kind == "torch.Size":
        return {KIND: "tuple", "items": _encode_items(cast("tuple[object, ...]", value), where)}
    if type(value) is deque:
        items = _encode_items([*cast("deque[object]", value)], where)
        return {KIND: "deque", "items": items, "longest": cast("deque[object]", value).maxlen}
    if type(value) in (dict, Counter):
        return _encode_dict(cast("dict[object, object]", value), where)
    raise UserError(
        f"put {where} into a checkpoint",
        f"it is a {type(value).__name__}",
        "use numbers, text, lists, tuples and dicts there, or tensors where tensors are kept",
    )


def _encode_items(items: Sequence[object], where: str) -> list[Any]:
    return [encode(item, f"{where}[{i}]") for i, item in enumerate(items)]


def _encode_dict(value: dict[object, object], where: str) -> dict[str, Any]:
    if type(value) is dict and all(type(key) is str and key != KIND for key in value):
        return {str(key): encode(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {KIND: "counter" if isinstance(value, Counter) else "dict", "items": pairs}


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises `ValueError` for what `encode` never writes."""
    if isinstance(value, list):
        return [decode(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if KIND in fields:
        return _decode_kind(fields)
    return {key: decode(item) for key, item in fields.items()}


def _decode_kind(fields: dict[str, Any]) -> Any:
    try:
        match fields[KIND]:
            case "float":
                return float(fields["value"])
            case "number":
                return np.dtype(fields["type"]).type(decode(fields["value"]))
            case "array":
                return np.array(decode(fields["items"]), dtype=fields["type"])
            case "tensor":
                return NamedTensor(fields["name"])
            case "values":
                return SmallTensor(fields["dtype"], decode(fields["items"]), fields["on_cpu"])
            case "dtype":
                import torch

                return getattr(torch, fields["name"])
            case "tuple":
                return tuple(decode(item) for item in fields["items"])
            case "deque":
                return deque((decode(item) for item in fields["items"]), fields["longest"])
            case "dict":
                return {decode(key): decode(item) for key, item in fields["items"]}
            case "counter":
                return Counter({decode(key): decode(item) for key, item in fields["items"]})
            case kind:
                raise ValueError(f"unknown kind of value {kind!r}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"malformed value of kind {fields[KIND]!r}") from error


def merge(parts: Sequence[Any], where: str) -> Any:
    """One value from those of all ranks: dicts are united, everything else must be the same.

    Raises `ValueError` naming the first place where two ranks differ.
    """
    first = parts[0]
    if all(isinstance(part, dict) for part in parts):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: merge([part[key] for part in parts if key in part], f"{where}.{key}") for key in keys}
    if any(type(part) is not type(first) or part != first for part in parts):
        raise ValueError(f"the ranks disagree about {where}: {first!r} and others")
    return first
