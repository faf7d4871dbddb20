"""What a rank records can be read by another process, at any moment, and survives it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from evenly.observe import recorder
from evenly.observe.recorder import CollectiveCall, Recorder, call_from, call_text, read, waits_since_s

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
    serials = [writer.enter(number, call_text(CALL)) for number in range(1, recorder.ENTRIES + 51)]
    for serial in serials[:-1]:
        writer.leave(serial)  # the first of them have been overwritten
    record, waits_s = read(tmp_path / "3.record"), waits_since_s(tmp_path / "3.record")
    writer.close()
    assert record is not None and record.rank == 3 and record.state == "running"
    assert [entry.number for entry in record.entries] == list(range(51, recorder.ENTRIES + 51))
    assert all(entry.call == CALL for entry in record.entries)
    assert [entry.left_s is None for entry in record.entries] == [False] * (recorder.ENTRIES - 1) + [True]
    assert all(entry.left_s >= entry.entered_s for entry in record.entries if entry.left_s)
    assert waits_s == record.entries[-1].entered_s
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


def test_what_is_not_a_record_is_none(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") is None and waits_since_s(tmp_path / "missing") is None
    for name, content in {"empty": b"", "zeros": bytes(recorder.SLOT_BYTES * 300), "noise": b"x" * 200_000}.items():
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) is None


def test_long_calls_are_cut_to_their_slot() -> None:
    assert call_from(call_text(CALL)) == CALL
    long = CollectiveCall("gather", "g" * 900, "float32", tuple(range(500)), "d" * 900, "l" * 900, "w" * 900)
    text = call_text(long)
    assert len(text) <= recorder.LONGEST_TEXT
    assert call_from(text).operation == "gather"


def test_places_are_the_users_own() -> None:
    assert recorder.here().startswith("test_places_are_the_users_own (test_recorder.py:")
    assert not recorder.is_users(recorder.__file__)
    assert not recorder.is_users(threading.__file__) and not recorder.is_users("<frozen runpy>")
    assert recorder.is_users(__file__)
