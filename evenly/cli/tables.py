"""Tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDTH_OF_FILES = 160  # columns, where the output is read by no terminal


def print_table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width_of_files: int = WIDTH_OF_FILES,
    wrapping: Sequence[str] | None = None,
) -> None:
    """The rows below the title and their heads, if they have any; nothing where there are no rows.

    wrapping: heads of the columns that are wrapped where there is little room, all by default; no other is cut.
    """
    from rich.console import Console

    if not rows:
        return
    console = Console(width=None if sys.stdout.isatty() else width_of_files)
    table = _table(title, heads, rows, narrow=False, wrapping=heads)
    anywhere = console.options.update(max_width=1000)
    if wrapping is not None and console.measure(table, options=anywhere).maximum > console.width:
        table = _table(title, heads, rows, narrow=True, wrapping=wrapping)
    console.print(table)


def _table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, narrow: bool, wrapping: Sequence[str]
) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(title)) if title else None,
        show_header=any(heads),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0) if narrow else (0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    for head in heads:
        keeps = head not in wrapping
        table.add_column(head.replace(" ", "\n") if keeps else head, overflow="fold", no_wrap=keeps)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # a [ in a name opens no markup
    return table


def printable(text: str) -> str:
    """`text` with what would steer a terminal, or cannot be written, spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def print_wrapped(text: str) -> None:
    """A line, which a terminal gets in lines of its width, broken between words."""
    text = printable(text)
    if sys.stdout.isatty():
        text = fill(text, get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False)
    print(text)
