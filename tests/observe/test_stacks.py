"""Stacks of other threads, as faulthandler writes them and as they are read back."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from evenly.observe.stacks import Place, StackReader, stacks_in


@contextmanager
def waiting(depth: int) -> Generator[threading.Thread]:
    """A thread that waits `depth` calls deep."""
    reached, go_on = threading.Event(), threading.Event()

    def descend(left: int) -> None:
        if left:
            descend(left - 1)
        else:
            reached.set()
            go_on.wait()

    thread = threading.Thread(target=descend, args=(depth,))
    thread.start()
    reached.wait()
    try:
        yield thread
    finally:
        go_on.set()
        thread.join()


def test_the_places_of_another_thread_come_innermost_first() -> None:
    reader = StackReader()
    with waiting(depth=3) as thread:
        stack = reader.read(thread.ident)
        again = reader.read(thread.ident)
    gone = reader.read(thread.ident)
    reader.close()
    assert stack is not None and stack.ident == thread.ident and not stack.cut
    mine = [place for place in stack.places if place.file == __file__]
    assert [place.function for place in mine] == ["descend"] * 4
    assert "go_on.wait()" in Path(__file__).read_text().splitlines()[mine[0].line - 1]
    assert len({place.line for place in mine[1:]}) == 1
    assert again is not None and [one for one in again.places if one.file == __file__] == mine
    assert gone is None


def test_of_a_deep_stack_the_outer_places_are_left_out() -> None:
    reader = StackReader()
    with waiting(depth=400) as thread:
        stack = reader.read(thread.ident)
    reader.close()
    assert stack is not None and stack.cut and len(stack.places) == 100


def test_a_dump_is_read_back() -> None:
    dump = (
        "Thread 0x00007f12 [loader] (most recent call first):\n"
        '  File "/home/m\\xe4rz/data.py", line 31 in __getitem__\n'
        '  File "/home/m\\xe4rz/train.py", line 9 in <module>\n'
        "  ...\n"
        "\n"
        "Current thread 0x2 (most recent call first):\n"
        "  <no Python frame>\n"
    )
    first, second = stacks_in(dump)
    assert (first.ident, first.cut, second.ident, second.places) == (0x7F12, True, 2, ())
    assert first.places[0] == Place("/home/märz/data.py", "__getitem__", 31)
    assert [str(place) for place in first.places] == ["__getitem__ (data.py:31)", "train.py:9"]
