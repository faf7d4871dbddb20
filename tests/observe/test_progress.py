"""What a run prints on its way."""

from __future__ import annotations

import pytest

from evenly.observe.progress import make_watcher
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
