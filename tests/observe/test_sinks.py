"""Files of one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path

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
