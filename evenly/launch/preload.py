"""Imported by the forkserver: imports the libraries of a job once, where each rank would import them for itself.

A library that cannot be imported is left to the rank, which says so. Where there are GPUs nothing is imported: a
library that touches one would keep the ranks, which are forked, from using it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path

from evenly.launch.environment import libraries_to_preload

GPU = Path("/dev/nvidiactl")


def import_libraries(names: Iterable[str], gpu: Path = GPU) -> None:
    """Imports `names`, each as `module` or `module:name`, whatever they raise; nothing where there is a `gpu`."""
    with redirect_stdout(sys.stderr):
        for full in names if not gpu.exists() else ():
            module, _, name = full.partition(":")
            with suppress(Exception):
                getattr(import_module(module), name or "__name__")


import_libraries(libraries_to_preload())
