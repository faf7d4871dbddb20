"""Tensors in the files of one folder, by torch's distributed checkpoint, as safetensors.

Every rank writes files of its own; a tensor that several ranks have is written by one of them, a sharded
one in pieces. Reading asks for whatever pieces the reading ranks hold. No path here unpickles a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from evenly.checkpoint.folder import record_file
from evenly.checkpoint.manifest import FileRecord, TensorForm, Unsound, differences, first_of

# A file is built in memory before it is written: this bounds that memory.
FILE_BYTES = 1 << 30


def form_of(tensor: Tensor) -> TensorForm:
    return TensorForm(_dtype_name(tensor.dtype), tuple(tensor.shape))


def save_tensors(
    tensors: dict[str, Tensor], forms: Mapping[str, TensorForm], folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Write this rank's part of the tensors and sync it; a collective of the group.

    tensors: those that this rank has, in CPU memory. forms: those of all ranks.
    """
    writer, planner = _Writer(folder, forms), _Planner()
    if group is None:
        _save_alone(tensors, writer, planner)
    else:
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)


def read_tensors(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's tensors in place; a collective of the group. Forms must have been checked before."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    if group is None:
        _read_alone(tensors, reader, planner)
    else:
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group)


def own_files(folder: Path, rank: int) -> dict[str, FileRecord]:
    """name -> record of the files that this rank wrote."""
    return {path.name: record_file(path) for path in sorted(folder.glob(f"shard-{rank + 1:05d}-*"))}


def check_contents(folder: Path, forms: Mapping[str, TensorForm]) -> None:
    """See by the files' headers that every tensor is there, in its form and whole. Raises `Unsound`."""
    try:
        metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata()
    except Exception as error:
        raise Unsound(f"the header of a file is malformed ({error})") from None
    wrong = differences(_stored_forms(metadata), forms)
    if wrong:
        raise Unsound(f"its files and its manifest differ: {first_of(wrong)}")
    torn = [name for name in forms if not _is_whole(metadata, name)]
    if torn:
        raise Unsound(f"parts are missing of {first_of(torn)}")


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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _stored_forms(metadata: Metadata) -> dict[str, TensorForm]:
    stored = metadata.state_dict_metadata.items()
    tensors = {name: entry for name, entry in stored if isinstance(entry, TensorStorageMetadata)}
    return {name: TensorForm(_dtype_name(entry.properties.dtype), tuple(entry.size)) for name, entry in tensors.items()}


def _is_whole(metadata: Metadata, name: str) -> bool:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)


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


def _save_alone(tensors: dict[str, Tensor], writer: _Writer, planner: _Planner) -> None:
    """The calls of `dcp.save` in their order, for one process; `dcp.save` warns when it has no group."""
    planner.set_up_planner(tensors, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = writer.write_data(plan, planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def _read_alone(
    tensors: dict[str, Tensor], reader: dcp.HuggingFaceStorageReader, planner: dcp.DefaultLoadPlanner
) -> None:
    """The calls of `dcp.load` in their order, for one process; `dcp.load` warns when it has no group."""
    metadata = reader.read_metadata()
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(plans[0]), planner).wait()
