from __future__ import annotations

from pathlib import Path

import pytest
import torch
from records import record_file
from safetensors import safe_open

from evenly.checkpoint import writer
from evenly.checkpoint.tensors import save_tensors
from evenly.checkpoint.writer import write_file
from evenly.observe.recorder import Recorder


def test_a_file_is_read_by_the_library_and_its_record_is_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "double": torch.randn(3, 2, dtype=torch.float64),
        "half": torch.randn(7).to(torch.bfloat16),
        "large": torch.randn(3, writer.PIECE_BYTES // 8 + 1),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3.5),
    }
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    record = write_file(path, {name: (tensor, (0,) * tensor.dim()) for name, tensor in tensors.items()})
    assert record == record_file(path)
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert file.get_tensor(name).dtype == tensor.dtype and torch.equal(file.get_tensor(name), tensor)


def test_whoever_watches_sees_what_is_written_and_that_it_gets_on(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Watched(Recorder):
        def tick(self) -> None:
            super().tick()
            seen.append((self.writing, self._ticks))

    folder, recorder = tmp_path / ".partial-step-00000006", Watched(tmp_path / "0.record", 0)
    folder.mkdir()
    large = torch.zeros(3, writer.PIECE_BYTES // 4)
    save_tensors({"large": large}, {"large": writer.form_of(large)}, folder, None, recorder)
    recorder.close()
    assert seen == [("step-00000006", n) for n in range(1, 5)] and recorder.writing == ""  # a header and three pieces


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "x", {})
