"""What ranks that fail have left in memory is gone on from, with the numbers of a run that nothing has disturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import evenly
from evenly.checkpoint import store as store_module
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.shared_memory import keep_newest, keep_snapshot, memory_folder, open_memory
from evenly.checkpoint.state import parameter_of, read_state
from evenly.checkpoint.store import CheckpointStore, Snapshot
from evenly.errors import CheckpointError
from evenly.launcher.agent import FailedRank, Launch, start_ranks
from evenly.plan import parse_plan
from evenly.train.options import RunOptions
from evenly.train.run import start_with_options

STEPS, LAST = 8, 6


def loss(model: torch.nn.Module, x: torch.Tensor) -> evenly.Loss:
    return evenly.Loss(model(x).square().sum(), len(x))


def job() -> evenly.Job:
    return evenly.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 2)),
        loss=loss,
        data=[torch.arange(3.0, dtype=torch.float64) * n / 64 for n in range(64)],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        global_batch=8,
        microbatch=2,
        steps=STEPS,
        precision="float64",
    )


def train(plan: str, out: Path, *, ends: str = "", resume: bool = False) -> tuple[int, dict[str, torch.Tensor]]:
    """The step that the run begins after, and its state at the end; after step LAST it `ends` by a kill or an error."""
    options = RunOptions(parse_plan(plan) if plan else None, out=out, resume=resume, snapshot=None if resume else 1)
    with start_with_options(job(), options) as run:
        before = run.steps_done
        for batch in run.batches():
            if ends and run.steps_done == LAST:
                if ends == "kill" and run.world.rank == run.world.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if ends == "error":
                    assert run.store is not None
                    run.store.close()  # this process lives on: the last snapshot is complete
                    raise OSError("broken off")
            run.step(batch)
        with run.state_as_saved():
            tensors, _ = read_state(run.model, run.optimizer)
            copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            return before, {n: run.composed.full_view(parameter_of(n), t) if t.dim() else t for n, t in copies.items()}


@pytest.mark.full_but("zero3")
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_ranks_that_were_killed_lose_one_step_at_most(tmp_path: Path, plan: str) -> None:
    def on_ranks(out: str, **how: Any) -> tuple[int, dict[str, torch.Tensor]]:
        return start_ranks(_train, ((plan, tmp_path / out), how), Launch(devices=2))[0]

    _, expected = on_ranks("alone")
    assert not memory_folder(tmp_path / "alone").root.exists()
    with pytest.raises(FailedRank):
        on_ranks("killed", ends="kill")
    assert CheckpointFolder(tmp_path / "killed").steps() == []
    before, found = on_ranks("killed", resume=True)
    assert LAST - 1 <= before <= LAST
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    memory_folder(tmp_path / "killed").discard()


def _train(arguments: tuple[str, Path], how: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    return train(*arguments, **how)


@pytest.fixture
def broken_off(tmp_path: Path) -> Path:
    with pytest.raises(OSError, match="broken off"):
        train("", tmp_path / "run", ends="error")
    return tmp_path / "run"


def test_a_torn_snapshot_is_not_taken(broken_off: Path) -> None:
    memory = memory_folder(broken_off)
    assert memory.steps() == [LAST]  # the one before has made room
    file = next(memory.path(LAST).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert keep_newest(broken_off) is None and CheckpointFolder(broken_off).steps() == []
    memory.discard()


def test_a_snapshot_becomes_a_checkpoint_unless_one_is_newer(broken_off: Path) -> None:
    assert keep_newest(broken_off) == LAST and CheckpointFolder(broken_off).is_sound(LAST)
    assert keep_newest(broken_off) is None
    memory_folder(broken_off).discard()
    assert keep_newest(broken_off) is None


def test_a_disk_that_takes_no_snapshot_is_said(
    broken_off: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evenly.checkpoint.shared_memory.copy_files", full)
    keep_snapshot(broken_off)
    assert "No space left on device" in capfd.readouterr().err
    assert not CheckpointFolder(broken_off).partial(LAST).exists()
    memory_folder(broken_off).discard()


def test_too_little_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "free_memory_bytes", lambda: 100)
    store, memory = CheckpointStore(tmp_path / "run"), open_memory(tmp_path / "run")
    store.save(Snapshot(1, {"model.w": torch.ones(100)}, {}), memory=memory)
    with pytest.raises(CheckpointError, match="two copies of the state take"):
        store.finish()
    store.close()
    assert memory.steps() == []
    memory.discard()
