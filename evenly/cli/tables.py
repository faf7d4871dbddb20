"""Tables and lines as wide as the terminal; plain text, with room, where the output is read by no terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, TextIO

from evenly.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_OF_FILES = 160  # columns, where the output is read by no terminal
LEAST_WIDTH = 20
INDENT = "    "  # of what stands below a row
Rows = Sequence[Sequence[str]]


def print_table(
    title: str,
    heads: Sequence[str],
    rows: Rows,
    *,
    width_of_files: int = WIDTH_OF_FILES,
    wrapping: Sequence[str] | None = None,
) -> None:
    """The rows below the title and their heads, if they have any; nothing where there are no rows.

    wrapping: heads of the columns that are wrapped where there is little room, all by default; no other is cut. Where
              words of theirs would be cut, these columns stand below their rows.
    """
    from rich.console import Console

    if not rows:
        return
    console = Console(width=terminal_width(sys.stdout) or width_of_files)
    if title:
        _print_filled(title, console.width)
    rows = [[printable(cell) for cell in row] for row in rows]
    table = _table(heads, rows, narrow=False, wrapping=heads)
    anywhere = console.options.update(max_width=1000)
    if wrapping is not None and console.measure(table, options=anywhere).maximum > console.width:
        below = [number for number, head in enumerate(heads) if head in wrapping]
        fits = _least_width(heads, rows, below) <= console.width
        if below and not fits:
            for number, line in enumerate(_stacked(heads, rows, below, console.width)):
                console.print(line.rstrip(), style="bold" if number == 1 else None, markup=False, highlight=False)
            return
        table = _table(heads, rows, narrow=True, wrapping=wrapping if fits else heads)
    _print(console, table)


def _print(console: Console, table: Table) -> None:
    """On a terminal with heads that stand out, else without blanks at the ends of lines."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _least_width(heads: Sequence[str], rows: Rows, wrapped: Sequence[int]) -> int:
    """Columns of the narrow table in which no word is cut."""
    from rich.cells import cell_len

    words = [
        [
            *head.split(),
            *(word for row in rows for word in (row[number].split() if number in wrapped else [row[number]])),
        ]
        for number, head in enumerate(heads)
    ]
    return sum(max(map(cell_len, column), default=0) + 1 for column in words) + 1


def _stacked(heads: Sequence[str], rows: Rows, below: Sequence[int], width: int) -> Iterator[str]:
    from rich.cells import cell_len, set_cell_size

    kept = [number for number in range(len(heads)) if number not in below]
    cells = [[head.replace("\n", "") for head in heads], *([cell.replace("\n", " ") for cell in row] for row in rows)]
    lines = [[row[number] for number in kept] for row in cells]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    yield ""
    for row, line in zip((heads, *rows), lines, strict=True):
        yield "  ".join(map(set_cell_size, line, widths))
        if row is heads:
            yield "─" * min(width, sum(widths) + 2 * len(widths) - 2)
            continue
        for number in below:
            if row[number]:
                yield _filled(row[number].replace("\n", ", "), width, indent=INDENT)
    yield ""


def _table(heads: Sequence[str], rows: Rows, *, narrow: bool, wrapping: Sequence[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        show_header=any(heads),
        box=SIMPLE_HEAD,
        padding=(0, 0) if narrow else (0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for head in heads:
        keeps = head not in wrapping
        table.add_column(head.replace(" ", "\n") if keeps else head, overflow="fold", no_wrap=keeps)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a [ in a name opens no markup
    return table


def terminal_width(stream: TextIO) -> int | None:
    """The columns of the terminal that `stream` writes to; None where it is no terminal, or one without a size."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except OSError:  # a stream without a file
        return None
    return max(LEAST_WIDTH, columns) if columns else None


def print_wrapped(text: str, *, further: str = "  ", file: TextIO | None = None) -> None:
    """Prints lines, to stdout by default, which a terminal gets in lines of its width, broken between words.

    further: how far the lines after a first stand further in.
    """
    _print_filled(text, terminal_width(file or sys.stdout), further=further, file=file)


def _print_filled(text: str, width: int | None, *, further: str = "  ", file: TextIO | None = None) -> None:
    text = printable(text)
    lines = [text] if width is None else [_filled(line, width, further=further) for line in text.splitlines()]
    print("\n".join(lines), file=file, flush=True)


def _filled(line: str, width: int, *, indent: str = "", further: str = "  ") -> str:
    """`line` in lines of `width`; a word that is longer stays whole."""
    indent += line[: len(line) - len(line.lstrip())]
    return fill(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}{further}",
        break_long_words=False,
        break_on_hyphens=False,
    )
