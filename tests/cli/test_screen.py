"""What terminals of several widths, and files, get to see; each program has a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import JOB, environment, evenly

from evenly.observe.progress import Pace, duration, fitted_line, step_parts

STEPS = """
import sys, time
from types import SimpleNamespace
from evenly.observe.progress import make_watcher
watcher = make_watcher(main=True, steps=30, done=0, unit="tokens")
for step in range(1, 31):
    watcher.on_step(SimpleNamespace(
        step=step, loss=1 / step, weight=123456.0, samples=4, step_s=0.01, skipped="not finite" if step == 20 else None,
        left_out=1, memory_bytes=[61 << 30, 62 << 30], metrics={},
    ))
    time.sleep(0.02)
    if step == 10:
        print("printed by the job")
watcher.on_text("step 30: evaluation loss 0.5")
watcher.close()
print("the end")
"""
TABLE = """
import sys
from evenly.cli.tables import print_table, print_wrapped
heads = ["#", "plan", "peak", "tokens/s\\n/device", "MFU"]
plan = "data=16 zero=2 pipeline=2 schedule=interleaved stages_per_rank=4 microbatch=1"
rows = [["1", plan, "72.1 GiB", "8,077", "42.0%"], ["2", "ddp", "70 GiB", "8,000", "41.0%"]]
print_table("a job on a cluster, of which much is said here, more than any terminal of 60 columns has room for",
            heads, rows, wrapping=["plan"])
print_wrapped("evenly: name one of " + ", ".join(["single", "zero3", "tensor"] * 10) + "\\n  found: nothing")
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURS = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m")


def on_terminal(program: str, columns: int, *, stdout: int | None = None, **variables: str) -> str:
    """What `program` writes to a terminal of so many columns; its stdout where that is no other file."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = {name: value for name, value in environment().items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL, stdout=theirs if stdout is None else stdout, stderr=theirs,
        env={**inherited, "TERM": "xterm-256color", **variables},
    )  # fmt: skip
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # what Linux says where the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait(timeout=60) == 0, written
    return written.decode()


def lines_of(written: str) -> list[str]:
    """All that a line has ever shown, in order."""
    return [line for line in re.split(r"[\r\n]+", ESCAPES.sub("", written)) if line]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_run_has_one_line_that_updates_and_never_wraps(columns: int) -> None:
    written = on_terminal(STEPS, columns)
    lines = lines_of(written)
    updates = [line for line in lines if line.startswith("step ") and "not finite" not in line and "eval" not in line]
    assert max(map(len, updates)) <= columns and any(line.startswith("step 30/30") for line in updates)
    last = [line for line in updates if line.startswith("step 30/30")][-1]
    assert "loss 0.0333" in last and ("━" in last) == (columns == 120)
    assert "0:00 left" in last
    assert ("12,345,600 tokens/s  62,464-63,488 MiB/rank" in last) == (columns >= 80)
    others = " ".join(line.strip() for line in lines if line not in updates)
    assert others == (
        "printed by the job step 20/30  loss 0.0500  (not finite: left out, 1 so far) "
        "step 30: evaluation loss 0.5 the end"
    )
    assert written.rstrip().endswith("\x1b[2Kthe end")  # the line is gone


def test_colours_are_for_terminals_and_for_those_who_want_them() -> None:
    assert COLOURS.search(on_terminal(STEPS, 120))
    assert not COLOURS.search(on_terminal(STEPS, 120, NO_COLOR="1"))
    piped = subprocess.run(
        [sys.executable, "-c", STEPS + TABLE], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert "\x1b" not in piped.stdout + piped.stderr
    assert [line.split()[1] for line in piped.stderr.splitlines()] == ["1/30", "20/30", "30/30", "30:"]
    assert [line for line in piped.stdout.splitlines() if line != line.rstrip()] == []


def test_what_a_job_prints_goes_to_the_file_that_stdout_is(tmp_path: Path) -> None:
    with (tmp_path / "stdout").open("wb") as file:
        written = on_terminal(STEPS, 80, stdout=file.fileno())
    assert (tmp_path / "stdout").read_text() == "printed by the job\nthe end\n" and "printed" not in written


@pytest.mark.parametrize("columns", [44, 80, 200])
def test_tables_and_errors_fit_the_terminal_and_no_word_is_cut(columns: int) -> None:
    lines = [line.rstrip() for line in lines_of(on_terminal(TABLE, columns))]
    assert max(map(len, lines)) <= columns
    words = " ".join(lines).replace(",", "").split()
    assert {"schedule=interleaved", "stages_per_rank=4", "microbatch=1", "terminal", "8077", "found:"} <= {*words}
    [first] = [line for line in lines if "72.1 GiB" in line]
    assert ("data=16" in first) == (columns >= 80) and ("microbatch=1" in first) == (columns == 200)


def test_the_line_has_what_there_is_room_for() -> None:
    parts = ["loss 0.5000", "0:07 left", "99 samples/s", "366 MiB/rank"]
    assert fitted_line(5, 10, parts, 200) == (
        "step 5/10  ",
        "━" * 24,
        "  loss 0.5000  0:07 left  99 samples/s  366 MiB/rank",
    )
    assert fitted_line(5, 10, parts, 62) == ("step 5/10", "", "  loss 0.5000  0:07 left  99 samples/s  366 MiB/rank")
    assert fitted_line(5, 10, parts, 59) == ("step 5/10  ", "━" * 10, "  loss 0.5000  0:07 left  99 samples/s")
    assert fitted_line(5, 10, parts, 4) == ("step 5/10", "", "")


def test_time_left_counts_what_lies_between_steps() -> None:
    pace = Pace(10, "samples")
    report = SimpleNamespace(step=1, loss=1.0, samples=4, weight=9.0, step_s=0.5, memory_bytes=[1 << 20], metrics={})
    pace.add(report, 100.0)
    assert step_parts(report, pace) == ["loss 1.0000", "8 samples/s", "1 MiB/rank"]
    report.step, report.step_s = 3, 1.5
    pace.add(report, 104.0)
    assert step_parts(report, pace)[1:3] == ["0:14 left", "4 samples/s"]
    assert [duration(s) for s in (0.4, 59.6, 3599, 3600, 48 * 3600)] == ["0:00", "1:00", "59:59", "1:00:00", "2 d 0 h"]


def test_a_quiet_run_prints_errors_alone(tmp_path: Path) -> None:
    done = evenly("run", JOB, "--devices", 1, "--steps", 2, "--quiet", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = evenly("run", JOB, "--devices", 1, "--quiet", "--set", "fault=weightless", folder=tmp_path)
    assert done.returncode != 0 and done.stderr.startswith("evenly: ")
