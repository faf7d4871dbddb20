"""A run that has no room goes on from the state of the step's start, with the numbers of a run that had room."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import evenly
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.store import CheckpointStore
from evenly.launcher.agent import FailedRank
from evenly.launcher.rank import Kind
from evenly.observe.attempts import ended_attempts, note_start, plans_started
from evenly.observe.run_folder import RunFolder
from evenly.plan import parse_plan
from evenly.report.run import course_rows, read_run
from evenly.train import look_optimizer
from evenly.train.look_optimizer import SAVED
from evenly.train.loop import train
from evenly.train.no_room import options_with_less, starts_of, steps_recorded
from evenly.train.options import RunOptions
from evenly.train.run import start_with_options

STEPS = 4
TRIED = SAVED + 2 * (look_optimizer.STEPS - SAVED)  # steps of the optimizer, whose class is not known, before the first
# The lock of a run that has failed is released with its process.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in.*lock:pytest.PytestUnraisableExceptionWarning")


class Counter(nn.Module):
    """A buffer that follows no rule, which one device lets change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum()  # pyright: ignore
        return x + 1e-3 * self.seen


class Lacking:
    """Raises for want of memory at its `at`-th call, once."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError


class Backward(torch.autograd.Function):
    lacking: Callable[[], None]

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        Backward.lacking()
        return gradients[0]


def job(place: str = "", lacking: Lacking | None = None) -> evenly.Job:
    lacking = lacking or Lacking(0)
    Backward.lacking = lacking

    def loss(model: nn.Module, x: torch.Tensor) -> evenly.Loss:
        y = model(x)
        if place == ("forward" if torch.is_grad_enabled() else "evaluation"):
            lacking()
        return evenly.Loss((Backward.apply(y) if place == "backward" else y).square().sum(), len(x))  # pyright: ignore

    class Optimizer(torch.optim.AdamW):
        def step(self, closure: object = None) -> None:  # pyright: ignore
            super().step()
            if place == "update":
                lacking()

    return evenly.Job(
        model=lambda: nn.Sequential(
            nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.2), Counter(), nn.Linear(4, 2)
        ),
        loss=loss,
        data=[torch.sin(torch.arange(3.0, dtype=torch.float64) * n) for n in range(64)],
        eval_data=[torch.cos(torch.arange(3.0, dtype=torch.float64) * n) for n in range(6)],
        optimizer=lambda parameters: Optimizer(parameters, lr=1e-2),
        global_batch=8,
        microbatch=4,
        steps=STEPS,
        save_every=None,
        precision="float64",
    )


def state_of(out: Path) -> dict[str, torch.Tensor]:
    checkpoint = CheckpointStore(out).load(STEPS)
    into = {name: torch.empty(form.shape, dtype=getattr(torch, form.dtype)) for name, form in checkpoint.forms.items()}
    checkpoint.read(into)
    return into


def run(out: Path, *lacking: object, resume: bool = False) -> None:
    with start_with_options(job(*lacking), RunOptions(parse_plan("single"), out, resume=resume)) as run:  # pyright: ignore
        train(run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    out = tmp_path_factory.mktemp("alone")
    run(out)
    return state_of(out)


@pytest.mark.parametrize(
    ("place", "at", "kept"),
    [
        ("forward", 2, []),  # in the first step: the beginning is as good
        ("forward", 6, [2]),  # in the second microbatch of the third step
        ("backward", 6, [2]),
        ("update", TRIED + 3, []),  # half an update may be done
        ("evaluation", 1, [4]),
    ],
)
def test_the_state_of_the_steps_start_is_kept(
    alone: dict[str, torch.Tensor], tmp_path: Path, place: str, at: int, kept: list[int]
) -> None:
    with pytest.raises(MemoryError):
        run(tmp_path / "out", place, Lacking(at))
    assert CheckpointFolder(tmp_path / "out").steps() == kept
    assert all(CheckpointFolder(tmp_path / "out").is_sound(step) for step in kept)
    run(tmp_path / "out", resume=bool(kept))
    found = state_of(tmp_path / "out")
    assert found.keys() == alone.keys() and all(torch.equal(found[name], alone[name]) for name in alone)
    lines = [json.loads(line) for line in RunFolder(tmp_path / "out").metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [STEPS]


class Averaging(nn.Module):
    """A block that keeps a moving average of what it is given, and makes no use of it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * x.mean(0))  # pyright: ignore
        return self.map(x).tanh()


def test_a_recomputation_has_not_changed_the_buffers_that_are_kept(tmp_path: Path) -> None:
    plan = parse_plan("dp replicas=2 recompute=full")

    def end_in(out: Path, lacking: Lacking, *, resume: bool = False) -> None:
        base = job("backward", lacking)

        def loss(model: nn.Module, x: torch.Tensor) -> evenly.Loss:
            return evenly.Loss(model(Backward.apply(x.requires_grad_())).square().sum(), len(x))  # after the blocks

        averaging = replace(base, model=lambda: nn.Sequential(Averaging(), Averaging(), nn.Linear(3, 2)), loss=loss)
        with start_with_options(averaging, RunOptions(plan, out, resume=resume)) as started:
            train(started)

    end_in(tmp_path / "alone", Lacking(0))
    with pytest.raises(MemoryError):
        end_in(tmp_path / "out", Lacking(6 + 6))  # of which the look before the first step takes six
    assert CheckpointFolder(tmp_path / "out").steps() == [2]
    end_in(tmp_path / "out", Lacking(0), resume=True)
    found, alone = state_of(tmp_path / "out"), state_of(tmp_path / "alone")
    assert sum("average" in name for name in alone) == 2
    assert found.keys() == alone.keys() and all(torch.equal(found[name], alone[name]) for name in alone)


