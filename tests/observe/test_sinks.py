"""Files of one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenly.errors import RunError
from evenly.observe.sinks import JsonLines


def test_lines_are_strict_json_and_are_added_to(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "metrics.jsonl"
    for record in ({"step": 1, "grad_norm": float("inf"), "loss": 2.5}, {"step": 2, "memory_bytes": [3, 4]}):
        records = JsonLines(path)
        records.add(record)
        records.close()
        records.close()
    lines = [
        json.loads(line, parse_constant=lambda name: f"not JSON: {name}") for line in path.read_text().splitlines()
    ]
    assert lines == [{"step": 1, "grad_norm": None, "loss": 2.5}, {"step": 2, "memory_bytes": [3, 4]}]


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_has_been_removed_is_noticed_at_the_next_line(again: bool, tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    records = JsonLines(path)
    records.add({"step": 1})
    path.unlink()
    path.touch() if again else path.parent.rmdir()
    with pytest.raises(RunError, match=r"metrics\.jsonl[^$]*removed or replaced"):
        records.add({"step": 2})
    records.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no such device")
def test_a_disk_that_is_full_is_an_error_in_words() -> None:
    records = JsonLines(Path("/dev/full"))
    with pytest.raises(RunError, match=r"write /dev/full[^$]*No space left on device[^$]*has room"):
        records.add({"step": 1})
    records.close()


def test_a_folder_that_cannot_be_made_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"write .*metrics"):
        JsonLines(tmp_path / "file" / "metrics.jsonl")
