"""A run goes on from the newest checkpoint that is sound, or from the one that is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import evenly
from evenly.checkpoint.folder import CheckpointFolder
from evenly.errors import CheckpointError
from evenly.observe.run_folder import RunFolder
from evenly.train.options import RunOptions
from evenly.train.run import start_with_options


def job() -> evenly.Job:
    return evenly.Job(
        model=lambda: torch.nn.Linear(3, 2),
        loss=lambda model, x: evenly.Loss(model(x).square().sum(), len(x)),
        data=[torch.ones(3) * n for n in range(64)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        global_batch=8,
        microbatch=2,
        steps=8,
    )


def trained(out: Path, steps: int, step: int | None = None, *, resume: bool = False) -> int:
    """The step that a run of so many steps begins after; it saves every other one."""
    with start_with_options(job(), RunOptions(out=out, steps=steps, resume=resume, step=step)) as run:
        before = run.steps_done
        for batch in run.batches():
            run.step(batch)
            if run.steps_done % 2 == 0:
                run.save()
    return before


def damage(out: Path, step: int) -> None:
    file = next(CheckpointFolder(out).path(step).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def test_the_newest_sound_checkpoint_is_gone_on_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert trained(tmp_path, 6) == 0
    damage(tmp_path, 6)
    (tmp_path / "checkpoints" / "step-00000007").mkdir()  # empty
    with pytest.raises(CheckpointError, match=r"altered.*\n.*resume from step 4, .* \(--step 4\)"):
        trained(tmp_path, 6, step=6, resume=True)
    assert trained(tmp_path, 2, step=2, resume=True) == 2
    capfd.readouterr()
    assert trained(tmp_path, 8, resume=True) == 4
    assert (
        "the checkpoint of step 7 is not sound (manifest.json is missing): going on from step 4"
        in capfd.readouterr().err
    )
    assert trained(tmp_path, 8, resume=True) == 8
    assert capfd.readouterr().err == ""


def test_a_start_that_has_failed_holds_no_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    folder.metrics.touch()
    assert not folder.holds_run
    folder.metrics.write_text("{}\n")
    assert folder.holds_run
    folder.metrics.unlink()
    (folder.checkpoints / "step-00000002").mkdir()
    assert folder.holds_run
