"""Tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

WIDTH_OF_FILES = 160  # columns, where the output is read by no terminal


def print_table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, width_of_files: int = WIDTH_OF_FILES
) -> None:
    """The rows below the title and their heads, if they have any; nothing where there are no rows."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(
        title=title or None,
        show_header=any(heads),
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # a [ in a name opens no markup
    Console(width=None if sys.stdout.isatty() else width_of_files).print(table)
