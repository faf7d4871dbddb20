"""Saving and loading the checkpoints of a run, by all its ranks together.

Tensors go through torch's distributed checkpoint, which writes every shard once and reads whatever shards
are asked for; they are stored as safetensors. Plain values go into the manifest, which is JSON. Nothing
in a checkpoint is ever unpickled.

A save stages its tensors to CPU memory and returns; a thread writes them. That thread talks to other
ranks through a group of its own, so that its collectives never interleave with those of training. Only
one save is under way, and the main thread uses that group only while none is.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial as bound
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from evenly.checkpoint.folder import KEEP_LAST, CheckpointFolder, copy_files
from evenly.checkpoint.manifest import MODEL, Manifest, TensorForm, Unsound, differences, fingerprint, first_of
from evenly.checkpoint.pieces import find_pieces, size_bytes
from evenly.checkpoint.plain import decode, encode, merge
from evenly.checkpoint.ranks import Ranks
from evenly.checkpoint.tensors import read_tensors, save_tensors
from evenly.checkpoint.writer import form_of
from evenly.comm.groups import Group
from evenly.errors import CheckpointError, EvenlyError, ResumeError, UserError
from evenly.launcher.allocator import free_memory_bytes
from evenly.parallel.data.grouping import deal_out

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after `step` optimizer steps.

    tensors: name -> tensor, plain or DTensor; a plain one is the same on every rank that has it.
    values:  name -> numbers, text, lists, tuples and dicts of them.
    finite:  names of tensors that must be finite numbers, or the state is not worth keeping.
    """

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    finite: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found sound, its tensors not yet read.

    values: as they were saved. forms: name -> type and global shape of every tensor.
    """

    step: int
    values: dict[str, Any]
    forms: dict[str, TensorForm]
    path: Path
    _ranks: Ranks = field(repr=False)

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill those tensors in place; a collective. The ranks may hold other names and other shards.

        Raises `ResumeError` on all ranks, before anything is filled, if the tensors of all ranks
        together are not those of the checkpoint by name, type and shape.
        """
        asked = f"load {self.path}"
        parts = self._ranks.gather({name: form_of(tensor) for name, tensor in into.items()})
        found = [phrase for part in parts for phrase in differences(self.forms, {**self.forms, **part})]
        found += [f"{n} is in the checkpoint only" for n in self.forms if not any(n in part for part in parts)]
        if found:
            found = list(dict.fromkeys(found))
            raise ResumeError(asked, first_of(found), "use the job that it was saved by, or another folder")
        tensors = {name: tensor.detach() for name, tensor in into.items()}
        self._ranks.together(asked, lambda: read_tensors(tensors, self.path, self._ranks.handle))


