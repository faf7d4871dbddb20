"""Runs the commands that the pages show, and compares what they print with what the pages say.

    python -m docs.run_pages                        all pages; exit code 1 where anything differs
    python -m docs.run_pages docs/start.md --quick  these pages, without the blocks that are marked slow
    python -m docs.run_pages --write                puts what was printed into the pages

Each page is run from top to bottom in an empty folder of its own, with `examples/` in it:

- A Python block whose first line is `# NAME.py` is written to that file.
- A block with lines `$ COMMAND`: each command is run, on a terminal of 100 columns without colours, and has to print
  what stands below it. A line `...` stands for any lines, and `(exit code N)` at the end for the exit code, else 0.
- A block without such lines is left alone, unless it is marked `run`: then each line is a command that has to end
  with exit code 0.

A block is marked by a comment in the line above it, a page by one in its first line: `<!-- commands: run -->`,
`<!-- commands: slow -->`, `<!-- commands: run, slow -->` or `<!-- commands: not run, needs Slurm -->`.

What differs from run to run and machine to machine is left out of the comparison: `VARYING` has all of it. Pages in
another language are not run: `tests/docs` sees to it that their commands are those of the English page.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path

from docs.page_text import COMMENT, ROOT, Block, blocks, original_of, pages

COLUMNS = 100
LIMIT_S = 300
ANY = "..."
EXIT_CODE = re.compile(r"^\(exit code (\d+)\)$")

# What the same command prints differently on another day or machine, and what is compared in its place.
VARYING: list[tuple[str, str]] = [
    (r"\bin [\d.]+ s\b", "in TIME"),  # of a run
    (r"\b\d\.\de-(?:09|[1-9]\d)\b|\b0\.0e\+00\b", "ROUNDING"),  # relative differences below 1e-8; others count
    (r"─+", "─"),  # as wide as the columns are
    (r"\s+", " "),  # lines are broken where the terminal ends
]
# Figures of a training in float32: the last digits follow the processor.
TRAINED = re.compile(r"(?<=loss )\d+\.\d{4}|(?<=-> )\d+\.\d{4}")
CLOSE = 0.02  # relative, and absolute below 1


@dataclass(frozen=True)
class Command:
    """A command of a page.

    line:  of the page, from 1.
    shown: what stands below it; None where nothing is compared.
    """

    text: str
    line: int
    shown: list[str] | None


@dataclass(frozen=True)
class Ran:
    command: Command
    printed: list[str]
    exit_code: int

    @property
    def problem(self) -> str:
        """What differs from the page, as text; empty where nothing does."""
        shown = self.command.shown
        stated = EXIT_CODE.match(shown[-1]) if shown else None
        expected = int(stated[1]) if stated else 0
        if self.exit_code != expected:
            return f"exit code {self.exit_code}, not {expected}\n" + "\n".join(self.printed)
        if shown is None or agrees(shown[:-1] if stated else shown, self.printed):
            return ""
        ours, theirs = [[*map(without_varying, lines)] for lines in (shown, self.printed)]
        return "\n".join(unified_diff(ours, theirs, "the page", "printed", lineterm=""))


# ------------------------------------------------------------------------------------------------- what is compared
def without_varying(text: str) -> str:
    """`text` with a word in place of each thing that varies."""
    for pattern, word in VARYING:
        text = re.sub(pattern, word, text)
    return text.strip()


def agrees(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the lines `printed` are those that a page shows, wherever they are broken; `...` in `shown` is any."""
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == ANY:
            parts.append([])
        else:
            parts[-1].append(line)
    texts = [without_varying("\n".join(part)) for part in parts]
    pattern = ".*".join(r"(\d+\.\d{4})".join(map(re.escape, TRAINED.split(text))) for text in texts)
    found = re.fullmatch(pattern, without_varying("\n".join(printed)))
    figures = [float(figure) for text in texts for figure in TRAINED.findall(text)]
    return found is not None and all(
        abs(ours - float(theirs)) <= CLOSE * max(1.0, ours)
        for ours, theirs in zip(figures, found.groups(), strict=True)
    )


