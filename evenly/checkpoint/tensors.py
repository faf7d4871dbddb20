"""Tensors in the files of one folder, by torch's distributed checkpoint, as safetensors.

Every rank writes files of its own (`writer`); a tensor that several ranks have is written by one of them, a sharded
one in pieces. Reading asks for whatever pieces the reading ranks hold. No path here unpickles a file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from evenly.checkpoint.folder import PARTIAL
from evenly.checkpoint.manifest import FileRecord, TensorForm
from evenly.checkpoint.writer import write_file
from evenly.data.alone import all_ranks
from evenly.observe.recorder import Recorder

FILE_BYTES = 1 << 30  # of a file, unless one tensor has more


def save_tensors(
    tensors: dict[str, Tensor],
    forms: Mapping[str, TensorForm],
    folder: Path,
    group: dist.ProcessGroup | None,
    recorder: Recorder | None = None,
) -> dict[str, FileRecord]:
    """Write this rank's part of the tensors and sync it; what is in each of its files. A collective of the group.

    tensors: those that this rank has, in CPU memory. forms: those of all ranks. recorder: of this rank.
    """
    writer = _Writer(folder, forms, 0 if group is None else group.rank(), recorder)
    with _quiet(), all_ranks():
        dcp.save(tensors, storage_writer=writer, planner=_Planner(), process_group=group, no_dist=group is None)
    return writer.records


def read_tensors(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's tensors in place; a collective of the group. Forms must have been checked before."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    with _quiet(), all_ranks():
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


@contextmanager
def _quiet() -> Generator[None]:
    """Within, torch does not warn that a process without a group saves or reads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def file_numbers(forms: Mapping[str, TensorForm], file_bytes: int = FILE_BYTES) -> dict[str, int]:
    """name -> number of the file (from 1) of its tensor, filled in the order of names."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name in sorted(forms):
        size = math.prod(forms[name].shape) * getattr(torch, forms[name].dtype).itemsize
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


class _Planner(dcp.DefaultSavePlanner):
    """Contiguous tensors only, as safetensors wants them; a copy is made where one is not."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        return super().transform_object(write_item, object).contiguous()


class _Writer(dcp.HuggingFaceStorageWriter):
    """Files of at most `FILE_BYTES`, or of one tensor, named as torch names them.

    records: of the files that were written, by name.
    """

    def __init__(
        self, folder: Path, forms: Mapping[str, TensorForm], rank: int, recorder: Recorder | None = None
    ) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.records: dict[str, FileRecord] = {}
        self._folder, self._rank, self._numbers = folder, rank, file_numbers(forms)
        self._recorder = recorder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the tensors of `plan`, which are in CPU memory already."""
        files: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            files.setdefault(self._numbers[item.index.fqn], []).append(item)
        for number, items in files.items():
            name = f"shard-{self._rank + 1:05d}-model-{number:05d}-of-{max(self._numbers.values()):05d}.safetensors"
            parts = {item.index.fqn: _part(item, planner) for item in items}
            with _noted(self._recorder, self._folder.name.removeprefix(PARTIAL)) as tick:
                self.records[name] = write_file(self._folder / name, parts, tick)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done


@contextmanager
def _noted(recorder: Recorder | None, what: str) -> Generator[Callable[[], None]]:
    """Within, whoever watches this rank sees that it writes, and by what is yielded that it gets on."""
    if recorder is None:
        yield lambda: None
        return
    recorder.writing = what
    try:
        yield recorder.tick
    finally:
        recorder.writing = ""


def _part(item: WriteItem, planner: SavePlanner) -> tuple[Tensor, Sequence[int]]:
    assert item.tensor_data is not None
    return cast("Tensor", planner.resolve_data(item)), item.tensor_data.chunk.offsets
