"""What the modules of a model have in attributes of their own, outside of its state."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

PLAIN = (bool, int, float, str, type(None))


def own_attributes(model: nn.Module) -> dict[str, Any]:
    """What can be compared of them, and of the modules' children, by full name."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for name, value in (*_attributes(module).items(), *module.named_children()):
            size = len(value) if isinstance(value, (list, dict, set, tuple)) else 0  # pyright: ignore
            found[f"{prefix}.{name}".lstrip(".")] = value if isinstance(value, PLAIN) else (id(value), size)
    return found


@contextmanager
def attributes_restored(model: nn.Module) -> Generator[None]:
    """Undoes what is done within to plain values (numbers, words) and to children, such as a note of the first call."""
    before = [(module, _plain(module), dict(module.named_children())) for module in model.modules()]
    try:
        yield
    finally:
        for module, values, children in before:
            for name in _plain(module).keys() - values.keys():
                delattr(module, name)
            for name, value in (*values.items(), *children.items()):
                if getattr(module, name, None) is not value:
                    setattr(module, name, value)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in _attributes(module).items() if isinstance(value, PLAIN)}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
