"""What a process has imported before its work begins: collections of garbage pass over it no more.

One that looks at all that comes with torch takes a tenth of a second, and makes copies of the memory that ranks share.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

_KIND = type(lru_cache(len))
_caches: list[Any] = []  # `gc` does not show what is frozen


def freeze_imports() -> None:
    """Has collections leave alone all objects that there are."""
    _caches.extend(_tracked())
    gc.freeze()


@contextmanager
def importing() -> Generator[None]:
    """Within, which is to import much, no garbage is collected; what is there in the end is left alone from then on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        freeze_imports()
        if was_enabled:
            gc.enable()


def all_caches() -> list[Any]:
    return [*_caches, *_tracked()]


def _tracked() -> list[Any]:
    return [one for one in gc.get_objects() if type(one) is _KIND]
