from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from command import evenly

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.store import CheckpointStore, Snapshot


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of five steps, that of step 2 the best."""
    store = CheckpointStore(tmp_path / "run")
    for step, score in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None)):
        store.save(Snapshot(step, {"model.w": torch.ones(4)}, {"plan": "ddp"}), score=score)
    store.close()
    return tmp_path / "run"


def damage(run: Path, step: int) -> None:
    """Changes a byte of the numbers."""
    file = next(CheckpointFolder(run).path(step).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def test_all_are_listed(run: Path) -> None:
    done = evenly("checkpoints", run, folder=run)
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert done.returncode == 0
    assert [line[0] for line in lines if line[0].isdecimal()] == ["2", "3", "4", "5"]
    assert next(line for line in lines if line[0] == "2")[-3:] == ["complete", "best", "ddp"]


def test_damage_is_found(run: Path) -> None:
    damage(run, 4)
    assert evenly("checkpoints", run, folder=run).returncode == 0  # sizes agree
    done = evenly("checkpoints", run, "--check", "--json", folder=run)
    assert done.returncode == 1
    states = {row["step"]: row["state"] for row in json.loads(done.stdout)["checkpoints"]}
    assert "was altered" in states.pop(4) and set(states.values()) == {"sound"}


def test_a_hole_is_found_without_reading_the_numbers(run: Path) -> None:
    file = next(CheckpointFolder(run).path(5).glob("*.safetensors"))
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(b"[4]", b"[3]").replace(b"[0,16]", b"[0,12]")
    file.write_bytes(content[:8] + header + content[8 + length :])
    done = evenly("checkpoints", run, folder=run)
    assert done.returncode == 1 and "its files and its manifest differ" in " ".join(done.stdout.split())


def test_the_newest_sound_one_and_the_best_are_never_removed(run: Path) -> None:
    damage(run, 5)
    done = evenly("checkpoints", run, "--keep", "1", "--json", folder=run)
    assert done.returncode == 0 and json.loads(done.stdout)["removed"] == [3, 5]
    assert CheckpointFolder(run).steps() == [2, 4]
    for step in (2, 4):
        damage(run, step)
    done = evenly("checkpoints", run, "--keep", "1", folder=run)
    assert done.returncode == 2 and "none of them is sound" in done.stderr
    assert CheckpointFolder(run).steps() == [2, 4]


def test_a_folder_without_checkpoints_is_said(tmp_path: Path) -> None:
    done = evenly("checkpoints", tmp_path, folder=tmp_path)
    assert done.returncode == 2 and "there are none" in done.stderr
