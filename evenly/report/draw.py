"""Pictures as parts of a page: curves, boxes in rows, and stacked bars. Pure; `page.css` and `page.js` belong to it.
`standalone` makes files of them.

A picture is as wide as its page. Its SVG is stretched to that width, while strokes and text are not: texts are HTML
around it. So it is readable on a phone and without a script, and follows light and dark by its classes `c0` to `c7`.

The SVG of curves and rows holds the data and no second copy does: x runs from 0 to `ACROSS` over the axis, y of curves
from 0 at the top to `UP`. `page.js` reads from there what it says under the pointer, and zooms by the view box.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, isfinite, log10

from evenly.report.standalone import standalone as standalone

ACROSS, UP, ROW = 1_000_000, 100_000, 100  # units of an SVG: the width, the height of curves, the height of a row
COLOURS = 8
COLUMNS = 1000  # of a picture, in each of which a line keeps its least and its largest value
LEAST_COLUMNS = 25
POINTS = 12_000  # of all lines of a picture
MOST_BOXES = 6000
LONGEST = 80  # letters of a name
TICKS = 5

Number = float | int | None
BYTES = tuple((2.0 ** (10 * power), unit) for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
SECONDS = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"))
Units = Sequence[tuple[float, str]]


# --- axes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChartAxis:
    """The values from `low` to `high`, which differ; shown divided by `scale`, with `unit` behind.

    log: whether distances are those of logarithms; `low` is above 0 then.
    """

    low: float
    high: float
    title: str = ""
    scale: float = 1.0
    unit: str = ""
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies, 0 to 1."""
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values between the ends."""
        if self.log:
            powers = [*range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1)]
            return [10.0**power for power in powers[:: 1 + len(powers) // (TICKS + 2)]]
        return [value * self.scale for value in round_values(self.low / self.scale, self.high / self.scale)]

    def as_data(self) -> str:
        """What `page.js` has to know, as the value of an attribute."""
        fields = [self.low, self.high, self.scale, self.unit, int(self.log)]
        return escape(json.dumps(fields, separators=(",", ":")))


def axis(
    values: Iterable[Number], title: str, *, units: Units = ((1.0, ""),), log: bool = False, zero: bool = False
) -> ChartAxis:
    """The axis over all finite `values`, in the largest of `units` that its largest value reaches; zero: from 0 on."""
    found = [value for value in values if value is not None and is_drawn(value, log=log)]
    low, high = (min(found), max(found)) if found else (1.0, 10.0)
    low = min(low, 0.0) if zero and not log else low
    if high - low <= max(1e-30, 1e-12 * max(abs(low), abs(high))):  # no more than rounding
        low, high = (low / 2, high * 2) if log else (low - abs(low) / 2 - 0.5 * (not low), high + abs(high) / 2 or 0.5)
    largest = max(abs(low), abs(high))
    scale, unit = next((one for one in reversed(units) if largest >= one[0]), units[0])
    return ChartAxis(low, high, title, scale, unit, log)


def is_drawn(value: Number, *, log: bool = False) -> bool:
    """Whether it is a number with a place on an axis."""
    return value is not None and isfinite(value) and abs(value) < 1e30 and (value > 1e-30 or not log)


def round_values(low: float, high: float, most: int = TICKS) -> list[float]:
    """At most about `most` values between `low` and `high`: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [number * step for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number with four digits: `1234`, `12.3k`, `0.0012`, `1.2e-07`."""
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * factor or (abs(value) >= factor and factor > 1e3):
            return f"{float(f'{value / factor:.4g}'):g}{letter}"
    return f"{float(f'{value:.4g}'):g}"


# --- curves --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """The values `ys` at the rising `xs`; None, and what is not finite, leaves a gap.

    dots: as marks, which are not thinned. faint: behind the others. colour: of 8; by default its place among all lines.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[Number]
    dots: bool = False
    faint: bool = False
    colour: int | None = None


def thinned(xs: Sequence[float], ys: Sequence[Number], columns: int) -> list[tuple[float, float] | None]:
    """At most two points for each of `columns` of equal width: its least and its largest value, in their order.

    None stands where there is a gap between points.
    """
    if not xs:
        return []
    width = ((xs[-1] - xs[0]) or 1.0) / columns
    found: list[tuple[float, float] | None] = []
    least = largest = 0
    column, gap = None, False

    def end_column() -> None:
        if column is not None:
            found.extend((xs[at], float(ys[at] or 0.0)) for at in sorted({least, largest}))

    for at, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if not is_drawn(y):
            gap = True
            continue
        assert y is not None
        place = min(columns - 1, int((x - xs[0]) / width))
        if place != column:
            end_column()
            if gap and found:
                found.append(None)
            column, least, largest, gap = place, at, at, False
        least = at if y < (ys[least] or 0.0) else least
        largest = at if y > (ys[largest] or 0.0) else largest
    end_column()
    return found


def curves(
    lines: Sequence[Line],
    *,
    title: str,
    across: ChartAxis,
    up: ChartAxis,
    limit: tuple[float, str] | None = None,
    columns: int = COLUMNS,
) -> str:
    """Curves over one pair of axes, with a legend by which each can be left out.

    limit: a value of `up` where a rule is drawn, and what it is. columns: in which each line has two points.
    """
    columns = max(LEAST_COLUMNS, min(columns, POINTS // (2 * max(1, len(lines)))))
    numbered = [(line, number if line.colour is None else line.colour) for number, line in enumerate(lines)]
    ordered = sorted(numbered, key=lambda one: not one[0].faint)
    paths = "".join(_path(line, colour, across, up, columns) for line, colour in ordered)
    rule = ""
    if limit is not None and 0 <= up.share(limit[0]) <= 1:
        share = up.share(limit[0])
        rule = f'<p class=limit data-share={share:.5f} style="bottom:{100 * share:.2f}%">{escape(limit[1])}</p>'
    legend = "".join(
        f'<button type=button class=c{colour % COLOURS} aria-pressed=true data-line="{escape(line.name[:LONGEST])}">'
        f"{escape(line.name[:LONGEST])}</button>"
        for line, colour in numbered
        if line.name
    )
    legend = f"<span class=legend>{legend}</span>" if len(lines) > 1 else ""
    described = (
        f"{title[:LONGEST]}: {', '.join(line.name[:LONGEST] for line in lines if line.name)} over {across.title}"
    )
    return (
        f'<figure class=chart data-x="{across.as_data()}" data-y="{up.as_data()}">'
        f"<figcaption>{escape(title[:LONGEST])}{legend}</figcaption>"
        f'<div class=plot tabindex=0 role=group aria-label="{escape(described)}"><div class=area>'
        f"{_ticks(across, up)}<svg viewBox='0 0 {ACROSS} {UP}' preserveAspectRatio=none aria-hidden=true>{paths}</svg>"
        f"{rule}</div><p class=across>{escape(across.title)}</p></div></figure>"
    )


def _path(line: Line, colour: int, across: ChartAxis, up: ChartAxis, columns: int) -> str:
    classes = f"line c{colour % COLOURS}{' faint' * line.faint}{' dots' * line.dots}"
    name = escape(line.name[:LONGEST])
    pairs = [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if is_drawn(x, log=across.log)]
    xs, ys = [x for x, _ in pairs], [y if is_drawn(y, log=up.log) else None for _, y in pairs]
    if line.dots or across.log:
        points: list[tuple[float, float] | None] = [
            (x, y) if y is not None else None for x, y in zip(xs, ys, strict=True)
        ]
    else:
        points = thinned(xs, ys, columns)
    text = "".join(
        f"M{_place(point, across, up)}h0" if line.dots or before is None else f"L{_place(point, across, up)}"
        for before, point in pairwise([None, *points])
        if point is not None
    )
    return f'<path class="{classes}" data-line="{name}" d="{text}"/>'


def _place(point: tuple[float, float], across: ChartAxis, up: ChartAxis) -> str:
    return f"{round(ACROSS * across.share(point[0]))},{round(UP * (1 - up.share(point[1])))}"


def _ticks(across: ChartAxis, up: ChartAxis | None) -> str:
    """The labels and rules of both axes; `page.js` writes them again after zooming."""
    ticks = [f'<i class=x style="left:{100 * across.share(v):.3f}%">{_tick(across, v)}</i>' for v in across.ticks()]
    if up is not None:
        ticks += [
            f'<i class=y style="bottom:{100 * up.share(v):.3f}%"><span>{_tick(up, v)}</span></i>' for v in up.ticks()
        ]
    return f"<div class=ticks aria-hidden=true>{''.join(ticks)}</div>"


def _tick(one: ChartAxis, value: float) -> str:
    return escape(f"{short(value / one.scale)} {one.unit}".strip())


# --- boxes in rows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """In `row` from `begin` to `end`, in the kind's colour. text: what it is; what follows the last dot stands in it.

    pale: how much paler, 0 to 2. lower: in the lower third of its row, where others may lie above it.
    """

    row: int
    begin: float
    end: float
    kind: str
    text: str
    pale: int = 0
    lower: bool = False


def boxes(
    labels: Sequence[str], found: Sequence[Box], colours: Mapping[str, str], *, title: str, longest: float
) -> str:
    """A row for each label with its boxes, on one scale of seconds from 0 to `longest`.

    colours: of each kind the class, in the order of the legend. Of more than `MOST_BOXES` the shortest lower ones are
    left out, then the last rows, then the shortest of all; a line says so.
    """
    kept = _longest([box for box in found if not box.lower], [box for box in found if box.lower])
    shown = _rows_shown(len(labels), kept)
    kept = _longest([], [box for box in kept if box.row < shown])
    across = axis((0.0, longest or 1.0), "seconds", units=SECONDS)
    groups: dict[tuple[str, int], list[Box]] = {}
    for box in kept:
        groups.setdefault((box.kind, box.pale), []).append(box)
    ordered = sorted(groups, key=lambda key: [*colours].index(key[0]))
    lowered = any(box.lower for box in found)
    paths = "".join(_boxes(groups[key], colours[key[0]], across, lowered=lowered) for key in ordered)
    kinds = dict.fromkeys(kind for kind, _ in ordered)
    legend = "".join(f"<span class={colours[kind]}>{escape(kind)}</span>" for kind in kinds)
    rows = "".join(
        f'<i class=row style="top:{100 * row / shown:.3f}%;height:{100 / shown:.3f}%">{escape(label)}</i>'
        for row, label in enumerate(labels[:shown])
    )
    left_out = f"<p class=note>{len(kept)} of {len(found)} boxes" if len(kept) < len(found) else ""
    left_out += f", of rows 0 to {shown - 1} of {len(labels)}" if shown < len(labels) else ""
    return (
        f'<figure class="chart rows" data-x="{across.as_data()}">'
        f"<figcaption>{escape(title)}<span class=legend>{legend}</span></figcaption>"
        f'<div class=plot tabindex=0 role=group aria-label="{escape(title)}">'
        f'<div class=area style="height:{_height(shown)}px">{_ticks(across, None)}'
        f"<svg viewBox='0 0 {ACROSS} {ROW * shown}' preserveAspectRatio=none aria-hidden=true>{paths}</svg>"
        f"<div class=labels aria-hidden=true>{rows}</div><div class=texts aria-hidden=true></div></div>"
        f"<p class=across>time</p></div>{left_out}</figure>"
    )


def _height(rows: int) -> int:
    """Pixels of so many rows."""
    return max(60, rows * (34 if rows <= 4 else 26 if rows <= 16 else 16))


def _longest(first: Sequence[Box], others: Sequence[Box]) -> list[Box]:
    """All of `first`, and of the others, in their order, as many of the longest as there is room for."""
    room = max(0, MOST_BOXES - len(first))
    by_length = sorted(range(len(others)), key=lambda at: others[at].begin - others[at].end)
    return [*first, *(others[at] for at in sorted(by_length[:room]))]


def _rows_shown(rows: int, found: Sequence[Box]) -> int:
    counts = [0] * rows
    for box in found:
        counts[box.row] += 1
    total = 0
    for row, count in enumerate(counts):
        total += count
        if total > MOST_BOXES and row:
            return row
    return rows


def _boxes(group: Sequence[Box], colour: str, across: ChartAxis, *, lowered: bool) -> str:
    """lowered: whether some boxes of the picture have the lower third of their rows."""
    drawn: list[str] = []
    for box in group:
        x = round(ACROSS * across.share(box.begin))
        width = max(1, round(ACROSS * across.share(box.end)) - x)
        top, height = ROW * box.row + (70 if box.lower else 6), 24 if box.lower else 60 if lowered else 88
        drawn.append(f"M{x},{top}h{width}v{height}h-{width}z")
    texts = escape(json.dumps([box.text[:LONGEST] for box in group], separators=(",", ":")))
    one = group[0]
    classes = f"box {colour}{f' pale{one.pale}' if one.pale else ''}"
    return f'<path class="{classes}" data-kind="{escape(one.kind)}" data-texts="{texts}" d="{"".join(drawn)}"/>'


# --- stacked bars --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackedBar:
    """One bar: its label, and how long each of its parts is."""

    label: str
    parts: Mapping[str, float]


def stacked(
    bars: Sequence[StackedBar], words: Callable[[float], str], *, title: str, limit: tuple[float, str] | None = None
) -> str:
    """The bars below each other on one scale, their parts in the same order and colours.

    words: a length in words. limit: the length at which a rule crosses all bars, and what it is.
    """
    names = [*dict.fromkeys(name for bar in bars for name, length in bar.parts.items() if length > 0)]
    totals = [sum(bar.parts.values()) for bar in bars]
    longest = max([*totals, limit[0] if limit else 0.0]) or 1.0
    legend = "".join(f"<span class=c{at % COLOURS}>{escape(name)}</span>" for at, name in enumerate(names))
    rule = f'<b style="left:{100 * limit[0] / longest:.2f}%"></b>' if limit else ""
    rows = "".join(
        f"<div class=bar><span>{escape(bar.label[:LONGEST])}</span>"
        f"<span class=track>{_parts(bar, names, longest, words)}{rule}</span><span>{escape(words(total))}</span></div>"
        for bar, total in zip(bars, totals, strict=True)
    )
    named = f"<p class=note>the line: {escape(limit[1])}</p>" if limit else ""
    caption = f"<figcaption>{escape(title)}<span class=legend>{legend}</span></figcaption>"
    return f"<figure class=bars>{caption}{rows}{named}</figure>"


def _parts(bar: StackedBar, names: Sequence[str], longest: float, words: Callable[[float], str]) -> str:
    return "".join(
        f'<i class=c{at % COLOURS} style="width:{100 * length / longest:.3f}%" '
        f'title="{escape(f"{name}: {words(length)}")}"></i>'
        for at, name in enumerate(names)
        if (length := bar.parts.get(name, 0.0)) > 0
    )
