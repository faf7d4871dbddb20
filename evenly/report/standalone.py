"""A picture of `draw` as a file: one SVG that needs neither the page's style sheet nor its script. Pure.

It is laid out again from the figure's own HTML: the SVG with the data is taken over as it is, the texts around it
become texts of the SVG. So a picture of a report and one in a document cannot say different things. It follows the
reader's light or dark, and may be the source of an `<img>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from html.parser import HTMLParser
from pathlib import Path

WIDTH, FONT, LINE, GAP = 760, 13, 20, 14  # pixels: of the picture, its letters, a line of text, between figures
LEFT, RIGHT, AREA = 84, 14, 240  # left and right of the area of curves and rows, and the height of that of curves
BAR, LABEL, TOTAL = 26, 170, 90  # height of a bar's row, width of its label and of its total
# Rules of `page.css` that the SVG needs: colours, light and dark, strokes and fills of what holds the data.
NEEDED = re.compile(
    r"^(?::root\{[^@]*?\}\n|@media \(prefers-color-scheme:dark\)\{:root\{[^@]*?\}\}\n|\.(?:line|box|c\d)\b.*\n)",
    re.MULTILINE,
)
TEXTS = (
    f"text{{font:{FONT}px system-ui,sans-serif;fill:var(--ink)}}"
    "text.soft{fill:var(--soft)}text.warn{fill:var(--warn)}"
    "text.in{font-size:11px;font-weight:600;fill:var(--paper)}.swatch{fill:var(--c)}.swatch.again{fill-opacity:.5}.swatch.faint{fill-opacity:.38}"
    "text.pale{fill:var(--ink)}.track{fill:var(--card)}"
    ".rule{stroke:var(--rule)}.edge{stroke:var(--soft)}.limit{stroke:var(--warn);stroke-width:1.5;stroke-dasharray:5 4}"
)
VOID = ("br", "img", "path")


@dataclass
class Node:
    """An element of a figure."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    children: list[Node | str] = field(default_factory=list["Node | str"])

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str, of_class: str = "") -> Iterator[Node]:
        """The elements below this one, in their order."""
        for child in self.children:
            if isinstance(child, Node):
                if child.tag == tag and (not of_class or of_class in child.classes):
                    yield child
                yield from child.all(tag, of_class)

    def percent(self, side: str) -> float:
        """A length of its style in percent, as a share; 0 where there is none."""
        found = re.search(rf"(?:^|;){side}:([\d.]+)%", self.attributes.get("style", ""))
        return float(found[1]) / 100 if found else 0.0


