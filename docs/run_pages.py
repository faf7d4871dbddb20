"""Runs the commands that the pages show, and compares what they print with what the pages say.

    python -m docs.run_pages                        all pages; exit code 1 where anything differs
    python -m docs.run_pages docs/start.md --quick  these pages, without the blocks that are marked slow
    python -m docs.run_pages --write                puts what was printed and drawn into the pages

Each page is run from top to bottom in an empty folder of its own, with `examples/` in it. `python`, `torchrun` and
`evenly` are those of this environment, with one thread for each process:

- A Python block whose first line is `# NAME.py` is written to that file.
- A block with lines `$ COMMAND`: each command is run, on a terminal of 100 columns without colours, and has to print
  what stands below it. A line `...` stands for any lines, and `(exit code N)` at the end for the exit code, else 0.
- A block without such lines is left alone, unless it is marked `run`: then each line is a command that has to end
  with exit code 0.
- `evenly board` serves until it is interrupted, which it is as soon as it has said where; any exit code is right then.

- A picture in `docs/pictures/tutorial/` is drawn by the page that shows it: its commands have to write a file of that
  name, with the texts of the picture that is there. Figures in these texts, and all else, may differ from run to run.

A block is marked by a comment in the line above it, a page by one in its first line: `<!-- commands: run -->`,
`<!-- commands: slow -->`, `<!-- commands: run, slow -->` or `<!-- commands: not run, needs Slurm -->`.

What differs from run to run and machine to machine is left out of the comparison: `VARYING` has all of it. Pages in
another language are not run: `tests/docs` sees to it that their commands are those of the English page.
"""

from __future__ import annotations

import argparse
import contextlib
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
from html import unescape
from itertools import pairwise
from pathlib import Path

from docs.page_text import COMMENT, ROOT, Block, blocks, file_of, links, original_of, pages

COLUMNS = 100
LIMIT_S = 300
ANY = "..."
SERVES = re.compile(r"^evenly board\b")
EXIT_CODE = re.compile(r"^\(exit code (\d+)\)$")
DRAWN = re.compile(r"\bpictures/tutorial/[\w.-]+\.svg$")  # what a page shows and draws itself
# A text of a picture; those of the classes `tick`, `total` and `in` are figures.
PICTURE_TEXT = re.compile(r"<text(?![^>]*class=\"(?:tick|total|in)\b)[^>]*>([^<]*)<")

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
class Drawn:
    """A picture that the page shows, and the file that its commands should have written.

    text: of the file; None where there is none.
    """

    picture: Path
    line: int
    text: str | None

    @property
    def what(self) -> str:
        return f"the picture {self.picture.name}"

    @property
    def problem(self) -> str:
        """What is wrong with the picture that is there, as text; empty where nothing is."""
        if self.text is None:
            return f"no command has written {self.picture.name}"
        if not self.picture.exists():
            return "there is no such file (--write puts it there)"
        shown, drawn = picture_texts(self.picture.read_text(encoding="utf-8")), picture_texts(self.text)
        return "\n".join(unified_diff(shown, drawn, "texts of the picture", "drawn", lineterm=""))


@dataclass(frozen=True)
class Ran:
    command: Command
    printed: list[str]
    exit_code: int

    @property
    def line(self) -> int:
        return self.command.line

    @property
    def what(self) -> str:
        return self.command.text

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


def picture_texts(svg: str) -> list[str]:
    """What the picture says, in its order, without figures."""
    return [re.sub(r"\d+(?:\.\d+)?", "N", unescape(text)) for text in PICTURE_TEXT.findall(svg)]


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


