"""WHICH sample WHEN: the global order, microbatches, shares, streams, and the loader that follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenly.data.packing import packed as packed

__all__ = ["packed"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name != "packed":
        raise AttributeError(f"module 'evenly.data' has no attribute {name!r}")
    from evenly.data.packing import packed  # which imports torch

    return packed
