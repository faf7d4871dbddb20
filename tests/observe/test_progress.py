"""What a run prints on its way."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from evenly.observe.progress import busy_line, make_watcher
from evenly.train.reports import StepReport


def report(step: int, **more: object) -> StepReport:
    given = {"step": step, "loss": 1.0, "weight": 4.0, "grad_norm": 1.0, "lr": 0.1, "samples": 4, "step_s": 0.1}
    return StepReport(**{**given, "memory_bytes": [1 << 20], **more})  # type: ignore[arg-type]


def test_every_batch_that_is_left_out_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = make_watcher(main=True, steps=9, done=0, unit="samples")
    for one in (report(1), report(2), report(3, skipped="not finite", left_out=2), report(4, skipped="overflow")):
        watcher.on_step(one)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/9", "3/9"]
    assert lines[1].endswith("(not finite: left out, 2 so far)")


def test_a_cell_of_a_notebook_has_one_line_that_is_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    watcher = make_watcher(main=True, steps=9, done=0, unit="samples", notebook=True)
    for step in (1, 2, 3, 9):  # the second and third come at once
        watcher.on_step(report(step))
    watcher.on_text("short")
    watcher.close()
    written = capsys.readouterr().out.split("\r")
    assert [line.split("  ")[0].rstrip() for line in written] == ["", "step 1/9", "step 9/9", "short", "step 9/9"]
    assert written[3] == "short".ljust(len(written[2])) + "\n"
    assert written[4] == written[2] + "\n"


class Terminal(io.StringIO):
    """A file that says to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "after_s", "there"), [(Terminal, 0.0, True), (Terminal, 60.0, False), (io.StringIO, 0.0, False)]
)
def test_what_takes_long_says_what_it_does_on_terminals_alone(
    file: type[io.StringIO], after_s: float, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", written := file())
    with pytest.raises(ValueError, match="no more"), busy_line("reading it", after_s=after_s) as show:
        show("reading it again")
        raise ValueError("no more")
    assert ("reading it" in written.getvalue()) == there


def test_a_line_comes_when_it_has_taken_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written := Terminal())
    clock = SimpleNamespace(monotonic=iter((0.0, 0.5, 1.5)).__next__)
    monkeypatch.setattr("evenly.observe.progress.time", clock)
    with busy_line("first", after_s=1.0) as show:
        assert not written.getvalue()
        show("second")
    assert "second" in written.getvalue() and "first" not in written.getvalue()
