"""What a process has imported before its work begins: collections of garbage pass over it no more.

One that looks at all that comes with torch takes a tenth of a second, and makes copies of the memory that ranks share.
"""

from __future__ import annotations

import gc
from functools import lru_cache
from typing import Any

_KIND = type(lru_cache(len))
_caches: list[Any] = []  # `gc` does not show what is frozen


def freeze_imports() -> None:
    """Has collections leave alone all objects that there are."""
    _caches.extend(_tracked())
    gc.freeze()


def all_caches() -> list[Any]:
    """Every `functools.lru_cache` of this process."""
    return [*_caches, *_tracked()]


def _tracked() -> list[Any]:
    return [one for one in gc.get_objects() if type(one) is _KIND]
