"""A self-contained HTML page of headings, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

STYLE = (
    "body{font:15px sans-serif;margin:2em;max-width:70em}td,th{padding:.15em .9em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}table{border-collapse:collapse}tr{border-top:1px solid #ddd}"
    "td{vertical-align:top}pre{white-space:pre-wrap}"
)


def document(title: str, *parts: Any) -> str:
    """The page; `title` is text, `parts` are HTML and plotly's figures, whose script it carries itself."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>evenly: {escape(title)}</title>"
    texts = [f"{head}<style>{STYLE}</style><h1>{escape(title)}</h1>"]
    script = True  # for the first figure, which brings it for all
    for part in parts:
        is_html = isinstance(part, str)
        texts.append(part if is_html else part.to_html(full_html=False, include_plotlyjs=script))
        script = script and is_html
    return "".join(texts) + "</html>\n"


def heading(text: str) -> str:
    """The head of a section."""
    return f"<h2>{escape(text)}</h2>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text; no `heads`, no head."""
    lines = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"] if heads else []
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"