class CheckpointStore:
    """The checkpoints of one run, in `folder`/checkpoints.

    folder: the run's folder, on storage that all ranks see.
    group:  a gloo group of all ranks that nothing else uses; None for a process alone.
    second: another such folder, to which every checkpoint is copied; None for none.

    passed_over: why the last `load` has not taken the newest checkpoint; '' where it has.

    All methods but `steps` and `newest` are collectives: every rank calls them, in the same order. Errors
    are raised on every rank.
    """

    def __init__(self, folder: Path, group: Group | None = None, second: Path | None = None) -> None:
        self._folder = CheckpointFolder(folder)
        self._second = None if second is None else CheckpointFolder(second)
        self._places = [self._folder, *([] if self._second is None else [self._second])]
        self._ranks = Ranks(group or Group.alone("files"))
        self._stager = DefaultStager(_staging_options())
        self._locks: list[IO[str]] = []
        self._locked = False
        self._pending: tuple[Future[None], ThreadPoolExecutor] | None = None
        self.passed_over = ""

    def lock(self, *, new: bool = False) -> None:
        """Locks the folders for this run and removes leftovers of killed runs; `save` does it if need be.

        new: whether the run is; `UserError` if there are checkpoints in the second folder then.
        Raises `CheckpointError` if another process saves there.
        """
        if not self._locked:
            for place in self._places:
                take = bound(self._take_lock, place)
                self._ranks.first(f"save checkpoints in {place.checkpoints}", take)
            if new and self._second is not None:
                self._ranks.first("save checkpoints", self._check_empty)
            self._locked = True

    def _check_empty(self) -> None:
        if self._second is not None and self._second.steps():
            asked, found = f"copy checkpoints to {self._second.checkpoints}", "it already holds those of a run"
            raise UserError(asked, found, "add --resume, or choose another --save-to")

    def _take_lock(self, place: CheckpointFolder) -> None:
        self._locks.append(place.lock())

    def together(self, asked: str, act: Callable[[], T]) -> list[T]:
        """Return what `act` returns on each rank; every rank raises the first error."""
        return self._ranks.together(asked, act)

    def on_first_rank(self, asked: str, act: Callable[[], T]) -> T:
        """What `act` returns on the first rank; every rank raises its error. No save may be under way."""
        self.finish()
        return self._ranks.first(asked, act)

    def save(self, snapshot: Snapshot, *, score: float | None = None, memory: CheckpointFolder | None = None) -> None:
        """Copy the snapshot, return, and write it while training goes on; into `memory` if given, which holds one.

        Waits for a save that is still under way. The checkpoint is valid when all ranks' files are complete;
        then the oldest ones go, but not the one of the lowest `score` (the loss of an evaluation).
        Raises `UserError` for values that JSON cannot hold, and `CheckpointError` for the failure of the
        *former* save; this one's is raised by the next `save` or by `finish`.
        """
        values = {key: encode(value, f"values.{key}") for key, value in snapshot.values.items()}
        if type(snapshot.step) is not int or snapshot.step < 0:
            raise UserError("save a checkpoint", f"step {snapshot.step!r}", "number steps by whole numbers from 0")
        self.finish()
        self.lock()
        staged = self._stage(self._own(snapshot.tensors))
        finite = None if score is None or not math.isfinite(score) else float(score)
        forms = {name: form_of(tensor) for name, tensor in snapshot.tensors.items()}
        manifest = Manifest(snapshot.step, finite, {}, forms, values)
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evenly-checkpoint")
        must_be_finite = [name for name in staged if name in snapshot.finite]
        self._pending = executor.submit(self._write, staged, must_be_finite, manifest, memory), executor

    def finish(self) -> None:
        """Wait until the save under way is valid. Raises `CheckpointError` if it failed; older ones stay."""
        if self._pending is None:
            return
        result, executor = self._pending
        try:
            result.result()
        finally:
            if result.done():  # not if the wait was interrupted
                self._pending = None
                executor.shutdown()  # the thread ends with its save

    def close(self) -> None:
        """`finish`, then release the lock and the staging memory; the store is not used afterwards."""
        try:
            self.finish()
        finally:
            self._stager.close()
            for lock in self._locks:
                lock.close()

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending; their contents are not looked at."""
        return self._folder.steps()

    def load(self, step: int | None = None) -> Checkpoint:
        """Check the checkpoint of `step`, every file of it, and return it; by default the newest that is sound.

        Both folders are looked at, the first before the second. Raises `CheckpointError` with the reason if it is torn,
        foreign or altered; it names the newest one that is sound. `passed_over` says why a newer one was not taken.
        """
        self.finish()
        which = "the newest step" if step is None else f"step {step}"
        asked = f"load the checkpoint of {which} in {' or '.join(str(place.checkpoints) for place in self._places)}"
        reasons: list[str] = []
        candidates = self._ranks.first(asked, lambda: self._candidates(asked, step))
        for chosen, number in candidates:
            place = self._places[number]
            found = self._checked(asked, place, chosen)
            if isinstance(found, Manifest):
                if reasons:
                    self.passed_over = f"the checkpoint of step {candidates[0][0]} is not sound ({reasons[0]})"
                return Checkpoint(chosen, decode(found.values), found.tensors, place.path(chosen), self._ranks)
            reasons.append(found)
        newest, number = candidates[0]
        sound = self._ranks.first(asked, lambda: self._newest_sound() if step is not None else None)
        raise _refusal(f"load {self._places[number].path(newest)}", reasons[0], sound)

    def _checked(self, asked: str, place: CheckpointFolder, step: int) -> Manifest | str:
        """The manifest of `step`, whose files agree with it; or why not."""
        manifest = self._ranks.first(asked, lambda: _reason_or(lambda: place.manifest(step)))
        if isinstance(manifest, str):
            return manifest
        reasons = self._ranks.together(asked, lambda: _reason_or(lambda: self._check(place, manifest)))
        return next((reason for reason in reasons if reason is not None), manifest)

    def _candidates(self, asked: str, step: int | None) -> list[tuple[int, int]]:
        """(step, number of its folder) of what may be loaded, in the order in which it is tried."""
        found = [(one, number) for number, place in enumerate(self._places) for one in place.steps()]
        if not found:
            raise ResumeError(asked, "there is none", "start the run again, or give the folder of another run")
        if step is None:
            return sorted(found, key=lambda one: (-one[0], one[1]))
        steps = sorted({one for one, _ in found})
        if step not in steps:
            raise ResumeError(asked, f"there are those of {', '.join(map(str, steps))}", "choose one of them")
        return [one for one in found if one[0] == step]

    def _newest_sound(self) -> int | None:
        return max((step for place in self._places if (step := place.newest_sound()) is not None), default=None)

    def _check(self, place: CheckpointFolder, manifest: Manifest) -> None:
        """This rank's share of the files; the first rank also sees that they hold what the manifest says."""
        names = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
        place.check_files(manifest, names)
        if self._ranks.rank == 0:
            place.check_whole(manifest)

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes: of plain tensors that all ranks have, each is one rank's; all else as it is."""
        plain = {name: form_of(tensor) for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        if len(set(self._ranks.gather(frozenset(plain.items())))) > 1:
            return {**tensors}
        writers = deal_out({name: tensors[name].nbytes for name in plain}, self._ranks.size)
        return {
            name: tensor for name, tensor in tensors.items() if writers.get(name, self._ranks.rank) == self._ranks.rank
        }

    def _stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in CPU memory; the memory is used again by the next save of the same tensors, from torch 2.13 on."""
        if torch.__version__ < "2.13":  # whose stager closes itself once it has staged
            self._stager = DefaultStager(_staging_options())
        staged = self._stager.stage({name: tensor.detach() for name, tensor in tensors.items()})
        assert isinstance(staged, dict)
        return staged

    def _write(
        self, staged: dict[str, Tensor], finite: Sequence[str], mine: Manifest, memory: CheckpointFolder | None
    ) -> None:
        """Everything after staging; runs in the thread, on all ranks."""
        place = memory or self._folder
        asked = f"save the checkpoint of step {mine.step} in {place.checkpoints}"
        try:
            self._ranks.together(asked, lambda: _check_finite(asked, staged, finite))
            self._write_all(asked, staged, mine, memory)
        except BaseException as error:
            if self._ranks.rank == 0:
                place.abandon(mine.step)
            if isinstance(error, EvenlyError):
                raise
            raise CheckpointError(
                asked, f"{type(error).__name__}: {error}", "see the first error of the ranks"
            ) from error

    def _write_all(
        self, asked: str, staged: dict[str, Tensor], mine: Manifest, memory: CheckpointFolder | None
    ) -> None:
        ranks, place = self._ranks, memory or self._folder
        partial, recorder = place.partial(mine.step), ranks.group.recorder
        ranks.first(asked, lambda: place.begin(mine.step, new=memory is None))
        whole = _united(asked, ranks, mine)
        if memory is not None:
            ranks.first(asked, lambda: _check_room(memory, whole))
        parts = ranks.together(asked, lambda: save_tensors(staged, whole.tensors, partial, ranks.handle, recorder))
        files = {name: record for part in parts for name, record in part.items()}
        manifest = Manifest(whole.step, whole.score, files, whole.tensors, whole.values)
        ranks.first(asked, lambda: _commit(place, manifest, keep_last=KEEP_LAST if memory is None else 1))
        if self._second is not None and memory is None:
            self._copy(self._second, manifest, list(parts[ranks.rank]))

    def _copy(self, second: CheckpointFolder, manifest: Manifest, own_files: Sequence[str]) -> None:
        """Copies the checkpoint, which is valid, to the second folder. Where that fails, says so and goes on."""
        asked, ranks = f"copy the checkpoint of step {manifest.step} to {second.checkpoints}", self._ranks
        source = self._folder.path(manifest.step)
        try:
            ranks.first(asked, lambda: second.begin(manifest.step, new=False))
            ranks.together(asked, lambda: copy_files(source, second.partial(manifest.step), own_files))
            ranks.first(asked, lambda: second.commit(manifest))
            ranks.first(asked, second.prune)
        except CheckpointError as problem:
            if ranks.rank == 0:
                second.abandon(manifest.step)
                print(f"evenly: {asked}: {problem.found}: it is in {source} alone; the run goes on", file=sys.stderr)


def save_alone(folder: CheckpointFolder, snapshot: Snapshot) -> None:
    """Writes a snapshot that this rank holds whole, at once and without copies of tensors that are in CPU memory.

    Whoever calls it sees to it that no other rank writes the same step. Raises `OSError`, and what `save` raises.
    """
    values = {key: encode(value, f"values.{key}") for key, value in snapshot.values.items()}
    tensors = {name: tensor.detach().cpu() for name, tensor in snapshot.tensors.items()}
    forms = {name: form_of(tensor) for name, tensor in tensors.items()}
    asked = f"save the checkpoint of step {snapshot.step} in {folder.checkpoints}"
    _check_finite(asked, tensors, [name for name in tensors if name in snapshot.finite])
    folder.begin(snapshot.step)
    try:
        files = save_tensors(tensors, forms, folder.partial(snapshot.step), None)
        _commit(folder, Manifest(snapshot.step, None, files, forms, values), keep_last=KEEP_LAST)
    except BaseException:
        folder.abandon(snapshot.step)
        raise


def _check_finite(asked: str, staged: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raises `CheckpointError` for a tensor that has other numbers: a run could not go on from it."""
    for name in names:
        tensor = staged[name]
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # A sum of finite numbers may be beyond the type: only then each is looked at.
        if not (own.sum().isfinite() or own.isfinite().all()):
            raise CheckpointError(
                asked,
                f"parameter {name.removeprefix(MODEL)} is no finite number any more: an update has made it so",
                "go on from the checkpoint before, with a lower learning rate or clip_norm",
            )


def _commit(place: CheckpointFolder, manifest: Manifest, *, keep_last: int) -> None:
    partial = place.partial(manifest.step)
    there = sorted(path.name for path in partial.iterdir())
    if there != sorted(manifest.files):
        found = f"the ranks wrote {sorted(manifest.files)}, the first rank sees {there}"
        raise CheckpointError(f"save {partial}", found, "use a folder that all ranks share")
    try:
        find_pieces(partial, manifest.files, manifest.tensors)
    except Unsound as reason:
        raise CheckpointError(f"save {partial}", str(reason), "report this") from None
    place.commit(manifest)
    place.prune(keep_last)


def _check_room(memory: CheckpointFolder, manifest: Manifest) -> None:
    """Raises `CheckpointError` unless there is room for this snapshot, and for the next to be written besides it."""
    size = sum(size_bytes(form) for form in manifest.tensors.values())
    needed = size if memory.steps() else 2 * size
    status = os.statvfs(memory.checkpoints)
    free = min(status.f_bavail * status.f_frsize, free_memory_bytes())
    if free < needed:
        found = f"two copies of the state take {2 * size / 1e6:,.0f} MB, and there are {free / 1e6:,.0f} MB free for "
        found += "them" if needed > size else "the second"
        raise CheckpointError(f"keep snapshots in {memory.root}", found, "run without --snapshot, or free memory")


def _refusal(asked: str, reason: str, sound: int | None) -> CheckpointError:
    do = "there is no other sound checkpoint in this folder: start the run again"
    if sound is not None:
        do = f"resume from step {sound}, the newest sound checkpoint (--step {sound})"
    return CheckpointError(asked, reason, do)


def _staging_options() -> StagingOptions:
    on_gpu = torch.cuda.is_available()
    return StagingOptions(
        use_pinned_memory=on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu
    )


def _united(asked: str, ranks: Ranks, mine: Manifest) -> Manifest:
    """One manifest from those of all ranks, which may hold parts of it; the same one everywhere."""
    if len(set(ranks.gather(fingerprint(mine)))) == 1:
        return mine
    parts = ranks.gather(mine)
    return ranks.together(asked, lambda: _merged(parts))[0]


def _merged(parts: Sequence[Manifest]) -> Manifest:
    for name in ("step", "score"):
        merge([getattr(part, name) for part in parts], name)
    return Manifest(
        step=parts[0].step,
        score=parts[0].score,
        files={},
        tensors=_merged_forms(parts),
        values=merge([part.values for part in parts], "values"),
    )


def _merged_forms(parts: Sequence[Manifest]) -> dict[str, TensorForm]:
    forms: dict[str, TensorForm] = {}
    for part in parts:
        for name, form in part.tensors.items():
            if forms.setdefault(name, form) != form:
                raise ValueError(f"the ranks disagree about {name}: {forms[name]} and {form}")
    return forms


def _reason_or(act: Callable[[], T]) -> T | str:
    try:
        return act()
    except Unsound as reason:
        return str(reason)
