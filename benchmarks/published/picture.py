"""One self-contained SVG: predicted against measured, in step time and memory, and the errors per source. Pure."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

PANEL, GAP, LEFT, TOP, LINE = 380, 90, 70, 50, 18
BAR_WIDTH, NAME_WIDTH, BAR_MOST = 160, 180, 0.4  # an error of BAR_MOST and more fills a bar
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A square with logarithmic axes, the same on both sides."""

    x: float
    low: float
    high: float

    def place(self, measured: float, predicted: float) -> tuple[float, float]:
        """Pixels, measured to the right and predicted upwards."""
        return self.x + self._share(measured) * PANEL, TOP + PANEL - self._share(predicted) * PANEL

    def _share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)


def draw(document: Mapping[str, Any]) -> str:
    """The picture of a document with rows."""
    sources = list(document["sources"])
    colours = {name: _colour(place, len(sources)) for place, name in enumerate(sources)}
    bars_top = TOP + PANEL + 80
    parts = [
        *_scatter("step time, seconds", document["rows"], "time_s", 1.0, LEFT, colours),
        *_scatter("peak of memory, GiB", document["rows"], "memory_bytes", GIB, LEFT + PANEL + GAP, colours),
        *_bars("error of step time: median, and p90 (lighter)", document, "time", LEFT, bars_top, colours),
        *_bars("error of memory, grade A", document, "memory", LEFT + PANEL + GAP, bars_top, colours),
    ]
    size = f'width="{LEFT + 2 * PANEL + GAP + 60}" height="{bars_top + LINE * len(sources) + 30}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _scatter(
    title: str, rows: Sequence[Mapping[str, Any]], key: str, unit: float, x: float, colours: Mapping[str, str]
) -> Iterable[str]:
    """A dot per row, the diagonal, and 20 % to either side of it."""
    pairs = [(row, row[key]["measured"] / unit, row[key]["predicted"] / unit) for row in rows if key in row]
    yield _text(x, TOP - 14, f"{title}: predicted (up) against measured, {len(pairs)} rows")
    yield f'<rect x="{x}" y="{TOP}" width="{PANEL}" height="{PANEL}" fill="none" stroke="#999"/>'
    if not pairs:
        return
    values = [value for _, *both in pairs for value in both]
    panel = Panel(x=x, low=min(values) / 1.3, high=max(values) * 1.3)
    yield from _axes(panel)
    for row, measured, predicted in pairs:
        cx, cy = panel.place(measured, predicted)
        label = escape(f"{row['id']}: measured {measured:.4g}, predicted {predicted:.4g}")
        dot = f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colours[row["source"]]}" fill-opacity="0.6">'
        yield f"{dot}<title>{label}</title></circle>"


def _axes(panel: Panel) -> Iterable[str]:
    off = math.log(1.2) / math.log(panel.high / panel.low) * PANEL  # pixels that 20 % are
    left, right, bottom = panel.x, panel.x + PANEL, TOP + PANEL
    yield _line(left, bottom, right, TOP, "#333")
    yield _line(left, bottom - off, right - off, TOP, "#bbb")
    yield _line(left + off, bottom, right, TOP + off, "#bbb")
    for power in range(math.ceil(math.log10(panel.low)), math.floor(math.log10(panel.high)) + 1):
        x, y = panel.place(10.0**power, 10.0**power)
        yield _text(x, bottom + 16, f"{10.0**power:g}", "middle")
        yield _text(left - 6, y + 4, f"{10.0**power:g}", "end")


def _bars(
    title: str, document: Mapping[str, Any], key: str, x: float, top: float, colours: Mapping[str, str]
) -> Iterable[str]:
    yield _text(x, top - 10, f"{title} (full width: {100 * BAR_MOST:.0f} %)")
    for place, (name, figures) in enumerate(document["sources"].items()):
        y, found = top + LINE * place, figures[key]
        yield _text(x, y + 12, name)
        for share, opacity in ((found["p90"], 0.35), (found["median"], 1.0)):
            if share is not None:
                width = min(share / BAR_MOST, 1.0) * BAR_WIDTH
                box = f'x="{x + NAME_WIDTH}" y="{y + 2}" width="{width:.1f}" height="{LINE - 5}"'
                yield f'<rect {box} fill="{colours[name]}" fill-opacity="{opacity}"/>'
        if found["rows"]:
            figure = f"{100 * found['median']:.1f} / {100 * found['p90']:.1f} %"
            yield _text(x + NAME_WIDTH + BAR_WIDTH + 5, y + 12, figure, "start")


def _colour(place: int, count: int) -> str:
    """Hues around the circle, neighbours of unlike lightness."""
    red, green, blue = colorsys.hls_to_rgb(place / max(count, 1), 0.35 if place % 2 else 0.5, 0.7)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
