"""`evenly run --log`: what the real packages have written, read back; a run that goes on."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import JOB, evenly

from evenly.observe.loggers import logger as common

WANDB_BLOCK, WANDB_HEADER, RECORD_HEADER = 32768, 7, 7


def wandb_records(path: Path) -> Iterator[Any]:
    """What wandb has written offline: LevelDB's log format, of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), WANDB_HEADER, b""
    assert data[:4] == b":W&B"
    while at + RECORD_HEADER <= len(data):
        if WANDB_BLOCK - at % WANDB_BLOCK < RECORD_HEADER:
            at += WANDB_BLOCK - at % WANDB_BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        if kind in (1, 4):  # whole, or the last of several
            yield Record.FromString(parts)
            parts = b""


def history(records: list[Any]) -> list[dict[str, float]]:
    """The rows that were logged, without wandb's own."""
    rows: list[dict[str, float]] = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow itself
def test_all_loggers_have_each_step_once_though_the_run_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient  # as below: each takes seconds
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    loggers = [word for text in ("tensorboard", "csv", "wandb=proj", "mlflow=exp") for word in ("--log", text)]
    settings = ("--devices", 2, "--out", "out", "--set", "save_every=2", *loggers)
    done = evenly("run", JOB, "--steps", 5, *settings, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # Of step 5, all but the loggers has gone back: it is repeated.
    done = evenly("run", JOB, "--steps", 7, "--step", 4, *settings, folder=tmp_path)
    assert done.returncode == 0 and "nothing more is logged" not in done.stderr, done.stderr

    out = tmp_path / "out"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    evaluations = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 5, 6, 7] and [*evaluations] == [5, 7]

    read = EventAccumulator(str(out / "tensorboard")).Reload()
    close = {step: pytest.approx(loss, rel=1e-6) for step, loss in losses.items()}
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [*close.items()]
    assert {"lr", "grad_norm", "samples_per_s", "eval_loss"} <= {*read.Tags()["scalars"]}

    with (out / "metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert {int(row["step"]): float(row["loss"]) for row in rows} == losses and len(rows) == 7
    assert float(rows[-1]["eval_loss"]) == evaluations[7]

    client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("exp")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == [*losses.items()]
    assert run.info.status == "FINISHED" and run.info.run_name == "out"
    assert run.data.params["settings/layers"] == "1" and run.data.params["job/global_batch"] == "10"
    assert run.data.params["plan"].startswith("data=2")

    files = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    records = [[*wandb_records(path)] for path in files]
    logged = [row for one in records for row in history(one)]
    assert {row["step"]: row["loss"] for row in logged if "loss" in row} == losses
    assert [row["step"] for row in logged if "loss" in row] == [*losses]
    assert {row["step"]: row["eval_loss"] for row in logged if "eval_loss" in row} == evaluations
    runs = [record.run for one in records for record in one if record.WhichOneof("record_type") == "run"]
    assert len(files) == 2 and {(run.project, run.run_id) for run in runs} == {("proj", runs[0].run_id)}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["settings"]["steps"] == 8 and config["job"]["name"] == "cli"


def test_a_missing_package_is_named_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "find_spec", lambda name: None)
    done = evenly("run", JOB, "--log", "wandb=p", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.endswith("to do: pip install wandb\n")
    assert [*tmp_path.iterdir()] == []
