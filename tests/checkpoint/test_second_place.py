"""Every checkpoint is copied to a second folder; where that fails the run goes on, and says so."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evenly.checkpoint import store as store_module
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.store import CheckpointStore, Snapshot
from evenly.errors import CheckpointError, UserError


def opened(folder: Path, *, new: bool = False) -> CheckpointStore:
    store = CheckpointStore(folder / "first", second=folder / "second")
    store.lock(new=new)
    return store


def save(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        store.save(Snapshot(step, {"model.w": torch.full((4,), float(step))}, {}))
    store.finish()


def steps(folder: Path) -> tuple[list[int], list[int]]:
    return CheckpointFolder(folder / "first").steps(), CheckpointFolder(folder / "second").steps()


def damage(folder: Path, step: int) -> None:
    file = next(CheckpointFolder(folder).path(step).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def test_both_hold_the_same_and_are_pruned_alike(tmp_path: Path) -> None:
    store = opened(tmp_path)
    save(store, 1, 2, 3, 4)
    store.close()
    assert steps(tmp_path) == ([2, 3, 4], [2, 3, 4])
    for file in CheckpointFolder(tmp_path / "first").path(4).iterdir():
        assert (CheckpointFolder(tmp_path / "second").path(4) / file.name).read_bytes() == file.read_bytes()


def test_the_newest_sound_one_of_both_is_loaded(tmp_path: Path) -> None:
    store = opened(tmp_path)
    save(store, 1, 2)
    assert store.load().path == CheckpointFolder(tmp_path / "first").path(2)
    damage(tmp_path / "first", 2)
    found = store.load()
    into = {"model.w": torch.zeros(4)}
    found.read(into)
    assert found.path == CheckpointFolder(tmp_path / "second").path(2) and into["model.w"].tolist() == [2.0] * 4
    assert "step 2 is not sound" in store.passed_over
    assert store.load(2).path == found.path
    damage(tmp_path / "second", 2)
    assert store.load().step == 1
    with pytest.raises(CheckpointError, match="resume from step 1"):
        store.load(2)
    shutil.rmtree(tmp_path / "first" / "checkpoints")
    assert store.load().path == CheckpointFolder(tmp_path / "second").path(1)
    store.close()


def gone(folder: Path) -> None:
    shutil.rmtree(folder / "second")


def a_file_in_its_place(folder: Path) -> None:
    gone(folder)
    (folder / "second").touch()


@pytest.mark.parametrize("break_it", [gone, a_file_in_its_place])
def test_a_second_folder_that_fails_is_said_and_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], break_it: Callable[[Path], None]
) -> None:
    store = opened(tmp_path)
    save(store, 1)
    break_it(tmp_path)
    save(store, 2)
    store.close()
    assert CheckpointFolder(tmp_path / "first").steps() == [1, 2]
    assert not (tmp_path / "second" / "checkpoints").exists()  # of an unmounted disk, the mount point stays empty
    error = capfd.readouterr().err
    assert "copy the checkpoint of step 2 to" in error and "the run goes on" in error


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_second_folder_keeps_its_older_checkpoints_and_takes_later_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "copy_files", full)
        save(store, 2)
    assert steps(tmp_path) == ([1, 2], [1])
    assert "No space" in capfd.readouterr().err
    save(store, 3)
    store.close()
    assert steps(tmp_path) == ([1, 2, 3], [1, 3])
    assert capfd.readouterr().err == ""


def test_a_new_run_does_not_write_between_the_checkpoints_of_another(tmp_path: Path) -> None:
    store = opened(tmp_path, new=True)
    save(store, 1)
    store.close()
    other = CheckpointStore(tmp_path / "other", second=tmp_path / "second")
    with pytest.raises(UserError, match="already holds those of a run"):
        other.lock(new=True)
    other.close()
