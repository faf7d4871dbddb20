"""Texts that are no plans, clusters, models, records: each class that `benchmarks/fuzz` has found, in a sentence."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # for benchmarks

from benchmarks.fuzz import fuzz
from evenly.cli.export import _parse_step
from evenly.cli.main import main
from evenly.errors import UserError
from evenly.hardware.cluster_file import read_cluster
from evenly.hardware.cluster_text import parse_cluster
from evenly.jobfile import check_settings

FILE = 'nodes = 1\ndevices = {devices}\nkind = "cpu"\n{more}\n'
DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "text", [f"{DIGITS}xH100", f"2x{DIGITS}xH100", "9999999999x8xH100", "9999x9999xH100", f"2x8xH100@{DIGITS}"]
)
def test_a_cluster_text_with_numbers_beyond_all_machines(text: str) -> None:
    with pytest.raises(UserError, match=r"more than 1,000,000 devices|is no number of Gb/s below"):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("devices", "more"),
    [
        ("9999999999999999999999999", ""),
        ("2000000", ""),
        (DIGITS, ""),
        ("2", f"network_gbit_per_s = 1{'0' * 400}"),
        ("2", "network_gbit_per_s = inf"),
        ("2", f"[links.all_reduce.{DIGITS}]\nalpha_s = 1.0\nbeta_s_per_byte = 1.0"),
        ("2", f"[rates.matmul.float32]\n{DIGITS} = 1.0"),
        ("2", "[device]\ndomain = 9999999999999999999999999"),
        ("2", "[device]\ndomain = 2.5"),
        ("2", f"[device]\nmemory_gib = 1{'0' * 400}"),
    ],
)
def test_a_cluster_file_with_numbers_beyond_all_machines(devices: str, more: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(FILE.format(devices=devices, more=more))
    with pytest.raises(UserError):
        _ = read_cluster(path).device


@pytest.mark.parametrize(
    "arguments",
    [
        ["transformer:layers=12,hidden=64,heads=4,patch=30000000", "--cluster", "1xV100", "--sequence", "128"],
        ["transformer:layers=12,hidden=64,heads=4,vocab=30000000", "--cluster", "2xT4"],
        ["transformer:layers=4,hidden=64,heads=4", "--cluster", "8xH100", "--max-devices", "9999999999999999999999"],
    ],
)
def test_a_search_ends(arguments: list[str]) -> None:
    """Within the fuzzer's limit of processor time."""
    assert fuzz.outcome(lambda: fuzz.command(["plan", *arguments, "--top", "1"]))[0] in ("accepted", "refused")


def test_a_name_that_is_no_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"job": "\\ud800", "plan": "data=1", "world": 1, "steps": 1}')
    (tmp_path / "metrics.jsonl").write_text("")
    with (
        mock.patch.object(sys, "argv", ["evenly", "report", str(tmp_path)]),
        contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert ended.value.code in (None, 0) and (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", f'{{"plan": "data=1", "world": 1{"0" * 4000}}}'),
        ("plan.json", f'{{"plan": "data=1", "predicted": {{"step_s": 1{"0" * 400}}}}}'),
        ("timeline/rank0.jsonl", json.dumps({**fuzz.SPAN, "begin_s": 10**400}) + "\n"),
    ],
)
def test_a_run_folder_with_numbers_that_no_run_writes(name: str, text: str, tmp_path: Path) -> None:
    fuzz.put(tmp_path / "plan.json", json.dumps(fuzz.PLAN_FILE))
    fuzz.put(tmp_path / "metrics.jsonl", json.dumps(fuzz.METRIC) + "\n")
    fuzz.put(tmp_path / name, text)
    assert fuzz.outcome(lambda: fuzz.command(["report", str(tmp_path)]))[0] == "refused"


def test_a_step_and_a_job_beyond_all_measure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is no step"):
        _parse_step(DIGITS)
    path = fuzz.put(tmp_path / "job.py", "(" * 300 + "[" * 300)
    with pytest.raises(UserError, match="it is not Python"):
        check_settings(path, {"a": 1})
    with pytest.raises(UserError, match="memory_gib"):
        _ = replace(parse_cluster("2xcpu"), own={"memory_gib": 1e-320}).device


def test_a_few_inputs_end_in_words() -> None:
    found = [(number, kind, trace) for number, kind, how, _, trace in fuzz.inputs(1, iter(range(60))) if how in FAULTS]
    assert found == []


def test_the_fuzzer_knows_a_traceback_from_a_refusal() -> None:
    def refuse() -> None:
        raise UserError("asked", "found", "do")

    assert fuzz.outcome(refuse) == ("refused", "")
    assert fuzz.outcome(lambda: None) == ("accepted", "")
    assert fuzz.outcome(lambda: int("x"))[0] == "traceback"


FAULTS = ("hang", "traceback")
