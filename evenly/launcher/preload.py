"""Imported by the fork server after all else: imports the libraries of a job once, and not once in every rank.

A library that cannot be imported is left to the rank, which says so. Where there are GPUs nothing is imported: a
library that touches one would keep the ranks, which are forked, from using it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from importlib import import_module

from evenly.launcher.environment import libraries_to_preload
from evenly.launcher.frozen import freeze_imports
from evenly.launcher.gpus import may_have_gpus


def import_libraries(names: Iterable[str]) -> None:
    """Imports `names`, each as `module` or `module:name`, whatever they raise; nothing where there may be GPUs."""
    with redirect_stdout(sys.stderr):
        for full in () if may_have_gpus() else names:
            module, _, name = full.partition(":")
            with suppress(Exception):
                getattr(import_module(module), name or "__name__")


import_libraries(libraries_to_preload())
freeze_imports()
