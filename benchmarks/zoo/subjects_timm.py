"""Subjects of timm: one model of each family, which is a file of its models, made small by what `timm.toml` says."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import samples
import torch
from samples import Shapes

TABLE = Path(__file__).with_name("timm.toml")
CLASSES = 8
SIZES = (64, 96, 128, 224)


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def names() -> Collection[str]:
    """The families."""
    return _table().keys()


def build(name: str) -> torch.nn.Module:
    """The model of a family."""
    import timm

    entry = {key: _tuples(value) for key, value in _table()[name].items()}
    entry.pop("size", None)
    if "class" in entry:
        cls = getattr(importlib.import_module(f"timm.models.{name}"), entry.pop("class"))
        return cls(num_classes=CLASSES, **entry)
    return timm.create_model(entry.pop("model"), pretrained=False, num_classes=CLASSES, **entry)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def batches(name: str) -> Iterator[Shapes]:
    """Images, of the stated size or of the first that fits."""
    entry = _table()[name]
    stated = entry.get("img_size", entry.get("size"))
    for side in (_side(stated),) if stated else SIZES:
        yield {"image": ("float", (3, side, side), 0), "label": ("class", (), CLASSES)}


def _side(stated: int | list[int]) -> int:
    return stated if isinstance(stated, int) else stated[0]


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The cross entropy of the class; of a model that returns something else, the mean of a bounded function."""
    outputs = model(batch["image"])
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2:
        return torch.nn.functional.cross_entropy(outputs, batch["label"])
    return samples.bounded(outputs)


def head(name: str) -> str:
    """What a family is trained for."""
    return "IMAGE_CLASSIFICATION"


def avoided(name: str) -> frozenset[int]:
    """Nothing: no tokens are drawn."""
    return frozenset()


def experts(name: str) -> int:
    """None has experts."""
    return 0
