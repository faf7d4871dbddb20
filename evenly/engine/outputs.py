"""Outputs of an evaluation: what a loss gives of every sample, gathered in the order of the evaluation's samples.

A nest of tuples, mappings and dataclasses, whose leaves have the samples of a microbatch: tensors in their first dim,
lists as their items. Leaves of consecutive microbatches are joined; what has no samples is no leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from evenly.data.nest import map_tensors
from evenly.errors import RunError

ASKED = "the outputs of a loss must have the samples of the microbatch in their first dim, or be lists of one item each"


def on_cpu(nest: Any, samples: int, whole: Callable[[torch.Tensor], Any]) -> Any:
    """The outputs of a microbatch of so many `samples`, copied to the CPU.

    whole: of a tensor of which this rank may have a part, called in the order of the nest. Raises `RunError` where a
    leaf has other samples.
    """
    if nest is None:
        raise RunError(
            "the job's evaluate needs the outputs of a loss",
            "in an evaluation the loss returned none",
            "return Loss(total, weight, outputs=(predictions, labels))",
        )
    found = map_tensors(lambda tensor: whole(tensor.detach()).to("cpu", copy=True), nest)
    for path, leaf in leaves(found):
        counted = leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.dim() else None
        counted = len(leaf) if isinstance(leaf, list) else counted
        if counted != samples:
            what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"{leaf!r:.80}"
            raise RunError(
                ASKED,
                f"of a microbatch of {samples} samples {path or 'outputs'} is {what}",
                "give predictions, not sums: sums are metrics",
            )
    return found


def leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a nest that is no tuple, mapping or dataclass, with its path, such as `0.labels`."""
    parts = _parts(nest)
    if parts is None:
        yield path, nest
        return
    for key, value in parts.items():
        yield from leaves(value, f"{path}.{key}".lstrip("."))


def _parts(nest: Any) -> dict[Any, Any] | None:
    if isinstance(nest, Mapping):
        return dict(nest)
    if isinstance(nest, tuple):
        return dict(enumerate(nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest) if field.init}
    return None


def joined_outputs(parts: Sequence[Any], path: str = "") -> Any:
    """The outputs of a whole evaluation from those of its microbatches in order.

    path: of these in the nest. Raises `RunError` where they do not fit together.
    """
    nests = [_parts(part) for part in parts]
    if nests[0] is None or None in nests:
        return _joined(path, parts)
    for number, nest in enumerate(nests):
        if nest is None or nest.keys() != nests[0].keys():
            raise _unlike(f"{path or 'outputs'} of microbatch {number} does not have the parts of microbatch 0")
    return _rebuilt(
        parts[0],
        {key: joined_outputs([nest[key] for nest in nests if nest], f"{path}.{key}".lstrip(".")) for key in nests[0]},
    )


def _joined(path: str, column: Sequence[Any]) -> Any:
    if any(type(leaf) is not type(column[0]) for leaf in column):
        raise _unlike(f"{path or 'outputs'} is a {type(column[0]).__name__} in one microbatch, and none in another")
    if isinstance(column[0], list):
        return [item for leaf in column for item in leaf]
    kinds = {(tuple(tensor.shape[1:]), tensor.dtype) for tensor in column}
    if len(kinds) > 1:
        shapes = " and ".join(sorted(f"{list(shape)} ({dtype})" for shape, dtype in kinds)[:2])
        raise _unlike(f"{path or 'outputs'} has samples of {shapes}")
    return torch.cat([*column])


def _unlike(found: str) -> RunError:
    return RunError(
        "the outputs of all microbatches of an evaluation are joined",
        found,
        "give all samples one shape, or a list of one tensor per sample, such as [*predictions]",
    )


def _rebuilt(nest: Any, values: Mapping[Any, Any]) -> Any:
    """`nest` with other parts, by their keys."""
    kind: Any = type(nest)
    if isinstance(nest, Mapping):
        return kind(values)
    if isinstance(nest, tuple):
        return kind(*values.values()) if hasattr(nest, "_fields") else kind(values.values())
    return dataclasses.replace(nest, **values)
