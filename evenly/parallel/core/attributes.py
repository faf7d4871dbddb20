"""What the modules of a model have in attributes of their own, outside of its state."""

from __future__ import annotations

from collections.abc import Generator, Iterable
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


class NumbersAndWords:
    """Those that the modules keep in attributes, as they are now: plain values, which nobody changes in place."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found = [(vars(module), dict(vars(module))) for module in modules]

    @contextmanager
    def put_back(self) -> Generator[None]:
        """Within, the modules have these in place of what they have come to have since."""
        now = [(own, dict(own)) for own, _ in self._found]
        self.restore()
        try:
            yield
        finally:
            for own, values in now:
                _restore(own, values)

    def restore(self) -> None:
        """Gives them back, and drops what was added since."""
        for own, values in self._found:
            _restore(own, values)


def _restore(own: dict[str, Any], values: dict[str, Any]) -> None:
    for name in [name for name, value in own.items() if value is not values.get(name, own) and type(value) in PLAIN]:
        if name not in values:
            del own[name]
        elif type(values[name]) in PLAIN:
            own[name] = values[name]


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in _attributes(module).items() if isinstance(value, PLAIN)}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
