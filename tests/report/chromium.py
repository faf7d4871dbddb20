"""Chromium, without a window: tests of what a browser makes of a page."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REQUIRED = "BROWSER_REQUIRED"  # set by `make test-browser`: a missing browser is a failure there
needs_chromium = [
    pytest.mark.full,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None and REQUIRED not in os.environ, reason="there is no chromium"),
]


def dump(page: Path, *options: str, budget_ms: int) -> str:
    """Return the document of `page` after so much virtual time; fail where the console has an error."""
    assert CHROMIUM is not None, "no chromium: python3 -m benchmarks.packages chromium"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
        f"--virtual-time-budget={budget_ms}", f"--user-data-dir={page.parent / 'profile'}", *options, "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert done.returncode == 0 and errors == [], done.stderr[-2000:]
    return done.stdout
