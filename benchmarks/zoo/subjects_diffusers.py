"""Subjects of diffusers: its denoisers and autoencoders, made small by what `diffusers.toml` says."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import samples
import torch
from samples import Shapes

TABLE = Path(__file__).with_name("diffusers.toml")


class Called(torch.nn.Module):
    """A model with the arguments that no batch holds."""

    def __init__(self, model: torch.nn.Module, given: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._given = given

    def forward(self, **batch: torch.Tensor) -> Any:
        """What the model returns."""
        return self.model(**batch, **self._given)


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def names() -> Collection[str]:
    """The classes."""
    return _table().keys()


def build(name: str) -> torch.nn.Module:
    """The model of a class."""
    import diffusers

    entry = dict(_table()[name])
    entry.pop("batch")
    given = entry.pop("given", None)
    model = getattr(diffusers, name)(**entry)
    return Called(model, given) if given else model


def batches(name: str) -> Iterator[Shapes]:
    """The stated batch."""
    yield {key: (kind, tuple(shape), *(most or [0])) for key, (kind, shape, *most) in _table()[name]["batch"].items()}


loss = samples.own_loss


def head(name: str) -> str:
    """Whether it denoises or encodes."""
    return "autoencoder" if "Autoencoder" in name or name == "VQModel" else "denoiser"


def avoided(name: str) -> frozenset[int]:
    """Nothing."""
    return frozenset()


def experts(name: str) -> int:
    """As many as its arguments state."""
    return _table()[name].get("num_experts", 0)
