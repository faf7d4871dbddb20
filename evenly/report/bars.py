"""Stacked bars as a drawing, one below the other, with a legend; black on light as light on dark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from evenly.report.gantt import FONT, text

BAR, ROW, LEGEND = 16, 40, 22
WIDTH = 820
LIMIT = "#cc3311"

# Tol's light scheme, which the colour-blind tell apart.
COLOURS = ("#77aadd", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00", "#eedd88", "#ee8866", "#ffaabb", "#bbbbbb", "#888888")


@dataclass(frozen=True)
class StackedBar:
    """One bar: what stands above it, and how long each of its parts is."""

    label: str
    parts: Mapping[str, float]

    @property
    def length(self) -> float:
        """The length of all its parts."""
        return sum(self.parts.values())


def drawing(width: float, height: float, parts: Iterable[str], *, words: str) -> str:
    """A picture that shrinks with its page and takes its colour of text; `words` for who cannot see it."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg role="img" aria-label="{words}" {size} font-family="sans-serif" font-size="{FONT}">'
    return "\n".join([head, *parts, "</svg>"])


def stacked(
    bars: Sequence[StackedBar], shown: Callable[[float], str], *, words: str, limit: float | None = None
) -> str:
    """The bars on one scale, their parts in the same order and colours; `limit`: where a line is drawn across.

    shown: a length in words; `words`: what the picture tells, without markup.
    """
    causes = _causes(bars)
    most = max([bar.length for bar in bars] + [limit or 0.0])
    scale = WIDTH / most if most else 0.0
    top = LEGEND * len(_lines(causes)) + 6
    height = top + ROW * len(bars) + (16 if limit else 0)
    parts = _legend(causes)
    for number, bar in enumerate(bars):
        parts += _bar(bar, causes, shown, y=top + ROW * number, scale=scale)
    if limit is not None:
        parts += _limit(limit * scale, top, height, shown(limit))
    return drawing(WIDTH + 4, height, parts, words=words)


def _causes(bars: Sequence[StackedBar]) -> dict[str, str]:
    """Every cause that any bar has -> its colour, which it has in all pictures of these causes."""
    known = list(dict.fromkeys(cause for bar in bars for cause in bar.parts))
    colours = dict(zip(known, COLOURS * (1 + len(known) // len(COLOURS)), strict=False))
    return {cause: colours[cause] for cause in known if any(bar.parts.get(cause) for bar in bars)}


def _bar(
    bar: StackedBar, causes: Mapping[str, str], shown: Callable[[float], str], *, y: float, scale: float
) -> list[str]:
    parts, x = [text(0, y + 11, f"{bar.label}: {shown(bar.length)}")], 0.0
    for cause, colour in causes.items():
        amount = bar.parts.get(cause, 0.0)
        if amount > 0:
            box = f'<rect x="{x:.2f}" y="{y + 15:g}" width="{amount * scale:.2f}" height="{BAR}" fill="{colour}">'
            parts.append(f"{box}<title>{cause}: {shown(amount)}</title></rect>")
            x += amount * scale
    return parts


def _limit(x: float, top: float, height: float, words: str) -> list[str]:
    line = f'<line x1="{x:.2f}" y1="{top:g}" x2="{x:.2f}" y2="{height - 14:g}" stroke="{LIMIT}" stroke-width="2"/>'
    return [line, text(x, height - 3, f"{words} per device", anchor="end")]


def _lines(causes: Mapping[str, str]) -> list[list[tuple[str, float]]]:
    """The legend's lines, each of causes and where they begin."""
    lines: list[list[tuple[str, float]]] = [[]]
    x = 0.0
    for cause in causes:
        width = 17 + 6 * len(cause) + 20
        if x + width > WIDTH and lines[-1]:
            lines.append([])
            x = 0.0
        lines[-1].append((cause, x))
        x += width
    return lines


def _legend(causes: Mapping[str, str]) -> list[str]:
    parts: list[str] = []
    for number, line in enumerate(_lines(causes)):
        for cause, x in line:
            y = LEGEND * number + 4
            parts.append(f'<rect x="{x:g}" y="{y}" width="12" height="12" fill="{causes[cause]}"/>')
            parts.append(text(x + 17, y + 10, cause))
    return parts