# ------------------------------------------------------------------------------------------------------ what is run
def commands_of(block: Block) -> Iterator[Command]:
    """The commands of a block that is run."""
    if "run" in _marks(block):
        yield from (
            Command(COMMENT.sub("", line), number, None) for number, line in enumerate(block.lines, block.line) if line
        )
        return
    starts = [number for number, line in enumerate(block.lines) if line.startswith("$ ")]
    for start, end in pairwise([*starts, len(block.lines)]):
        shown = block.lines[start + 1 : end]
        while shown and not shown[-1]:
            shown.pop()
        yield Command(block.lines[start][2:], block.line + start, shown)


def _marks(block: Block) -> list[str]:
    return [mark.strip() for mark in block.mark.split(",")]


def run_page(page: Path, *, quick: bool) -> Iterator[Ran]:
    """The results of all commands of `page`; quick: but those that are marked slow."""
    found = [
        block
        for block in blocks(page.read_text(encoding="utf-8"))
        if "not run" not in _marks(block) and not (quick and "slow" in _marks(block))
    ]
    if not any(True for block in found for _ in commands_of(block)):
        return
    with tempfile.TemporaryDirectory(prefix="evenly-pages-") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        environment = _environment(folder)
        for block in found:
            _write_file(block, folder)
            yield from (run_command(command, folder, environment) for command in commands_of(block))


def _write_file(block: Block, folder: Path) -> None:
    named = re.match(r"# (\w+\.py)$", block.lines[0]) if block.language == "python" and block.lines else None
    if named is not None:
        (folder / named[1]).write_text("\n".join(block.lines) + "\n", encoding="utf-8")


def _environment(folder: Path) -> dict[str, str]:
    """In which `evenly` is this package under this Python."""
    programs = folder / ".programs"
    programs.mkdir()
    script = programs / "evenly"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m evenly "$@"\n')
    script.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    paths = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    return {**inherited, **paths, "TERM": "dumb", "NO_COLOR": "1"}


def run_command(command: Command, folder: Path, environment: dict[str, str]) -> Ran:
    """Runs it in `folder`; what it prints is what its terminal shows. After `LIMIT_S` it is ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["/bin/sh", "-c", command.text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    text, deadline = b"", time.monotonic() + LIMIT_S
    while piece := _read(ours, deadline):
        text += piece
    os.close(ours)
    if time.monotonic() >= deadline:
        os.killpg(process.pid, signal.SIGKILL)
    exit_code = process.wait(LIMIT_S)
    lines = text.decode(errors="replace").replace(str(folder), ".").splitlines()
    return Ran(command, _without_blank_ends([line.rstrip() for line in lines]), exit_code)


def _read(terminal: int, deadline: float) -> bytes:
    """The next bytes; none where the last process that has the terminal is gone, or time is over."""
    if not select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        return b""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def _without_blank_ends(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines.pop()
    return lines


# -------------------------------------------------------------------------------------------------------- the pages
def write(page: Path, results: Sequence[Ran]) -> None:
    """Puts what was printed into `page` where it differs; below commands with `...` nothing is changed."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for ran in reversed(results):
        shown = ran.command.shown
        if shown is not None and ran.problem and ANY not in shown:
            stated = [f"(exit code {ran.exit_code})"] if ran.exit_code else []
            lines[ran.command.line : ran.command.line + len(shown)] = [*ran.printed, *stated]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.run_pages", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--quick", action="store_true", help="without the blocks that are marked slow")
    parser.add_argument("--write", action="store_true", help="put what was printed into the pages")
    asked = parser.parse_args()
    differing = total = 0
    for page in asked.pages or [page for page in pages() if original_of(page) is None]:
        results: list[Ran] = []
        for ran in run_page(page, quick=asked.quick):
            results.append(ran)
            problem = ran.problem
            print(f"{page}:{ran.command.line}: {'differs' if problem else 'as shown'}: {ran.command.text}", flush=True)
            if problem:
                print(problem, flush=True)
        total, differing = total + len(results), differing + sum(bool(ran.problem) for ran in results)
        if asked.write:
            write(page, results)
    print(f"{total} commands, {differing} of which differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
