"""A self-contained HTML page of sections: figures, tables and text. Asks no network, is readable without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

# Nothing is fetched, also where a text from a run should have come to be markup; `connect` is what a live page asks.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src {connect}"
)
MOST_ROWS = 200
MOST_IN_A_ROW = 7  # figures of a head
SHORT = 16  # letters of a cell whose words are not broken
LONGEST = 600  # letters of a text that a run has given


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading of its own; `parts` are HTML."""

    title: str
    parts: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """One number of a page's head: what it is, the number in words, and what there is to say of it."""

    name: str
    value: str
    note: str = ""


def cut(words: str, most: int = LONGEST) -> str:
    """`words` as HTML, the end of a very long text left out."""
    return escape(words if len(words) <= most else f"{words[:most]}...")


@cache
def script_of(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def document(title: str, *parts: str | Section, lead: str = "", script: str = "") -> str:
    """The page; `title` and `lead` are text, `parts` HTML and sections, to which it begins with links.

    script: further JavaScript, which may ask the server that the page came from.
    """
    policy = POLICY.format(connect="'self'" if script else "'none'")
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<meta name=color-scheme content='light dark'><title>evenly: {cut(title)}</title>"
        f"<link rel=icon href='data:,'><style>{script_of('page.css')}</style></head>"
        f"<body><main>{contents(title, *parts, lead=lead)}</main>"
        f"<script>{script_of('page.js')}{script_of('controls.js')}{script}</script></body></html>\n"
    )


def contents(title: str, *parts: str | Section, lead: str = "") -> str:
    sections = [part for part in parts if isinstance(part, Section)]
    links = "".join(f'<a href="#s{at}">{escape(one.title)}</a>' for at, one in enumerate(sections))
    navigation = f"<nav aria-label=Sections>{links}</nav>" if len(sections) > 2 else ""
    texts = [f"<h1>{cut(title)}</h1>", f"<p class=lead>{cut(lead)}</p>" if lead else "", navigation]
    for part in parts:
        at = sections.index(part) if isinstance(part, Section) else 0
        texts.append(part if isinstance(part, str) else _section(part, at))
    return "".join(texts)


def _section(one: Section, number: int) -> str:
    return f'<section id="s{number}"><h2>{escape(one.title)}</h2>{"".join(one.parts)}</section>'


def head(figures: Sequence[Figure]) -> str:
    found = "".join(
        f"<div><dt>{cut(one.name)}</dt><dd>{_with_unit(one.value)}</dd>"
        f"{f'<dd class=note>{cut(one.note)}</dd>' if one.note else ''}</div>"
        for one in figures
    )
    rows = -(-len(figures) // MOST_IN_A_ROW) or 1
    return f'<dl class=head style="--in-a-row:{-(-len(figures) // rows)}">{found}</dl>'


def _with_unit(value: str) -> str:
    """A number with its unit smaller, behind it; other values as they are."""
    words = value.split(" ")
    if len(words) != 2 or not value[0].isdigit():
        return cut(value)
    return f"{cut(words[0])} <small>{cut(words[1])}</small>"


def text(words: str, *, kind: str = "") -> str:
    """A paragraph; kind: "note" or "warn"."""
    return f"<p{f' class={kind}' if kind else ''}>{cut(words)}</p>"


def side_by_side(*parts: str) -> str:
    """Figures next to each other where there is room."""
    return f"<div class=pair>{''.join(parts)}</div>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, label: str = "", words: bool = False) -> str:
    """Cells are text, of which `rows` has one for each of `heads`; no `heads`, no head.

    label: for what reads aloud. words: whether they hold words rather than numbers, and are aligned so.
    """
    lines = [f"<tr>{''.join(f'<th scope=col>{cut(head)}</th>' for head in heads)}</tr>"] if heads else []
    lines += [_row(row) for row in rows[:MOST_ROWS]]
    left_out = len(rows) - MOST_ROWS
    note = text(f"and {left_out} more", kind="note") if left_out > 0 else ""
    named = f' role=region aria-label="{escape(label)}"' if label else ""
    kind = " class=words" if words else ""
    return f"<div class=scroll tabindex=0{named}><table{kind}>{''.join(lines)}</table></div>{note}"


def _row(cells: Sequence[str]) -> str:
    first, *others = cells or ("",)
    return f"<tr><th scope=row>{cut(first)}</th>{''.join(map(_cell, others))}</tr>"


def _cell(words: str) -> str:
    return f"<td{' class=short' * (' ' in words and len(words) <= SHORT)}>{cut(words)}</td>"


@dataclass(frozen=True)
class SortedCell:
    """A cell of a table that readers sort: its words, and by what number it is sorted, if not by its words."""

    words: str
    value: float | None = None


def sortable(
    heads: Sequence[str],
    rows: Sequence[Sequence[SortedCell]],
    *,
    label: str,
    keys: Sequence[str] = (),
    words: str | None = None,
) -> str:
    """A table that a click on a head sorts, or Enter on it.

    keys: of each row, what points of pictures call it, whose first cell then shows its point. words: the head of a
    column of sentences, if there is one.
    """
    head = "".join(f"<th scope=col{' class=sentence' * (one == words)}>{cut(one)}</th>" for one in heads)
    body = ""
    for at, row in enumerate(rows):
        cells = [_sorted_cell(one, first=not column, words=heads[column] == words) for column, one in enumerate(row)]
        key = f' data-key="{escape(keys[at])}"' if keys else ""
        body += f"<tr{key}>{''.join(cells)}</tr>"
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{escape(label)}">'
        f"<table class=sortable><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _sorted_cell(cell: SortedCell, *, first: bool, words: bool) -> str:
    name = "th" if first else "td"
    value = "" if cell.value is None else f" data-value={cell.value:.6g}"
    return f"<{name}{' scope=row' * first}{' class=sentence' * words}{value}>{cut(cell.words)}</{name}>"


@dataclass(frozen=True)
class Slider:
    """A choice among `values`, of which `at` is chosen first."""

    name: str
    values: Sequence[int]
    at: int


def panes(sliders: Sequence[Slider], found: Mapping[tuple[int, ...], str]) -> str:
    """Of the HTML in `found`, by a value of each slider, the one that the sliders choose; without scripts the first."""
    inputs = "".join(
        f"<label>{escape(one.name)} <input type=range min=0 max={len(one.values) - 1} value={one.values.index(one.at)} "
        f'data-values="{" ".join(map(str, one.values))}"><output>{one.at:,}</output></label>'
        for one in sliders
        if len(one.values) > 1
    )
    first, moved = tuple(one.at for one in sliders), [len(one.values) > 1 for one in sliders]
    parts = "".join(
        f'<div class=pane data-at="{" ".join(str(value) for value, can in zip(at, moved, strict=True) if can)}"'
        f"{' hidden' * (at != first)}>{html}</div>"
        for at, html in found.items()
    )
    return f"<div class=panes><div class=sliders hidden>{inputs}</div>{parts}</div>" if inputs else parts


def folded(title: str, *parts: str) -> str:
    """Parts that are opened by their title: the table of a picture, say."""
    return f"<details><summary>{escape(title)}</summary>{''.join(parts)}</details>"


def as_table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = "as a table") -> str:
    return folded(title, table(heads, rows, label=title))
