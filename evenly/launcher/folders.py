"""The folders of a launch: its logs, where the user wants them, and what launcher and ranks tell each other.

The latter, records that are mapped in memory among it, is in the temporary directory of this machine: the disk of the
logs may be full, or another machine's. Whoever uses a folder locks it; unlocked ones are of processes that were killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from glob import glob
from multiprocessing.util import get_temp_dir
from pathlib import Path

from evenly.errors import UserError
from evenly.launcher.rank import LaunchFolder

# A folder is made a moment before it is locked.
STARTING_S = 60.0

OWNED = "evenly.lock"  # marks a folder of multiprocessing's as one of this package's


def open_folder(log_dir: Path | None, node: int, stack: ExitStack) -> LaunchFolder:
    """The folder of a launch on node number `node`; `stack` releases its locks.

    Raises `UserError` where it cannot be written, or another launch has the same logs.
    """
    clear_abandoned(Path(tempfile.gettempdir()))
    asked = f"keep the ranks' logs in {log_dir or tempfile.gettempdir()}"
    try:
        if log_dir is not None:
            stack.callback(_unlock, *_locked(log_dir / f".node{node}"))
        home = Path(tempfile.mkdtemp(prefix="evenly-"))
        control = home / f".node{node}"
        stack.callback(os.close, _locked(control)[1])
    except BlockingIOError:
        do = "wait for it or end it, or give this run a folder of its own (--out)"
        raise UserError(asked, "another run writes there", do) from None
    except OSError as error:
        raise UserError(asked, str(error), "name a folder that can be written (--out, TMPDIR)") from None
    return LaunchFolder((log_dir or home).absolute(), control.absolute(), log_dir is None)


def _locked(folder: Path) -> tuple[Path, int]:
    """`folder`, made, locked and emptied of what a launcher that was killed has left, with the lock's descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder)
    for path in folder.iterdir():
        path.unlink()
    return folder, descriptor


def _unlock(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def _lock(path: Path) -> int:
    """A descriptor that holds the lock of `path` until closed; `BlockingIOError` where another process holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass  # the file system has no locks
    return descriptor


@cache
def own_temporary_folder() -> int:
    """Marks the folder in which multiprocessing keeps its sockets; the lock is held until this process ends."""
    mark = Path(get_temp_dir()) / OWNED
    mark.touch()
    return _lock(mark)


def clear_abandoned(folder: Path) -> None:
    """Removes from `folder` what this user's launchers that were killed have left: nobody locks it.

    Logs of a run that has failed stay, since its message names them: it has removed its control folder.
    """
    for locked, home in _lockable(folder):
        try:
            status = locked.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < STARTING_S:
                continue
            descriptor = os.open(locked, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)
            finally:
                os.close(descriptor)
        except OSError:  # it is another's, or alive
            continue


def _lockable(folder: Path) -> Iterator[tuple[Path, Path]]:
    """What a launcher locks, and the folder that goes with it.

    Other launches make and remove theirs meanwhile: `Path.glob` raises where a folder it has listed is gone.
    """
    for pattern in ("evenly-*/.node*", f"pymp-*/{OWNED}"):
        for path in glob(pattern, root_dir=folder):  # noqa: PTH207
            yield folder / path, (folder / path).parent
