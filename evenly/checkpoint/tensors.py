"""Tensors in the files of one folder, by torch's distributed checkpoint, as safetensors.

Every rank writes files of its own; a tensor that several ranks have is written by one of them, a sharded
one in pieces. Reading asks for whatever pieces the reading ranks hold. No path here unpickles a file.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from evenly.checkpoint.folder import record_file
from evenly.checkpoint.manifest import FileRecord, TensorForm

# A file is built in memory before it is written: this bounds that memory.
FILE_BYTES = 1 << 30


def form_of(tensor: Tensor) -> TensorForm:
    return TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def save_tensors(
    tensors: dict[str, Tensor], forms: Mapping[str, TensorForm], folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's part of the tensors and sync it; a collective of the group.

    tensors: those that this rank has, in CPU memory. forms: those of all ranks.
    """
    with _quiet():
        dcp.save(
            tensors,
            storage_writer=_Writer(folder, forms),
            planner=_Planner(),
            process_group=group,
            no_dist=group is None,
        )


def read_tensors(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's tensors in place; a collective of the group. Forms must have been checked before."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    with _quiet():
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


@contextmanager
def _quiet() -> Generator[None]:
    """Within, torch does not warn that a process without a group saves or reads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def own_files(folder: Path, rank: int) -> dict[str, FileRecord]:
    """name -> record of the files that this rank wrote."""
    return {path.name: record_file(path) for path in sorted(folder.glob(f"shard-{rank + 1:05d}-*"))}


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
    """Files of at most `FILE_BYTES`, or of one tensor."""

    def __init__(self, path: Path, forms: Mapping[str, TensorForm]) -> None:
        super().__init__(str(path), fqn_to_index_mapping=file_numbers(forms), save_distributed=True)
        self.per_thread_copy_ahead = 0  # everything is in CPU memory already; do not touch a device
