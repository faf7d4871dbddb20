"""What one device computes for the jobs of a test module, once for all its tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import evenly
from evenly.verify.ranks import keep_reference


class References:
    """From the name of a job to the folder of its trajectory on one device, made when first asked for.

    prepared: makes the job of that name. steps: how far it goes.
    """

    def __init__(self, folders: pytest.TempPathFactory, prepared: Callable[[str], evenly.Job], steps: int) -> None:
        self._folders, self._prepared, self._steps = folders, prepared, steps
        self._made: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        if name not in self._made:
            self._made[name] = self._folders.mktemp(name)
            keep_reference(self._prepared(name), self._steps, self._made[name] / "reference")
        return self._made[name]
