"""Runs `evenly` as a user does: in this process, whose fork server is warm, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from evenly.cli.main import main

JOB = Path(__file__).with_name("cli_job.py")
COMMAND = [sys.executable, "-m", "evenly"]
LIMIT_S = 600.0


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def evenly(*arguments: object, folder: Path) -> Done:
    """What `evenly ARGUMENTS` leaves and prints, with `folder` as working folder; its ranks are real processes."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["evenly", *map(str, arguments)]),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
    return Done(code if isinstance(code, int) else 0, stdout.getvalue(), stderr.getvalue())


def environment() -> dict[str, str]:
    """This process's environment, fit to find the package from any folder."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
