"""Tables on terminals of 80 columns."""

from __future__ import annotations

import os

import pytest

from evenly.cli.tables import print_table, terminal_width

HEADS = ["plan", "ranks", "status", "loss", "grad norm", "parameters", "rounding", "other bits"]
LONG = "data=1 pipeline=2 schedule=gpipe stages_per_rank=2 recompute=full"
ROWS = [
    ["ddp", "2", "equal", "1.0e-17", "1.0e-17", "1.7e-18", "2.8e-17", "0"],
    [LONG, "2", "unsupported", "", "", "", "", ""],
]


def shown(capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    print_table("a job", HEADS, ROWS, width_of_files=width, wrapping=["plan"])
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_of_all_columns_fits_80_and_no_word_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, 80)
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert {*" ".join(HEADS).split(), *" ".join(ROWS[0] + ROWS[1]).split()} <= {*words}
    [first] = [line for line in lines if "unsupported" in line]
    assert first.split() == ["data=1", "pipeline=2", "2", "unsupported"]


def test_where_there_is_room_each_row_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, 160)
    assert any(LONG in line for line in lines) and any("grad norm" in line for line in lines)


def test_a_terminal_without_a_size_is_none() -> None:
    """As mpirun makes for its first rank."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream, os.fdopen(ours):
        assert stream.isatty() and os.get_terminal_size(stream.fileno()).columns == 0
        assert terminal_width(stream) is None
