from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from records import record_file

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.manifest import Manifest, Unsound
from evenly.errors import CheckpointError

FILE = "shard-00001-model-00001-of-00001.safetensors"


def packed(content: bytes) -> bytes:
    """A file of safetensors that holds no tensor."""
    header = json.dumps({"__metadata__": {"content": content.decode()}}).encode()
    return struct.pack("<Q", len(header)) + header


def put(folder: CheckpointFolder, step: int, score: float | None = None, content: bytes = b"numbers") -> None:
    folder.begin(step)
    file = folder.partial(step) / FILE
    file.write_bytes(packed(content))
    folder.commit(Manifest(step, score, {FILE: record_file(file)}, {}, {}))


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_a_step_is_seen_only_after_commit(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    assert folder.steps() == [] and CheckpointFolder(tmp_path).newest_sound() is None
    folder.begin(10)
    assert folder.steps() == []
    put(folder, 10)
    assert folder.steps() == [10] and CheckpointFolder(tmp_path).newest_sound() == 10
    assert names(folder) == ["step-00000010"]


def test_steps_are_numbers_of_folders_in_our_form(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    put(folder, 2)
    put(folder, 123456789)
    for name in ("step-3", "step-0000000004", "step-00000005x", "other"):
        (folder.checkpoints / name).mkdir()
    (folder.checkpoints / "step-00000006").write_text("a file")
    assert folder.steps() == [2, 123456789]


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    put(folder, 5, content=b"old")
    put(folder, 5, content=b"new")
    assert (folder.path(5) / FILE).read_bytes() == packed(b"new") and folder.is_sound(5)
    assert names(folder) == ["step-00000005"]


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step, score in [(1, 0.5), (2, 0.1), (3, 0.3), (4, None), (5, 0.4), (6, 0.2)]:
        put(folder, step, score)
    assert folder.prune() == [1, 3]
    assert folder.steps() == [2, 4, 5, 6] and folder.prune() == []
    assert names(folder) == [f"step-0000000{n}" for n in (2, 4, 5, 6)]


def test_prune_leaves_the_unreadable_alone_and_does_not_count_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3, 4):
        put(folder, step)
    (folder.path(4) / "manifest.json").write_text("{}")
    assert folder.prune() == [] and folder.steps() == [1, 2, 3, 4]
    put(folder, 5)
    assert folder.prune() == [1]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda path: (path / FILE).unlink(), "is missing"),
        (lambda path: (path / FILE).write_bytes(b"numb"), "has 4 bytes, its manifest says 48"),
        (lambda path: (path / FILE).write_bytes(packed(b"nUmbers")), "was altered"),
        (lambda path: (path / "extra.safetensors").write_bytes(b""), "extra.safetensors is not in its manifest"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda path: _link(path / FILE), "is a symbolic link"),
        (lambda path: _link(path / "manifest.json"), "is a symbolic link"),
        (lambda path: _link(path), "or a symbolic link"),
        (lambda path: _pipe(path / FILE), "is not a file"),
        (lambda path: _pipe(path / "manifest.json"), "is not a file"),
    ],
)
def test_whatever_is_wrong_with_the_files_is_said(tmp_path: Path, break_it, reason: str) -> None:
    folder = CheckpointFolder(tmp_path)
    put(folder, 1)
    put(folder, 2)
    break_it(folder.path(2))
    with pytest.raises(Unsound, match=reason):
        manifest = folder.manifest(2)
        folder.check_files(manifest, manifest.files)
    assert CheckpointFolder(tmp_path).newest_sound() == 1


def _link(path: Path) -> None:
    elsewhere = path.parent.parent / f"moved-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    put(folder, 1)
    folder.path(1).rename(folder.path(9))
    with pytest.raises(Unsound, match="is of step 1"):
        folder.manifest(9)


def test_claim_removes_what_killed_runs_left(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    put(folder, 1)
    folder.begin(2)
    (folder.partial(2) / FILE).write_bytes(b"half")
    (folder.checkpoints / ".removed-step-00000000").mkdir()
    folder.lock().close()
    assert names(folder) == [".lock", "step-00000001"]


CLAIM = """
import sys
from pathlib import Path
from evenly.checkpoint.folder import CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]))
lock = folder.lock()
folder.begin(7)
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_running_run_keeps_its_folder_and_a_killed_one_loses_it(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None and other.stdout.readline() == "claimed\n"
        with pytest.raises(CheckpointError, match=f"another run writes there .process {other.pid} on "):
            CheckpointFolder(tmp_path).lock()
        assert CheckpointFolder(tmp_path).partial(7).is_dir()
        other.kill()
    CheckpointFolder(tmp_path).lock().close()
    assert not CheckpointFolder(tmp_path).partial(7).exists()


def test_these_files_need_no_torch() -> None:
    code = "import sys, evenly.checkpoint.folder, evenly.checkpoint.plain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
