"""Parts of a self-contained HTML page: headings, tables, pictures by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

STYLE = (
    "body{font:15px sans-serif;margin:2em;max-width:70em}td,th{padding:.15em .9em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}table{border-collapse:collapse}tr{border-top:1px solid #ddd}"
)


def document(title: str, *parts: str, style: str = "") -> str:
    """The page; `title` is text, `parts` are HTML, `style` is CSS besides."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>evenly: {escape(title)}</title>"
    return f"{head}<style>{STYLE}{style}</style><h1>{escape(title)}</h1>{''.join(parts)}</html>\n"


def heading(text: str) -> str:
    """The head of a section."""
    return f"<h2>{escape(text)}</h2>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text; no `heads`, no head."""
    lines = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"] if heads else []
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def picture(figure: Any, *, script: bool) -> str:
    """A plotly figure; `script` for the first of a page, which carries plotly's code for all."""
    figure.update_layout(template="plotly_white", height=480, margin={"t": 20})
    return str(figure.to_html(full_html=False, include_plotlyjs=script))
