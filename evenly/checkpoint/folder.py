"""Every path of a run's checkpoints, and the one act that makes a checkpoint valid. No torch here.

    RUN/checkpoints/step-00000010/manifest.json, *.safetensors      valid
    RUN/checkpoints/.partial-step-00000020/                         being written
    RUN/checkpoints/.removed-step-00000010/                         being removed
    RUN/checkpoints/.lock                                           locked by the run that writes here

A folder has a name that is not hidden only while it is whole: it gets and loses that name by a rename.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from evenly.checkpoint.manifest import FileRecord, Manifest, Unsound, from_text, hash_file, to_text
from evenly.checkpoint.plain import decode
from evenly.errors import CheckpointError, UserError
from evenly.observe.run_folder import RunFolder

KEEP_LAST = 3
MANIFEST = "manifest.json"
MANIFEST_BYTES = 1 << 28  # of a million tensors
PARTIAL, REMOVED = ".partial-", ".removed-"
STEP_NAME = re.compile(r"step-(\d{8,})")
# File systems that cannot lock answer with one of these.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of the run in `root`."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return RunFolder(self.root).checkpoints

    def path(self, step: int) -> Path:
        return self.checkpoints / _name(step)

    def partial(self, step: int) -> Path:
        """Where the checkpoint of `step` is written before it is valid."""
        return self.checkpoints / f"{PARTIAL}{_name(step)}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint by its name, ascending; its content is not looked at."""
        if not self.checkpoints.is_dir():
            return []
        found = ((STEP_NAME.fullmatch(path.name), path) for path in self.checkpoints.iterdir())
        steps = [int(match[1]) for match, path in found if match and path.is_dir()]
        return sorted(step for step in steps if self.path(step).is_dir())

    def lock(self) -> IO[str]:
        """Locks the folder for the one run that writes here, and removes leftovers of killed runs.

        The lock is released when the returned file is closed or the process ends. A record lock is used because,
        unlike `flock`, it is not inherited by worker processes that may outlive a killed rank. Where the
        file system has no locks, nothing is removed, since it may belong to a run that is alive.
        Raises `CheckpointError` if another process holds the lock.
        """
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        lock = (self.checkpoints / ".lock").open("a+")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return lock
            raise self._locked_by(lock, error) from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        self.remove_leftovers()
        return lock

    def _locked_by(self, lock: IO[str], error: OSError) -> Exception:
        with lock:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return error
            lock.seek(0)
            owner = lock.read() or "another process"
        return CheckpointError(
            f"save checkpoints in {self.checkpoints}",
            f"another run writes there ({owner})",
            "wait for it or end it, or give this run a folder of its own (--out)",
        )

    def remove_leftovers(self) -> None:
        """Remove partial and half-removed folders; only the run that holds the lock may."""
        for path in list(self.checkpoints.iterdir()):
            if path.name.startswith((PARTIAL, REMOVED)):
                shutil.rmtree(path, ignore_errors=True)

    def begin(self, step: int, *, new: bool = True) -> None:
        """An empty partial folder for `step`; an `OSError` if there is no folder of checkpoints, unless `new`."""
        self.abandon(step)
        self.partial(step).mkdir(parents=new)

    def abandon(self, step: int) -> None:
        """Remove the partial folder of `step`, if there is one."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def commit(self, manifest: Manifest) -> None:
        """Make the partial folder of `manifest.step` the valid checkpoint of that step, in one rename.

        All other files must be complete and synced. A former checkpoint of the same step (a run that was
        resumed from an earlier one writes it again) makes room first.
        """
        partial = self.partial(manifest.step)
        _write_synced(partial / MANIFEST, to_text(manifest))
        _sync_folder(partial)
        self.remove(manifest.step)
        partial.rename(self.path(manifest.step))
        _sync_folder(self.checkpoints)

    def remove(self, step: int) -> None:
        """Remove a checkpoint; it is no longer seen before the first of its files goes."""
        if not os.path.lexists(self.path(step)):
            return
        hidden = self.checkpoints / f"{REMOVED}{_name(step)}"
        shutil.rmtree(hidden, ignore_errors=True)
        self.path(step).rename(hidden)
        if hidden.is_symlink():
            hidden.unlink()
        shutil.rmtree(hidden, ignore_errors=True)

    def discard(self) -> None:
        """Removes all of the run's folder."""
        shutil.rmtree(self.root, ignore_errors=True)

    def prune(self, keep_last: int = KEEP_LAST) -> list[int]:
        """Keep the newest `keep_last` and the one with the least score; returns the steps removed.

        A folder whose manifest cannot be read neither counts nor is removed: a person should see it.
        """
        manifests = dict(self._readable())
        retained = {*sorted(manifests)[-keep_last:], _best(manifests)}
        gone = [step for step in manifests if step not in retained]
        for step in gone:
            self.remove(step)
        return gone

    def best(self) -> int | None:
        """The step with the least score (the earliest of equal ones), or None if no checkpoint has a score."""
        return _best(dict(self._readable()))

    def _readable(self) -> Iterator[tuple[int, Manifest]]:
        for step in self.steps():
            try:
                yield step, self.manifest(step)
            except Unsound:
                continue

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint, its form and digest checked. Raises `Unsound`."""
        folder = self.path(step)
        if folder.is_symlink() or not folder.is_dir():
            raise Unsound("it is not a folder, or a symbolic link")
        _check_file(folder / MANIFEST)
        try:
            if (size := (folder / MANIFEST).stat().st_size) > MANIFEST_BYTES:
                raise Unsound(f"its manifest has {size} bytes, and may have {MANIFEST_BYTES}")
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise Unsound(f"its manifest cannot be read ({error})") from None
        manifest = from_text(text)
        if manifest.step != step:
            raise Unsound(f"its manifest is of step {manifest.step}")
        return manifest

    def check_files(self, manifest: Manifest, names: Iterable[str], *, digests: bool = True) -> None:
        """Compare those files with their records; no other file may be there. Raises `Unsound`.

        digests: whether the files are read, or their sizes compared alone.
        """
        folder = self.path(manifest.step)
        extra = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in manifest.files)
        if extra:
            raise Unsound(f"{extra[0]} is not in its manifest")
        for name in names:
            _check_record(folder / name, manifest.files[name], digests=digests)

    def newest_sound(self) -> int | None:
        """The newest step that is sound; reads files whole."""
        return next((step for step in reversed(self.steps()) if self.is_sound(step)), None)

    def newest_readable(self) -> Manifest | None:
        return next((manifest for _, manifest in sorted(self._readable(), reverse=True)), None)

    def is_sound(self, step: int) -> bool:
        """Whether `check` finds nothing wrong; reads all files."""
        try:
            self.check(step)
        except Unsound:
            return False
        return True

    def check(self, step: int, *, digests: bool = True) -> Manifest:
        """The manifest of `step`, whose files agree with it and hold all tensors whole; raises `Unsound` where not.

        digests: whether the files are read, or their sizes and headers compared alone.
        """
        manifest = self.manifest(step)
        self.check_files(manifest, manifest.files, digests=digests)
        self.check_whole(manifest)
        return manifest

    def check_whole(self, manifest: Manifest) -> None:
        """Whether the values can be read and the files hold all tensors whole; reads headers. Raises `Unsound`."""
        from evenly.checkpoint.pieces import find_pieces  # numpy

        try:
            decode(manifest.values)
        except ValueError as error:
            raise Unsound(f"a value in its manifest is malformed ({error})") from None
        find_pieces(self.path(manifest.step), manifest.files, manifest.tensors)

    def keep(self, newest: int) -> list[int]:
        """Removes all but the `newest` that are sound and, of the sound ones, the best; returns the steps removed.

        Reads all files. Raises `UserError` where none is sound, and `CheckpointError` while a run writes here.
        """
        with self.lock():
            manifests = {step: self.manifest(step) for step in self.steps() if self.is_sound(step)}
            if not manifests:
                raise UserError(
                    f"remove checkpoints in {self.checkpoints}",
                    "none of them is sound",
                    "look at them before all are gone",
                )
            retained = {*sorted(manifests)[-newest:], _best(manifests)}
            gone = [step for step in self.steps() if step not in retained]
            for step in gone:
                self.remove(step)
        return gone


def copy_files(source: Path, to: Path, names: Iterable[str]) -> None:
    """Copies files into another folder, and syncs them."""
    for name in names:
        shutil.copyfile(source / name, to / name)
        with (to / name).open("rb+") as file:
            os.fsync(file.fileno())


def _best(manifests: Mapping[int, Manifest]) -> int | None:
    scores = [(manifest.score, step) for step, manifest in manifests.items() if manifest.score is not None]
    return min(scores)[1] if scores else None


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _check_file(path: Path) -> None:
    if path.is_symlink():
        raise Unsound(f"{path.name} is a symbolic link")
    if not path.exists():
        raise Unsound(f"{path.name} is missing")
    if not path.is_file():
        raise Unsound(f"{path.name} is not a file")


def _check_record(path: Path, record: FileRecord, *, digests: bool) -> None:
    _check_file(path)
    try:
        size_bytes = path.stat().st_size
        if size_bytes != record.size_bytes:
            raise Unsound(f"{path.name} has {size_bytes} bytes, its manifest says {record.size_bytes}")
        if digests and hash_file(path) != record.xxh3:
            raise Unsound(f"{path.name} was altered: its hash is not the one in the manifest")
    except OSError as error:
        raise Unsound(f"{path.name} cannot be read ({error})") from None


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
