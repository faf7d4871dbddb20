"""Where a run keeps the state of its newest steps in the memory of this machine, which outlives its ranks.

The folder follows from the run's, so that whoever starts the ranks again finds it: a checkpoint like any other, in
files that are memory. What is newest and sound there becomes one of the run's checkpoints before it is gone on from.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from evenly.checkpoint.folder import CheckpointFolder, copy_files
from evenly.errors import UserError

MEMORY = Path("/dev/shm")
PREFIX = "evenly-snapshot-"


def memory_folder(run: Path) -> CheckpointFolder:
    name = hashlib.blake2b(os.fsencode(run.resolve()), digest_size=8).hexdigest()
    return CheckpointFolder(MEMORY / f"{PREFIX}{os.getuid()}-{name}")


def open_memory(run: Path) -> CheckpointFolder:
    """The folder, empty and this user's alone. Raises `UserError` where there can be none."""
    folder, asked = memory_folder(run), "keep snapshots in memory"
    if not MEMORY.is_dir():
        raise UserError(asked, f"this machine has no {MEMORY}", "run without --snapshot")
    folder.discard()
    try:
        folder.root.mkdir(mode=0o700)
    except FileExistsError:
        raise UserError(asked, f"{folder.root} belongs to another user", "use another --out") from None
    folder.checkpoints.mkdir(parents=True)
    return folder


def keep_newest(run: Path) -> int | None:
    """Copies the newest sound snapshot to the run's checkpoints; its step, None where none is newer than these.

    Raises `OSError` where it cannot be written; the snapshot stays.
    """
    memory, folder = memory_folder(run), CheckpointFolder(run)
    if not memory.root.is_dir() or memory.root.is_symlink() or memory.root.stat().st_uid != os.getuid():
        return None
    newest = memory.newest_sound()
    if newest is None or any(step >= newest and folder.is_sound(step) for step in folder.steps()):
        return None
    try:
        manifest = memory.manifest(newest)
        folder.begin(newest)
        copy_files(memory.path(newest), folder.partial(newest), manifest.files)
        folder.commit(manifest)
    except OSError:
        folder.abandon(newest)
        raise
    return newest


def keep_snapshot(out: Path) -> None:
    """Makes the newest snapshot in memory, where there is one, a checkpoint of the run in `out`; says so."""
    try:
        step = keep_newest(out)
    except OSError as error:
        print(f"evenly: the snapshot in {memory_folder(out).root} cannot be copied to {out}: {error}", file=sys.stderr)
        return
    if step is not None:
        print(f"evenly: the snapshot of step {step} is now a checkpoint in {out}", file=sys.stderr)
