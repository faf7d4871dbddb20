"""The reference has every option, plan key, field, row and variable that the code has, in tables that can be read."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2]))  # docs is no installed package

from docs.generate_reference import (
    KEYS,
    OF_LAUNCHERS,
    OTHER_ROWS,
    VARIABLES,
    commands,
    entries,
    explained,
    meaning_of,
    pages,
    parameters,
    source_entries,
    values_of,
)
from docs.page_text import ROOT
from evenly.cli.main import app
from evenly.job import EMA, SWA, Job, Loss, Phase
from evenly.observe.run_folder import RunFolder
from evenly.observe.slow import SlowRank
from evenly.plan.spec import NAMED, READERS
from evenly.train.recorder import RunRecorder
from evenly.train.reports import Evaluation, StepReport

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def cells(page: str) -> list[list[str]]:
    """The rows of all tables of a page, without their heads."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in pages()[page].splitlines()
        if line.startswith("|") and not line.startswith("| ---")
    ]


@pytest.mark.parametrize("name", [name for name, _ in commands()])
def test_every_option_of_a_command_is_there(name: str) -> None:
    (command,) = (command for one, command in commands() if one == name)
    options = {one.name for one in parameters(command) if one.name.startswith("-")}
    help_text = CliRunner().invoke(app, [*name.split()[1:], "--help"]).output
    usage_of_options = help_text[
        help_text.index("--help") if "Options:" not in help_text else help_text.index("Options:") :
    ]
    assert {one for one in OPTION.findall(usage_of_options) if one in options or one == "--help"} == {
        *options,
        "--help",
    }
    section = pages()["commands.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert [one for one in options if f"<code>{one}" not in section] == []
    assert all(one.help for one in parameters(command))


def test_every_plan_key_is_there_with_its_values_and_meaning() -> None:
    rows = {row[0]: row for row in cells("plan.md") if len(row) == 4}
    assert {f"<code>{key}</code>".replace("_", "&#95;") for key in READERS} <= {*rows}
    assert {*KEYS} == {*READERS}
    assert all(meaning_of(key) for key in READERS)
    assert values_of("zero") == "one of 0, 1, 2, 3"
    assert values_of("tensor") == "a whole number of at least 1, or auto"
    assert values_of("sequence_parallel") == "on or off"
    assert "|" in values_of("tensor_exclude")
    names = {row[0] for row in cells("plan.md") if len(row) == 2}
    assert {f"<code>{name}</code>" for name in NAMED} <= names


@pytest.mark.parametrize("kind", [Job, Loss, Phase, EMA, SWA])
def test_every_field_of_a_job_is_explained(kind: Any) -> None:
    names = [one.name for one in fields(kind)]
    assert [name for name in names if not explained(kind).get(name)] == []
    rows = {row[0] for row in cells("job.md")}
    assert {f"<code>{name}</code>".replace("_", "&#95;") for name in names} <= rows


def test_every_row_that_a_run_writes_is_there() -> None:
    rows: list[dict[str, Any]] = []

    def keep(stream: str, record: Mapping[str, Any]) -> None:
        if stream == "metrics":
            rows.append(dict(record))

    sink: Any = SimpleNamespace(write=keep)
    world: Any = SimpleNamespace(rank=0, is_main=True, size=1)
    recorder = RunRecorder(None, world, [sink], steps_done=0, steps=2)
    memory: Any = [{"parameters": 8}]
    figures: Any = [1, 0.5, 4.0, 1.0, 0.1, 4, 0.2, [8], memory, "overflow", 1, {"accuracy": 0.5}, [0.1], 0.1]
    recorder.step(StepReport(*figures, communication={"data": {"hidden": 0.5}}))
    found = Evaluation(0.5, 4.0, 4, {"accuracy": 0.5}, averaged=True)
    recorder.evaluated(1, Evaluation(0.5, 4.0, 4, sets={"valid": found}, averaged=True))
    recorder.slow(1, SlowRank(rank=0, ratio=2.0), "CPU")
    step, evaluation, slow = rows
    path = ROOT / "evenly" / "train" / "reports.py"
    assert {*step} == {*source_entries(path, "StepReport")}
    assert {*evaluation} == {*OTHER_ROWS["An evaluation"]}
    assert {*slow} == {*OTHER_ROWS["A slow rank"]}


def test_every_file_of_a_run_is_there() -> None:
    names = {row[0] for row in cells("files.md")}
    folder = RunFolder(Path())
    for path in (folder.plan, folder.metrics, folder.attempts, folder.model_config, folder.adapter):
        assert f"<code>{path}</code>".replace("_", "&#95;") in names
    assert {"<code>events/rankN.jsonl</code>", "<code>timeline/rankN.jsonl</code>", "<code>logs/</code>"} <= names
    assert {"<code>checkpoints/</code>", "<code>loggers/NAME.json</code>"} <= names


def test_every_variable_that_is_read_is_there() -> None:
    source = ROOT / "evenly" / "launcher" / "environment.py"
    texts = (
        node.value for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
    )
    read = {
        text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+|CXX|RANK", text)
    }
    assert len(read) > 30
    launchers = tuple(name for names in OF_LAUNCHERS.values() for name in names)
    assert [name for name in sorted(read) if name not in VARIABLES and not name.startswith(launchers)] == []
    page = pages()["environment.md"]
    assert [name for name in VARIABLES if name.replace("_", "&#95;") not in page] == []


def test_tables_have_as_many_cells_as_heads() -> None:
    for name, text in pages().items():
        width = 0
        for line in text.splitlines():
            count = line.count(" | ") if line.startswith("|") else 0
            assert count == width or not width or not count, f"{name}: {line}"
            width = count


def test_entries_of_a_docstring() -> None:
    found = entries(
        """What it is.

        first:         a text
                       of two lines.
        second, third: of both.
        Another sentence: no entry, since its name has a space.
        """
    )
    assert found == {"first": "a text of two lines.", "second": "of both.", "third": "of both."}