class _Tree(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Node("")
        self._open = [self.root]
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        if tag == "p" and self._open[-1].tag == "p":
            self._open.pop()
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        while len(self._open) > 1 and tag not in VOID:
            if self._open.pop().tag == tag:
                break

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def standalone(*figures: str, title: str = "") -> str:
    """The figures that `curves`, `boxes` and `stacked` return, below each other, as an SVG document of its own.

    title: what the picture is, for those who cannot see it; by default the first figure's title.
    """
    found = [one for figure in figures for one in _Tree(figure).root.all("figure")]
    parts, top = [], float(GAP)
    for figure in found:
        drawn, height = (_bars if "bars" in figure.classes else _chart)(figure, top)
        parts += drawn
        top += height + GAP
    name = escape(title or (_caption_of(found[0])[0] if found else ""))
    size = f'width="{WIDTH}" height="{top:.0f}" viewBox="0 0 {WIDTH} {top:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" {size}><title>{name}</title>'
    ground = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return "\n".join([head, f"<style>{_style()}</style>", ground, *parts, "</svg>", ""])


def _style() -> str:
    """The colours belong to the picture alone, where it is put into a page."""
    sheet = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return ("".join(NEEDED.findall(sheet)) + TEXTS).replace(":root", ".picture")


# --- texts ---------------------------------------------------------------------------------------------


def width_of(text: str) -> float:
    """Pixels that `text` takes, about: letters of East Asia are twice as wide."""
    return sum(FONT if ord(letter) > 0x2E7F else 0.56 * FONT for letter in text)


def _cut(text: str, pixels: float) -> str:
    while width_of(text) > pixels and len(text) > 2:
        text = text[:-2] + "…"
    return text


def _text(x: float, y: float, text: str, classes: str = "", anchor: str = "start") -> str:
    """Classes `tick`, `total` and `in` are of figures, which another run has others of."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    named = f' class="{classes}"' if classes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{where}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, classes: str) -> str:
    return f'<line class="{classes}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _caption_of(figure: Node) -> tuple[str, list[tuple[str, str]]]:
    """Title, and the legend as class and name."""
    (caption,) = figure.all("figcaption")
    title = "".join(child for child in caption.children if isinstance(child, str))
    legends = [*caption.all("span", "legend")]
    entries = [one for one in legends[0].children if isinstance(one, Node)] if legends else []
    return title, [(" ".join(one.classes), one.text) for one in entries]


def _caption(figure: Node, top: float) -> tuple[list[str], float]:
    """The title, and the legend behind it, in as many lines as they take; the height of these."""
    title, legend = _caption_of(figure)
    parts, x, y = [_text(RIGHT, top + FONT, title)], RIGHT + width_of(title) + 2 * GAP, top
    for colour, name in legend:
        name = _cut(name, WIDTH / 2)
        if x + width_of(name) + 18 > WIDTH - RIGHT and x > RIGHT:
            x, y = float(RIGHT), y + LINE
        parts.append(f'<rect class="swatch {colour}" x="{x:.1f}" y="{y + 3:.1f}" width="10" height="10" rx="2"/>')
        parts.append(_text(x + 15, y + FONT, name))
        x += width_of(name) + 15 + GAP
    return parts, y + LINE + 6 - top


def _notes(figure: Node, top: float) -> tuple[list[str], float]:
    notes = [one.text for one in figure.all("p", "note")]
    return [_text(RIGHT, top + FONT + LINE * at, note, "soft") for at, note in enumerate(notes)], LINE * len(notes)


# --- curves and rows -----------------------------------------------------------------------------------


def _chart(figure: Node, top: float) -> tuple[list[str], float]:
    parts, y = _caption(figure, top)
    y += top
    (area,) = figure.all("div", "area")
    labels = [*figure.all("i", "row")]
    left = max([LEFT if not labels else 0, *(min(LABEL, width_of(one.text)) + 2 * GAP for one in labels)])
    wide, high = WIDTH - left - RIGHT, _height(area)
    parts += [part for tick in area.all("i", "x") for part in _across_tick(tick, left, wide, y + high)]
    for tick in area.all("i", "y"):
        at = y + high * (1 - tick.percent("bottom"))
        parts += [
            _line(left, at, left + wide, at, "rule"),
            _text(left - 6, at + 4, tick.text, "tick soft", anchor="end"),
        ]
    parts += [
        _text(left - 8, y + high * (row.percent("top") + row.percent("height") / 2) + 4, _cut(row.text, LABEL), "soft",
              anchor="end")
        for row in labels
    ]  # fmt: skip
    parts += _data(area, left, y, wide, high, rows=len(labels))
    parts.append(_line(left, y + high, left + wide, y + high, "edge"))
    for limit in area.all("p", "limit"):
        at = y + high * (1 - limit.percent("bottom"))
        parts.append(_line(left, at, left + wide, at, "limit"))
        parts.append(_text(left + wide, at - 4, limit.text, "warn", anchor="end"))
    across = "".join(one.text for one in figure.all("p", "across"))
    parts.append(_text(left + wide / 2, y + high + 2 * LINE, across, "soft", anchor="middle"))
    notes, more = _notes(figure, y + high + 2 * LINE + 6)
    return [*parts, *notes], y + high + 2 * LINE + 6 + more - top


def _height(area: Node) -> float:
    found = re.search(r"height:(\d+)px", area.attributes.get("style", ""))
    return float(found[1]) if found else AREA


def _across_tick(tick: Node, left: float, wide: float, bottom: float) -> list[str]:
    x = left + wide * tick.percent("left")
    mark = _line(x, bottom, x, bottom + 5, "edge")
    return [mark, _text(x, bottom + LINE - 1, tick.text, "tick soft", anchor="middle")]


def _data(area: Node, left: float, top: float, wide: float, high: float, *, rows: int) -> list[str]:
    (svg,) = area.all("svg")
    across, up = map(float, svg.attributes["viewbox"].split()[2:])
    paths = [*svg.all("path")]
    drawn = "".join(map(_path, paths))
    place = f'x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    parts = [
        f'<svg {place} viewBox="0 0 {across:.0f} {up:.0f}" preserveAspectRatio="none" overflow="visible">{drawn}</svg>'
    ]
    if rows and high / rows >= 14:
        parts += [part for path in paths for part in _in_boxes(path, left, top, wide / across, high / up)]
    return parts


def _path(path: Node) -> str:
    style = f' style="{escape(path.attributes["style"])}"' if "style" in path.attributes else ""
    return f'<path class="{escape(" ".join(path.classes))}"{style} d="{escape(path.attributes["d"])}"/>'


def _in_boxes(path: Node, left: float, top: float, scale_x: float, scale_y: float) -> Iterator[str]:
    texts = json.loads(path.attributes["data-texts"])
    found = re.findall(r"M(\d+),(\d+)h(\d+)v(\d+)", path.attributes["d"])
    for text, (x, y, width, height) in zip(texts, found, strict=True):
        shown = text.rpartition(".")[2]
        if int(height) >= 50 and shown and int(width) * scale_x >= 8 * len(shown) + 3:
            middle = left + (int(x) + int(width) / 2) * scale_x
            pale = " pale" * any(one.startswith("pale") for one in path.classes)
            yield _text(middle, top + (int(y) + int(height) / 2) * scale_y + 4, shown, f"in{pale}", anchor="middle")


# --- stacked bars --------------------------------------------------------------------------------------


def _bars(figure: Node, top: float) -> tuple[list[str], float]:
    parts, y = _caption(figure, top)
    y += top
    rows = [*figure.all("div", "bar")]
    labels = [one.text for row in rows for one in row.children[:1] if isinstance(one, Node)]
    left = min(LABEL, max(map(width_of, labels), default=0.0))
    left += RIGHT + GAP
    for row in rows:
        label, track, total = (child for child in row.children if isinstance(child, Node))
        parts += [_text(left - GAP, y + 17, _cut(label.text, LABEL), anchor="end"), *_track(track, left, y)]
        parts.append(_text(WIDTH - RIGHT, y + 17, total.text, "total", anchor="end"))
        y += BAR
    notes, more = _notes(figure, y + 4)
    return [*parts, *notes], y + 4 + more - top


def _track(track: Node, left: float, y: float) -> Sequence[str]:
    wide = WIDTH - RIGHT - TOTAL - left
    parts = [f'<rect class="track" x="{left:.1f}" y="{y + 3}" width="{wide:.1f}" height="{BAR - 6}"/>']
    x = left
    for one in track.all("i"):
        width = wide * one.percent("width")
        place = f'x="{x:.1f}" y="{y + 3}" width="{max(0.5, width - 1):.1f}" height="{BAR - 6}"'
        name = escape(one.attributes.get("title", ""))
        parts.append(f'<rect class="swatch {" ".join(one.classes)}" {place}><title>{name}</title></rect>')
        x += width
    for rule in track.all("b"):
        at = left + wide * rule.percent("left")
        parts.append(_line(at, y, at, y + BAR, "limit"))
    return parts
