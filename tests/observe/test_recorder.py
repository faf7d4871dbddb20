"""What a rank records can be read by another process, at any moment, and survives it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from evenly.comm.transport import enter, timing_of
from evenly.observe import recorder
from evenly.observe.recorder import CollectiveCall, Recorder, UserStack, call_from, call_text, glance, read
from evenly.observe.stacks import Place, StackReader

CALL = CollectiveCall("all_reduce", "data [0-1]", "float32", (3, None), "sum", "gradient of a", "train (train.py:88)")


def wait_for(path: Path, word: str) -> recorder.RankRecord:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        record = read(path)
        if record is not None and word in record.where:
            return record
        time.sleep(0.05)
    raise AssertionError(f"never seen in {word}: {read(path)}")


def test_entries_come_back_in_order_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    writer = Recorder(tmp_path / "3.record", 3)
    serials = [writer.enter(number, call_text(*CALL)) for number in range(1, recorder.ENTRIES + 51)]
    for serial in serials[:-1]:
        writer.leave(serial)  # the first of them have been overwritten
    record = read(tmp_path / "3.record")
    writer.close()
    assert record is not None and record.rank == 3 and record.state == "running"
    assert [entry.number for entry in record.entries] == list(range(51, recorder.ENTRIES + 51))
    assert all(entry.call == CALL for entry in record.entries)
    assert [entry.left_s is None for entry in record.entries] == [False] * (recorder.ENTRIES - 1) + [True]
    assert all(entry.left_s >= entry.entered_s for entry in record.entries if entry.left_s)
    ended = read(tmp_path / "3.record")
    assert ended is not None and ended.state == "ended"


def test_the_beat_tells_where_the_main_thread_is_and_since_when(tmp_path: Path) -> None:
    began_s = time.time()
    writer = Recorder(tmp_path / "0.record", 0)
    record = wait_for(tmp_path / "0.record", "wait_for (test_recorder.py:")
    later = wait_for(tmp_path / "0.record", "wait_for (test_recorder.py:")
    writer.close()
    assert began_s <= record.since_s <= record.beat_s <= time.time()
    assert later.beat_s >= record.beat_s


class Ending(Recorder):
    """Timings that another thread ends as soon as they have been read `reads` times."""

    reads = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "timings":
            self.reads -= 1
            return super().__getattribute__(name) if self.reads >= 0 else None
        return super().__getattribute__(name)


def test_timings_may_end_while_another_thread_begins_or_ends_an_operation(tmp_path: Path) -> None:
    """As those of a step do while its checkpoint is written."""
    writer = Ending(tmp_path / "0.record", 0)
    writer.time_operations()
    group: Any = SimpleNamespace(
        position=0, rank=0, size=2, closed=False, device=torch.device("cpu"), operations=0, recorder=writer,
        checked=False, label="data [0-1]", name="data",
    )  # fmt: skip
    acts: list[Callable[[int], Any]] = [
        lambda _: enter(group, "gather_values", None),
        writer.leave,
        lambda serial: timing_of(group, serial),
    ]
    for act in acts:
        for reads in range(4):
            writer.reads = 99
            serial = enter(group, "gather_values", None)
            writer.reads = reads
            act(serial)
    writer.close()


class Watched(bytearray):
    """Memory that knows which serials its slots had as texts were written to them."""

    serials: ClassVar[list[int]] = []

    def __setitem__(self, place: Any, text: Any) -> None:
        slot = place.start // recorder.SLOT_BYTES * recorder.SLOT_BYTES
        if slot:  # the first is the beat's
            self.serials.append(int.from_bytes(self[slot : slot + 8], "little"))
        super().__setitem__(place, text)


def test_a_slot_that_is_written_again_has_no_serial_meanwhile(tmp_path: Path) -> None:
    """So a reader takes no new text for an old entry."""
    writer = Recorder(tmp_path / "0.record", 0)
    with mock.patch.object(writer, "_memory", Watched(recorder.SLOT_BYTES * (recorder.ENTRIES + 1))):
        for number in range(2 * recorder.ENTRIES):
            writer.enter(number, call_text(*CALL))
    writer.close()
    assert Watched.serials == [0] * (2 * recorder.ENTRIES)


def test_what_is_not_a_record_is_none(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") is None and glance(tmp_path / "missing") is None
    for name, content in {"empty": b"", "zeros": bytes(recorder.SLOT_BYTES * 300), "noise": b"x" * 200_000}.items():
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) is None and glance(tmp_path / name) is None


def test_long_calls_are_cut_to_their_slot() -> None:
    assert call_from(call_text(*CALL)) == CALL
    long = CollectiveCall("gather", "g" * 900, "float32", tuple(range(500)), "d" * 900, "l" * 900, "w" * 900)
    text = call_text(*long)
    assert len(text) <= recorder.LONGEST_TEXT
    assert call_from(text).operation == "gather"
    wide = call_text(*CollectiveCall("gather", *["\U0001f600" * 900, "float32"], (3,), *["\udcff\U0001f600" * 900] * 3))
    assert len(wide) <= recorder.LONGEST_TEXT and call_from(wide).operation == "gather"


def test_places_are_the_users_own() -> None:
    assert recorder.here().startswith("test_places_are_the_users_own (test_recorder.py:")
    assert not recorder.is_users(recorder.__file__)
    assert not recorder.is_users(threading.__file__) and not recorder.is_users("<frozen runpy>")
    assert recorder.is_users(__file__)


def test_what_a_rank_does_and_that_it_gets_on_is_recorded(tmp_path: Path) -> None:
    writer = Recorder(tmp_path / "0.record", 0)
    with writer.during("step"):
        writer.tick()
        record = wait_for_ticks(tmp_path / "0.record", 2)
        assert record.state == "step" and record.longest_step_s == 0
        with writer.during("evaluating"):
            assert wait_for_ticks(tmp_path / "0.record", 3).state == "evaluating"
    after = wait_for_ticks(tmp_path / "0.record", 5)
    writer.leave(writer.enter(1, call_text(*CALL)))
    operated = wait_for_ticks(tmp_path / "0.record", 7)
    writer.close()
    assert after.state == "running" and after.longest_step_s > 0
    assert operated.entries == ()


def wait_for_ticks(path: Path, ticks: int) -> recorder.RankRecord:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        record = glance(path)
        if record is not None and record.ticks == ticks:
            return record
        time.sleep(0.05)
    raise AssertionError(f"never had {ticks} ticks: {glance(path)}")


def test_a_file_that_has_no_room_is_an_error_and_no_bus_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of all slots is asked for before the file is mapped."""

    def full(descriptor: int, offset: int, length: int) -> None:
        assert length == recorder.SLOT_BYTES * (recorder.ENTRIES + 1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Recorder(tmp_path / "0.record", 0)


def test_a_loop_is_named_and_not_what_it_calls_in_turn(tmp_path: Path) -> None:
    writer = Recorder(tmp_path / "0.record", 0)
    record = loop_until(tmp_path / "0.record")
    writer.close()
    assert record.in_own_code
    assert record.where.startswith("loop_until (test_recorder.py:")


def loop_until(path: Path) -> recorder.RankRecord:
    """Calls other functions until it is named, or a while long."""
    deadline = time.monotonic() + 60
    while True:
        spend(one_moment)
        spend(another_moment)
        record = glance(path)
        assert record is not None
        if time.monotonic() > deadline or (record.where.startswith("loop_until") and record.in_own_code):
            return record


def spend(moment: Callable[[float], None]) -> None:
    moment(time.monotonic() + 0.02)


def one_moment(until: float) -> None:
    while time.monotonic() < until:
        pass


def another_moment(until: float) -> None:
    while time.monotonic() < until:
        pass


def test_code_of_the_package_below_the_users_is_not_its_own() -> None:
    own, library, package = (Place(file, "f", 1) for file in (__file__, threading.__file__, recorder.__file__))
    assert recorder.own_code_runs([library, own, package])
    assert not recorder.own_code_runs([library, package, own])
    assert not recorder.own_code_runs([library])


def test_frames_of_the_main_thread_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise AssertionError("a frame object of another thread's frame changes how that frame ends")

    monkeypatch.setattr(sys, "_current_frames", refused)
    writer = Recorder(tmp_path / "0.record", 0)
    wait_for(tmp_path / "0.record", "wait_for (test_recorder.py:")
    writer.close()


def test_a_thread_that_gets_on_is_seldom_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int | None] = []

    def read(_: StackReader, ident: int | None) -> None:
        looks.append(ident)

    monkeypatch.setattr(recorder, "BEAT_S", 0.02)
    monkeypatch.setattr(StackReader, "read", read)
    writer = Recorder(tmp_path / "0.record", 0)
    ticking_until_s = time.monotonic() + 1.0
    while time.monotonic() < ticking_until_s:
        writer.tick()
    assert len(looks) <= 5  # a thread may be kept from running for long
    time.sleep(1.0)
    writer.close()
    assert len(looks) > 10


A, B, C = (Place("/home/me/train.py", function, line) for line, function in enumerate("abc", 1))


def test_what_is_common_to_two_stacks_of_the_users() -> None:
    before = UserStack((A, B, C))
    assert before.common(UserStack((A, B, C._replace(line=9)))).places == (A, B, C._replace(line=9))
    assert before.common(UserStack((A, B._replace(line=9), C))).places == (A, B._replace(line=9))
    assert before.common(UserStack((A, C))).places == (A,)
    assert before.common(UserStack((B, C))).places == ()
    assert before.common(UserStack((C,), cut=True)) == before  # what is further out cannot be seen
