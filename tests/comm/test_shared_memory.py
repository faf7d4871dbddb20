"""Marks of ranks in memory that they share, here of a rank and of others that are processes or threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest import mock

import pytest

from evenly.comm import shared_memory
from evenly.comm.shared_memory import MARK_BYTES, Marks
from evenly.errors import RunError


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """The process of the rank at position 1, which waits for its input to end."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.kill()


def marks_of_two(other: subprocess.Popen[bytes]) -> tuple[Marks, Marks]:
    """Those of both ranks, each with descriptors of its own."""
    memory = memoryview(bytearray(2 * MARK_BYTES))
    first, second = (
        Marks(memory, position, [os.pidfd_open(process) for process in (os.getpid(), other.pid)])
        for position in range(2)
    )
    return first, second


def descriptors() -> int:
    """How many this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


def test_ranks_meet_again_and_again_with_what_each_brings(other: subprocess.Popen[bytes]) -> None:
    first, second = marks_of_two(other)
    found: list[list[int] | None] = []

    def come() -> None:
        for turn in range(200):
            if turn % 50 == 7:
                time.sleep(0.005)
            found.append(second.meet(1000 + turn))

    thread = Thread(target=come)
    thread.start()
    own: list[list[int] | None] = []
    for turn in range(200):
        if turn % 50 == 31:
            time.sleep(0.005)
        own.append(first.meet(turn))
    thread.join(60)
    assert own == found == [[turn, 1000 + turn] for turn in range(200)]


def test_a_rank_whose_process_has_ended_is_not_waited_for(other: subprocess.Popen[bytes]) -> None:
    """Though nobody has asked how it ended, and though it had met the others before."""
    first, second = marks_of_two(other)
    thread = Thread(target=second.meet, args=(3,))
    thread.start()
    assert first.meet(3) == [3, 3]
    thread.join(60)
    end = Thread(target=lambda: (time.sleep(0.1), other.kill()))
    end.start()
    began_s = time.monotonic()
    assert first.meet(4) is None
    assert 0.05 < time.monotonic() - began_s < 30
    end.join(60)


def test_what_a_rank_brought_before_it_ended_counts(other: subprocess.Popen[bytes]) -> None:
    first, second = marks_of_two(other)
    other.kill()
    other.wait(60)
    second.leave()
    assert second.meet(5) is None  # the first has not come
    assert first.meet(6) == [6, 5]
    assert first.meet(7) is None


def test_a_rank_that_comes_and_ends_between_two_looks_has_come(other: subprocess.Popen[bytes]) -> None:
    first, second = marks_of_two(other)
    with mock.patch.object(first, "_ends", [None, SimpleNamespace(poll=lambda _: second.meet(5))]):
        assert first.meet(6) == [6, 5]


def test_a_rank_that_has_left_is_not_waited_for(other: subprocess.Popen[bytes]) -> None:
    first, second = marks_of_two(other)
    before = descriptors()
    second.leave()
    second.leave()
    assert first.meet(1) is None
    assert descriptors() == before - 2


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_over_gloo(other: subprocess.Popen[bytes]) -> None:
    first, _ = marks_of_two(other)
    with mock.patch.object(shared_memory, "LIMIT_S", 0.05), pytest.raises(RunError, match="position 1 has not come"):
        first.meet(1)
