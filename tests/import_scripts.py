"""Imports each script of the command line, a path below the working folder, in a process that is forked for it.

Prints a line for each that fails; a script that reads its command line is asked for `--help`. What all need is imported
once, before.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import sys
from pathlib import Path

import evenly.train.run  # noqa: F401


def import_script(path: Path) -> None:
    """As its folder has it: a module of a package, or a script with its folder on the path."""
    sys.argv = [str(path), "--help"]
    if (path.parent / "__init__.py").exists():
        importlib.import_module(".".join(path.with_suffix("").parts))
    else:
        sys.path.insert(0, str(path.parent.absolute()))
        runpy.run_path(str(path), run_name="imported")


def problem_of(path: Path) -> str:
    """What keeps it from being imported; empty where nothing does."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import_script(path)
    except SystemExit as ended:
        return "" if ended.code in (None, 0) else f"exit code {ended.code}"
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    for path in map(Path, sys.argv[1:]):
        child = os.fork()
        if not child:
            if problem := problem_of(path):
                print(f"{path}: {problem}", flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(f"{path}: ended by itself, status {status}", flush=True)


if __name__ == "__main__":
    main()