def run_page(page: Path, *, quick: bool, folder: Path | None = None) -> Iterator[Ran | Drawn]:
    """The results of all commands of `page`, then its pictures; quick: but those that are marked slow.

    folder: where it is run, which is empty; by default one that is removed.
    """
    text = page.read_text(encoding="utf-8")
    found = [block for block in blocks(text) if "not run" not in _marks(block)]
    chosen = [block for block in found if not (quick and "slow" in _marks(block))]
    if not any(True for block in chosen for _ in commands_of(block)):
        return
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="evenly-pages-") as name:
        folder = Path(name)
        environment = prepare(folder)
        for block in chosen:
            if (named := file_of(block)) is not None:
                (folder / named).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
            yield from (run_command(command, folder, environment) for command in commands_of(block))
        if chosen == found:
            yield from drawn_in(folder, page)


def drawn_in(folder: Path, page: Path) -> Iterator[Drawn]:
    """The pictures of `page` that its commands draw, which were run in `folder`."""
    for link in links(page.read_text(encoding="utf-8")):
        if link.is_picture and DRAWN.search(link.target):
            picture = (page.parent / link.target).resolve()
            written = folder / picture.name
            yield Drawn(picture, link.line, written.read_text(encoding="utf-8") if written.exists() else None)


def prepare(folder: Path) -> dict[str, str]:
    """Makes an empty folder one in which pages are run; returns the environment of their commands.

    `evenly` is there this package under this Python. A process has one thread: torchrun says so with a warning where
    nothing is set, and two ranks of several threads each would wait for each other on a machine with two cores.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = folder / ".programs"
    programs.mkdir()
    for name, module in (("evenly", "-m evenly"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    paths = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    return {**inherited, **paths, "TERM": "dumb", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


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
    text, deadline, interrupted = b"", time.monotonic() + LIMIT_S, False
    while piece := _read(ours, deadline):
        text += piece
        if SERVES.match(command.text) and b"http://" in text and not interrupted:
            os.killpg(process.pid, signal.SIGINT)
            interrupted = True
    os.close(ours)
    if time.monotonic() >= deadline:
        os.killpg(process.pid, signal.SIGKILL)
    exit_code = process.wait(LIMIT_S)
    return Ran(command, printed_lines(text.decode(errors="replace"), folder), 0 if interrupted else exit_code)


def _read(terminal: int, deadline: float) -> bytes:
    """The next bytes; none where the last process that has the terminal is gone, or time is over."""
    if not select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        return b""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def printed_lines(text: str, folder: Path) -> list[str]:
    """What a command has printed, without blank ends, its folder as `.`."""
    lines = [line.rstrip() for line in text.replace(str(folder), ".").splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


# -------------------------------------------------------------------------------------------------------- the pages
def write(page: Path, results: Sequence[Ran | Drawn]) -> None:
    """Puts what was printed into `page` where it differs, and its pictures to their places.

    Below commands with `...` nothing is changed.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    for result in reversed(results):
        if isinstance(result, Drawn):
            if result.text is not None:
                result.picture.parent.mkdir(parents=True, exist_ok=True)
                result.picture.write_text(result.text, encoding="utf-8")
            continue
        shown = result.command.shown
        if shown is not None and result.problem and ANY not in shown:
            stated = [f"(exit code {result.exit_code})"] if result.exit_code else []
            lines[result.line : result.line + len(shown)] = [*result.printed, *stated]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.run_pages", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--quick", action="store_true", help="without the blocks that are marked slow")
    parser.add_argument("--write", action="store_true", help="put what was printed into the pages")
    asked = parser.parse_args()
    differing = total = 0
    for page in asked.pages or [page for page in pages() if original_of(page) is None]:
        results: list[Ran | Drawn] = []
        for result in run_page(page.resolve(), quick=asked.quick):
            results.append(result)
            problem = result.problem
            print(f"{page}:{result.line}: {'differs' if problem else 'as shown'}: {result.what}", flush=True)
            if problem:
                print(problem, flush=True)
        total, differing = total + len(results), differing + sum(bool(result.problem) for result in results)
        if asked.write:
            write(page, results)
    print(f"{total} commands and pictures, {differing} of which differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
