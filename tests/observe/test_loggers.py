"""Loggers: what they pass on, what they take up again, and what becomes of a run whose logger fails."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata, plugin_data_pb2
from torch import nn

import evenly
from evenly.errors import UserError
from evenly.observe.loggers import logger as common
from evenly.observe.loggers.choose import make_loggers
from evenly.observe.loggers.csv import CSVLogger, GrowingTable
from evenly.observe.loggers.logger import KeptRun, LoggedRun, Logger, LogRow, figures_of, flat_config, plain_name
from evenly.observe.loggers.tensorboard import TensorBoardLogger

CONFIG = {"settings": {"lr": 0.1, "name": "wide"}, "job": {"name": "j", "steps": 6}, "plan": "data=2"}


def begun(out: Path | None, *, step: int = 0, rank: int = 0) -> dict[str, Any]:
    return {"rank": rank, "out": out and str(out), "step": step, "config": CONFIG}


def log(logger: Logger, out: Path | None, steps: range, *, rank: int = 0) -> None:
    """As the recorder of a run does: a record for each step, an evaluation after every second."""
    logger.write("config", begun(out, step=steps.start - 1, rank=rank))
    for step in steps:
        logger.write("metrics", {"step": step, "loss": 1 / step, "memory_bytes": [3, 5], "skipped": "overflow"})
        if step % 2 == 0:
            logger.write("metrics", {"step": step, "eval_loss": 2.0 * step, "metrics": {"top": {"five": step}}})
    logger.write("events", {"event": "ended", "step": steps.stop - 1})
    logger.close()
    logger.close()


# --- what is passed on ---------------------------------------------------------------------------------


def test_figures_are_the_numbers_of_a_record_under_flat_names() -> None:
    plain = {"step": 3, "loss": 1.5, "left_out": 0, "skipped": None, "processor": "slow", "flag": True}
    record = {**plain, "memory_bytes": [4, 9, 5], "memory": [{"parameters": 3}],
              "metrics": {"accuracy": 0.5, "by": {"class": {"a": 1}}}}  # fmt: skip
    assert figures_of(record) == {
        "loss": 1.5, "left_out": 0, "memory_bytes": 9, "metrics/accuracy": 0.5, "metrics/by/class/a": 1
    }  # fmt: skip


def test_a_config_is_flat_and_names_are_those_that_services_allow() -> None:
    assert flat_config({"a": {"b": None, "c": (1, 2)}, "d": True}) == {"a/c": "(1, 2)", "d": True}
    assert plain_name("metrics/top[5] %") == "metrics/top_5_ _"


# --- csv -----------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_a_table_has_a_row_per_step_and_columns_that_come_later(tmp_path: Path) -> None:
    log(CSVLogger(), tmp_path, range(1, 4))
    assert rows_of(tmp_path / "metrics.csv") == [
        {"step": "1", "loss": "1.0", "memory_bytes": "5", "eval_loss": "", "metrics/top/five": ""},
        {"step": "2", "loss": "0.5", "memory_bytes": "5", "eval_loss": "4.0", "metrics/top/five": "2"},
        {"step": "3", "loss": str(1 / 3), "memory_bytes": "5", "eval_loss": "", "metrics/top/five": ""},
    ]
    assert [*tmp_path.glob("*.half")] == []


def test_a_table_that_goes_on_repeats_no_step(tmp_path: Path) -> None:
    path = tmp_path / "other" / "table.csv"
    log(CSVLogger(path), None, range(1, 6))
    log(CSVLogger(path), None, range(3, 7))
    assert [row["step"] for row in rows_of(path)] == ["1", "2", "3", "4", "5", "6"]
    assert [row["eval_loss"] for row in rows_of(path)] == ["", "4.0", "", "8.0", "", "12.0"]


def test_the_last_row_can_be_added_to_at_any_time(tmp_path: Path) -> None:
    table = GrowingTable(tmp_path / "t.csv", up_to=0)
    for step, values in ((1, {"a": 1.0}), (1, {"a": 1.0, "b": 2.0}), (1, {"a": 3.0}), (2, {"c": 4.0}), (2, {"b": 5.0})):
        table.add(step, values)
    table.close()
    assert [[*row.values()] for row in rows_of(tmp_path / "t.csv")] == [
        ["1", "3.0", "2.0", ""],
        ["2", "", "5.0", "4.0"],
    ]


# --- tensorboard ---------------------------------------------------------------------------------------


def test_tensorboard_reads_each_step_once_and_the_settings(tmp_path: Path) -> None:
    log(TensorBoardLogger(), tmp_path, range(1, 6))
    log(TensorBoardLogger(), tmp_path, range(4, 7))
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        (step, pytest.approx(1 / step)) for step in range(1, 7)
    ]
    assert [event.step for event in read.Scalars("metrics/top/five")] == [2, 4, 6]
    content = read.PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    found = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["settings/lr"].number_value == 0.1 and found["plan"].string_value == "data=2"


# --- services ------------------------------------------------------------------------------------------


def test_what_was_logged_of_a_step_is_not_logged_again(tmp_path: Path) -> None:
    path = tmp_path / "loggers" / "wandb.json"
    kept = KeptRun(path, "project")
    kept.id = "abc"
    kept.note([LogRow(3, 0.0, {"loss": 1.0}), LogRow(2, 0.0, {"loss": 1.0, "eval_loss": 1.0})])
    again = KeptRun(path, "project")
    assert again.id == "abc"
    assert again.left(LogRow(3, 0.0, {"loss": 1.0, "eval_loss": 2.0})) == {"eval_loss": 2.0}
    assert again.left(LogRow(4, 0.0, {"loss": 1.0})) == {"loss": 1.0}
    assert (KeptRun(path, "another").id, KeptRun(None, "project").id) == (None, None)


# --- what goes wrong -----------------------------------------------------------------------------------


class Failing(Logger):
    """Fails, or waits for ever, at the row of step 2 or as it opens."""

    name = "failing"

    def __init__(self, *, opens: bool = True, waits: bool = False) -> None:
        super().__init__()
        self.opens, self.waits, self.added = opens, waits, list[int]()

    def open(self, run: LoggedRun) -> None:
        if not self.opens:
            self._go_wrong()

    def add(self, rows: Sequence[LogRow]) -> None:
        for row in rows:
            self.added.append(row.step)
            if row.step == 2:
                self._go_wrong()

    def finish(self, *, failed: bool) -> None:
        raise AssertionError("it is over before")

    def _go_wrong(self) -> None:
        if self.waits:
            Event().wait(60)
        raise SystemExit("the network\nis gone")


@pytest.mark.parametrize("opens", [True, False])
def test_a_logger_that_fails_warns_once_and_is_left_out(
    opens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing(opens=opens)
    log(failing, tmp_path, range(1, 7))
    error = capsys.readouterr().err
    assert error == "evenly: nothing more is logged to failing: SystemExit: the network is gone\n"
    assert failing.added == ([1, 2] if opens else [])


@pytest.mark.parametrize("opens", [True, False])
def test_a_logger_that_hangs_holds_up_nothing(
    opens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit_s in (("OPEN_LIMIT_S", 0.2), ("END_LIMIT_S", 0.3), ("PATIENCE_S", 0.1), ("PAUSE_S", 0.05)):
        monkeypatch.setattr(common, name, limit_s)
    began_s = time.monotonic()
    log(Failing(opens=opens, waits=True), tmp_path, range(1, 7))
    assert time.monotonic() - began_s < 20
    error = capsys.readouterr().err
    assert "not all was written within 0 s of the end" in error and ("has not begun" in error) != opens


def test_records_that_pile_up_end_a_logger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OPEN_LIMIT_S", 0.1), ("SHORT_LIMIT_S", 0.2), ("PATIENCE_S", 0.1), ("MOST_ROWS", 2)):
        monkeypatch.setattr(common, name, value)
    log(Failing(opens=False, waits=True), tmp_path, range(1, 7))
    _, error = capsys.readouterr().err.splitlines()
    assert error == "evenly: nothing more is logged to failing: it is 2 records behind"


def test_only_the_main_rank_logs_and_a_place_is_needed_on_all(tmp_path: Path) -> None:
    log(CSVLogger(), tmp_path, range(1, 4), rank=1)
    assert [*tmp_path.iterdir()] == []
    for rank in (0, 1):
        with pytest.raises(UserError, match=r"no folder[^$]*CSVLogger\(PATH\)"):
            CSVLogger().write("config", begun(None, rank=rank))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["tensorbored"], r"no such logger[^$]*tensorboard, csv, wandb=PROJECT, mlflow=EXPERIMENT"),
        (["wandb"], "--log wandb=PROJECT"),
        (["mlflow="], "--log mlflow=EXPERIMENT"),
        (["csv=file"], "csv takes no name"),
        (["csv", "tensorboard", "csv"], "--log csv[^$]*twice"),
    ],
)
def test_loggers_that_are_named_wrongly(texts: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_loggers(texts)


@pytest.mark.parametrize(
    ("text", "missing", "line"),
    [
        ("tensorboard", "tensorboard", "pip install tensorboard"),
        ("wandb=p", "wandb", "pip install wandb"),
        ("mlflow=e", "alembic", "pip install mlflow-skinny sqlalchemy alembic"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    text: str, missing: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(UserError, match=rf"not installed: {missing}\n[^$]*{line}$"):
        make_loggers(["csv", text])
    assert [logger.name for logger in make_loggers(["csv"])] == ["csv"]


# --- a loop of one's own -------------------------------------------------------------------------------


def test_a_loop_of_ones_own_logs_what_it_does(tmp_path: Path) -> None:
    job = evenly.Job(
        model=lambda: nn.Linear(3, 1),
        loss=lambda model, x: model(x).square().mean(),
        data=torch.randn(10, 3, generator=torch.Generator().manual_seed(0)),  # pyright: ignore[reportArgumentType]
        eval_data=torch.ones(3, 3),  # pyright: ignore[reportArgumentType]
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25),
        global_batch=4,
        steps=5,
    )
    path = tmp_path / "own.csv"
    losses: list[float] = []
    with evenly.start(job, plan="single", sinks=[evenly.CSVLogger(path)]) as run:
        for batch in run.batches():
            losses.append(run.step(batch).loss)
        evaluation = run.evaluate()
    rows = rows_of(path)
    assert [float(row["loss"]) for row in rows] == losses
    assert [row["lr"] for row in rows] == ["0.25"] * 5 and float(rows[-1]["eval_loss"]) == evaluation.loss
