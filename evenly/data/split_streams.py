"""Streams that are split by rank before anybody reads them: seen by what each rank's own holds.

Rank 0 reads the stream of a job for all, so that of a stream of which every rank has made its part, the parts of the
others would be left out. Ranks run the same code: what they hold of a stream is the same, but for what was made of the
rank. That is looked for where it shows: a number that is the rank's own on each, lists of texts (files, shards) of
which no two ranks share any, and what `datasets` notes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

OBJECTS = 2000  # of a stream that are looked at
PARTS = 100  # of an object
TEXTS = 1000  # of a list
BY_NODE = "distributed.world_size"  # where a dataset of `datasets` has in how many parts it was split
NO_DIGITS = str.maketrans("", "", "0123456789")
Held = Mapping[str, "int | list[str]"]


def held_by(stream: Any) -> dict[str, int | list[str]]:
    found: dict[str, int | list[str]] = {}
    seen: set[int] = set()
    to_see = deque[tuple[str, Any]]([("", stream)])
    while to_see and len(seen) < OBJECTS:
        path, one = to_see.popleft()
        if isinstance(one, int) and not isinstance(one, bool):
            found[path] = one
        elif texts := _texts(one):
            found[path] = texts
        elif id(one) not in seen:
            seen.add(id(one))
            parts = islice(_parts(one), PARTS)
            to_see += [(".".join(filter(None, (path, name))), part) for name, part in parts]
    return found


def split_path(ranks: Sequence[Held]) -> str:
    """The path of what was made of the rank, where each of `ranks` holds such; else ''."""
    if len(ranks) < 2:
        return ""
    for path, first in ranks[0].items():
        if path.endswith(BY_NODE) and first != 1:
            return path
        values = [held.get(path) for held in ranks]
        if isinstance(first, int):
            if values == [*range(len(ranks))]:
                return path
        elif all(isinstance(one, list) and one for one in values):
            texts = [set(one) for one in values if isinstance(one, list)]
            if len(set[str]().union(*texts)) == sum(map(len, texts)) and not _are_copies(texts):
                return path
    return ""


def _are_copies(ranks: Sequence[set[str]]) -> bool:
    """Whether each rank has files of the same names and sizes in a folder of its own, which has no number of the rank
    but a name by chance (`tempfile.mkdtemp`): every rank has made them all.
    """
    names = [{text.rpartition("/")[2] for text in texts} for texts in ranks]
    without_digits = [{text.translate(NO_DIGITS) for text in texts} for texts in ranks]
    return all(one == names[0] for one in names) and all(one != without_digits[0] for one in without_digits[1:])


def _texts(one: Any) -> list[str]:
    """The first items of a list, where they are texts; else none."""
    items: list[Any] = [*one[:TEXTS]] if isinstance(one, list | tuple) else []  # pyright: ignore
    return [*map(_with_size, items)] if all(isinstance(item, str) for item in items) else []


def _with_size(text: str) -> str:
    """The path of a file with its size in bytes, any other text as it is."""
    try:
        return f"{text} {Path(text).stat().st_size}" if "/" in text else text
    except (OSError, ValueError):
        return text


def _parts(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, type | ModuleType | str | bytes) or hasattr(one, "dtype"):
        return
    if isinstance(one, Mapping):
        yield from ((str(key), part) for key, part in one.items())  # pyright: ignore
    elif isinstance(one, list | tuple):
        yield from ((str(number), part) for number, part in enumerate(one))  # pyright: ignore
    elif isinstance(one, FunctionType):
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            yield from ((name, part) for part in _content(cell))
        yield from ((f"default {number}", part) for number, part in enumerate(one.__defaults__ or ()))
    elif isinstance(one, MethodType):
        yield "", one.__self__
    elif isinstance(one, partial):
        yield from {"": one.func, "args": one.args, "keywords": one.keywords}.items()  # pyright: ignore
    else:
        yield from getattr(one, "__dict__", {}).items()


def _content(cell: Any) -> Iterator[Any]:
    """What a closure holds under a name; nothing before it was set."""
    try:
        yield cell.cell_contents
    except ValueError:
        return