def test_a_state_that_is_due_for_an_evaluation_in_a_loop_of_ones_own_is_not_kept(tmp_path: Path) -> None:
    with start_with_options(job("evaluation", Lacking(1)), RunOptions(parse_plan("single"), tmp_path)) as run:
        run.step(next(run.batches()))
        with pytest.raises(MemoryError):
            run.evaluate()
        assert CheckpointFolder(tmp_path).steps() == []


def test_a_disk_that_takes_no_state_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("evenly.checkpoint.store.save_tensors", full)
    with pytest.raises(MemoryError):
        run(tmp_path / "out", "forward", Lacking(6))
    assert "the state after step 2 cannot be saved: [Errno 28]" in capsys.readouterr().err
    assert not CheckpointFolder(tmp_path / "out").partial(2).exists()


def test_what_a_failed_step_has_left_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations and gradients are gone before the state is written."""
    left: list[int] = []
    results: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(
        "evenly.checkpoint.store.save_alone", lambda *_: left.append(sum(one() is not None for one in results))
    )

    def loss(model: nn.Module, x: torch.Tensor) -> evenly.Loss:
        y = model(x)
        results.append(weakref.ref(y))
        if len(results) == 6:
            raise MemoryError
        return evenly.Loss(y.square().sum(), len(x))

    with (
        pytest.raises(MemoryError),
        start_with_options(replace(job(), loss=loss), RunOptions(parse_plan("single"), tmp_path)) as run,
    ):
        train(run)
    assert left == [0]
    assert run.store is not None
    run.store.close()  # which a failed rank leaves to its end


# --- the launcher ---------------------------------------------------------------------------------------


def failed(found: str = "it had no room: MemoryError", *, no_room: bool = True, exit_code: int = 1) -> FailedRank:
    kind: Kind = "memory" if no_room else "error"
    return FailedRank("rank 1 failed at step 3", found, "", rank=1, exit_code=exit_code, step=3, kind=kind)


def test_plans_that_had_no_room_are_noted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, options = RunFolder(tmp_path), RunOptions(out=tmp_path)
    note_start(folder, "data=4", new=True)
    assert starts_of(options) == 0 and starts_of(replace(options, resume=True)) == 1
    note_start(folder, "data=2 precision=float64 exact=rounding", new=True)
    again = options_with_less(failed("it had no room:\nMemoryError"), options, starts_of(options))
    assert again is not None
    assert again.no_room == ("data=2 precision=float64 exact=rounding",) and again.long_step == 2 and not again.resume
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "trying a plan that needs less memory, from the beginning" in said
    assert options_with_less(failed(), again, starts_of(again)) is None  # no plan was found: the ranks did not start
    note_start(folder, "data=2 zero=3", new=False)
    damaged = failed("it is another job's", no_room=False, exit_code=2)
    damaged.resuming = True
    assert options_with_less(damaged, again, 1) is None
    refused = options_with_less(failed("zero=3 cannot", no_room=False, exit_code=2), again, 1)
    assert refused is not None and refused.no_room == again.no_room and refused.refused == ("data=2 zero=3",)
    note_start(folder, "data=2 zero=2", new=False)
    assert options_with_less(failed("a bug", no_room=False), refused, 2) is None
    assert options_with_less(failed("zero=2 cannot", no_room=False, exit_code=2), RunOptions(out=tmp_path), 2) is None
    assert plans_started(folder)[0] == ended_attempts(folder)[0].plan and len(ended_attempts(folder)) == 2
    folder.plan.write_text("{}")
    folder.metrics.touch()
    rows = [text for name, text in course_rows(read_run(tmp_path)) if name == "no room"]
    assert rows[0].startswith("data=2 precision=float64 exact=rounding: rank 1 at step 3: it had no room: MemoryError")
    assert rows[1] == "data=2 zero=3: rank 1 at step 3: zero=3 cannot; went on from the beginning"


def test_a_rank_that_was_killed_was_in_the_step_after_those_recorded(tmp_path: Path) -> None:
    folder, killed = RunFolder(tmp_path), failed()
    killed.step = None
    note_start(folder, "data=2", new=True)
    folder.metrics.write_text('{"step": 6, "loss": 1.0}\n{"step": 6, "eval_loss": 1.0}\n')
    again = options_with_less(killed, RunOptions(out=tmp_path), 0)
    assert again is not None and again.long_step == 6
    folder.metrics.write_text('{"step": 6, "loss"')
    assert steps_recorded(folder) == 0


def test_a_damaged_record_of_plans_is_less_and_no_error(tmp_path: Path) -> None:
    RunFolder(tmp_path).attempts.write_text(
        '{"plan": 3}\n[1]\n{"plan": "data=2", "ended"\n{"plan": "x", "ended": "no"}\n'
    )
    assert plans_started(RunFolder(tmp_path)) == [] and ended_attempts(RunFolder(tmp_path)) == []


def test_options_for_another_plan_reach_a_script() -> None:
    options = RunOptions(no_room=("data=2",), refused=("data=2 zero=3",), long_step=4)
    assert RunOptions.from_text(options.to_text()) == options
