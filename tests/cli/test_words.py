"""Names and paths from outside reach a terminal as text, and end in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenly.cli import main as command_line
from evenly.cli.tables import print_table, print_wrapped, printable


def test_names_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a[/red] b\x1b[31m \x07\ud800 é한"
    assert printable(name) == "a[/red] b\\x1b[31m \\x07\\ud800 é한"
    print_table(name, ["job"], [[name]])
    print_wrapped(name)
    output = capsys.readouterr().out
    assert output.count("a[/red] b\\x1b[31m") == 3 and "\x1b" not in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "x" * 5000 + ".py"],
        ["plan", "x" * 5000 + ".py", "--cluster", "8xH100"],
        ["plan", "llama-3.1-8b", "--cluster", "x" * 5000 + ".toml"],
        ["report", "x" * 5000],
        ["verify", "x" * 5000 + ".py"],
        ["export", "x" * 5000, "--to", "out"],
        ["run", "job.py", "--set", "name=\ud800"],
    ],
)
def test_what_cannot_be_used_ends_in_a_sentence(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evenly", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code in (1, 2)
    errors = capsys.readouterr().err
    assert "Traceback" not in errors and len(errors) < 12_000


def test_a_text_that_is_nested_too_deeply_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("devices = " + "[" * 100_000 + "]" * 100_000)
    monkeypatch.setattr(sys, "argv", ["evenly", "plan", "llama-3.1-8b", "--cluster", str(path)])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2 and "nested too deeply" in capsys.readouterr().err
