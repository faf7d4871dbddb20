"""Pictures as parts of a page: curves, points, boxes in rows, stacked bars and cut matrices. Pure; `page.css` and
`page.js` belong to it. `standalone` makes files of them.

A picture is as wide as its page. Its SVG is stretched to that width, while strokes and text are not: texts are HTML
around it. So it is readable on a phone and without a script, and follows light and dark by its classes `c0` to `c7`.

The SVG of curves, points and rows holds the data and no second copy does: x runs from 0 to `ACROSS` over the axis, y of
curves from 0 at the top to `UP`. `page.js` reads from there what it says under the pointer, and zooms by the view box;
`page.css` has the colours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from evenly.report.axes import BYTES as BYTES
from evenly.report.axes import ROOM as ROOM
from evenly.report.axes import SECONDS as SECONDS
from evenly.report.axes import ChartAxis as ChartAxis
from evenly.report.axes import Number, is_drawn, short
from evenly.report.axes import axis as axis
from evenly.report.standalone import standalone as standalone

ACROSS, UP, ROW = 1_000_000, 100_000, 100  # units of an SVG: the width, the height of curves, the height of a row
COLOURS = 8
COLUMNS = 1000  # of a picture, in each of which a line keeps its least and its largest value
LEAST_COLUMNS = 25
POINTS = 12_000  # of all lines of a picture
MOST_BOXES = 6000
LONGEST, LONGEST_TEXT = 80, 300  # letters of a name, of what is said of a point
ALIKE = 0.004  # of the height of a picture: curves that are no further apart look like one
DASH = 7  # pixels of such a curve, before another one has its turn


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
    styles = _styles_of_alike([line for line, _ in ordered], up)
    paths = "".join(
        _path(line, colour, across, up, columns, style) for (line, colour), style in zip(ordered, styles, strict=True)
    )
    legend = "".join(
        _legend_button(line.name, f"{_colour(colour)}{' faint' * line.faint}") for line, colour in numbered if line.name
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
        f"{_rule(limit, up)}</div><p class=across>{escape(across.title)}</p></div></figure>"
    )


def _colour(number: int) -> str:
    """The class of a colour; from the ninth on the first ones come again, with stripes or dashes."""
    return f"c{number % COLOURS}{' again' * (number >= COLOURS)}"


def _styles_of_alike(lines: Sequence[Line], up: ChartAxis) -> list[str]:
    """How those lines are drawn that lie on each other, so that all are seen: dashed in turns, marks around marks."""
    groups: list[list[int]] = []
    for at, line in enumerate(lines):
        group = next((one for one in groups if not line.faint and _are_alike(lines[one[0]], line, up)), None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    styles = [""] * len(lines)
    for group in groups:
        for place, at in enumerate(group if len(group) > 1 else ()):
            if lines[at].dots:
                styles[at] = f"stroke-width:{7 + 4 * min(3, len(group) - 1 - place)}px"
            elif place:
                apart, begin = DASH * (len(group) - 1), DASH * place
                styles[at] = f"stroke-dasharray:{DASH} {apart};stroke-dashoffset:-{begin};stroke-linecap:butt"
    return styles


def _are_alike(one: Line, other: Line, up: ChartAxis) -> bool:
    if (one.dots, one.faint, len(one.xs)) != (other.dots, other.faint, len(other.xs)) or list(one.xs) != list(other.xs):
        return False
    return all(
        abs(up.share(y or 0.0) - up.share(z or 0.0)) <= ALIKE
        if is_drawn(y, log=up.log) and is_drawn(z, log=up.log)
        else is_drawn(y, log=up.log) == is_drawn(z, log=up.log)
        for y, z in zip(one.ys, other.ys, strict=True)
    )


def _legend_button(name: str, colour: str) -> str:
    name = escape(name[:LONGEST])
    return f'<button type=button class="{colour}" aria-pressed=true data-line="{name}">{name}</button>'


def _path(line: Line, colour: int, across: ChartAxis, up: ChartAxis, columns: int, style: str) -> str:
    classes = f"line {_colour(colour)}{' faint' * line.faint}{' dots' * line.dots}"
    styled = f' style="{style}"' if style else ""
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
    return f'<path class="{classes}" data-line="{name}"{styled} d="{text}"/>'


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


# --- points --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A mark at (`x`, `y`) in its kind's colour. text: what it is. key: of the table's row that says more of it."""

    x: float
    y: float
    kind: str
    text: str
    key: str = ""


def points(
    found: Sequence[Point],
    colours: Mapping[str, str],
    *,
    title: str,
    across: ChartAxis,
    up: ChartAxis,
    limit: tuple[float, str] | None = None,
    frontier: Sequence[tuple[float, float]] = (),
) -> str:
    """Points over one pair of axes, each of which is named where a reader points at it.

    colours: of each kind the class, in the order of the legend. limit: as of `curves`.
    frontier: points from left to right that a line goes through in steps, as nothing lies below it.
    """
    kinds = [kind for kind in colours if any(one.kind == kind for one in found)]
    buttons = "".join(_legend_button(kind, colours[kind]) for kind in kinds)
    paths = "".join(_points([one for one in found if one.kind == kind], colours[kind], across, up) for kind in kinds)
    if len(frontier) > 1:
        steps = [place for (_, before), (x, y) in pairwise(frontier) for place in ((x, before), (x, y))]
        line = "L".join(_place(place, across, up) for place in [frontier[0], *steps])
        paths = f'<path class="line faint c7" data-line=frontier d="M{line}"/>{paths}'
    described = f"{title[:LONGEST]}: {len(found)} points, {up.title} over {across.title}"
    return (
        f'<figure class="chart points" data-x="{across.as_data()}" data-y="{up.as_data()}">'
        f"<figcaption>{escape(title[:LONGEST])}<span class=legend>{buttons}</span></figcaption>"
        f'<div class=plot tabindex=0 role=group aria-label="{escape(described)}"><div class=area>'
        f"{_ticks(across, up)}<svg viewBox='0 0 {ACROSS} {UP}' preserveAspectRatio=none aria-hidden=true>{paths}</svg>"
        f"{_rule(limit, up)}</div><p class=across>{escape(across.title)}</p></div></figure>"
    )


def _points(alike: Sequence[Point], colour: str, across: ChartAxis, up: ChartAxis) -> str:
    drawn = "".join(f"M{_place((one.x, one.y), across, up)}h0" for one in alike)
    texts, keys = (
        json.dumps(words, separators=(",", ":"))
        for words in zip(*((one.text[:LONGEST_TEXT], one.key) for one in alike), strict=True)
    )
    return (
        f'<path class="line dots {colour}" data-line="{escape(alike[0].kind)}" data-texts="{escape(texts)}" '
        f'data-keys="{escape(keys)}" d="{drawn}"/>'
    )


def _rule(limit: tuple[float, str] | None, up: ChartAxis) -> str:
    """A line across at a value of `up`, with what it is; none beyond the axis."""
    if limit is None or not 0 <= up.share(limit[0]) <= 1:
        return ""
    share = up.share(limit[0])
    return f'<p class=limit data-share={share:.5f} style="bottom:{100 * share:.2f}%">{escape(limit[1])}</p>'


# --- boxes in rows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """In `row` from `begin` to `end`, in the kind's colour.

    text: what it is; behind a tab what stands in the box, else what follows the last dot does.
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
    labels: Sequence[str],
    found: Sequence[Box],
    colours: Mapping[str, str],
    *,
    title: str,
    longest: float,
    across: ChartAxis | None = None,
) -> str:
    """A row for each label with its boxes, on one scale of seconds from 0 to `longest`, or of `across`.

    colours: of each kind the class, in the order of the legend. Of more than `MOST_BOXES` the shortest lower ones are
    left out, then the last rows, then the shortest of all; a line says so.
    """
    kept = _longest([box for box in found if not box.lower], [box for box in found if box.lower])
    shown = _rows_shown(len(labels), kept)
    kept = _longest([], [box for box in kept if box.row < shown])
    in_time = axis((0.0, longest or 1.0), "time", units=SECONDS)
    across, of = (across, " data-plain") if across is not None else (in_time, "")
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
        f'<figure class="chart rows" data-x="{across.as_data()}"{of}>'
        f"<figcaption>{escape(title)}<span class=legend>{legend}</span></figcaption>"
        f'<div class=plot tabindex=0 role=group aria-label="{escape(title)}">'
        f'<div class=area style="height:{_height(shown)}px">{_ticks(across, None)}'
        f"<svg viewBox='0 0 {ACROSS} {ROW * shown}' preserveAspectRatio=none aria-hidden=true>{paths}</svg>"
        f"<div class=labels aria-hidden=true>{rows}</div><div class=texts aria-hidden=true></div></div>"
        f"<p class=across>{escape(across.title)}</p></div>{left_out}</figure>"
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
    bars: Sequence[StackedBar],
    words: Callable[[float], str],
    *,
    title: str,
    limit: tuple[float, str] | None = None,
    in_legend: bool = False,
) -> str:
    """The bars below each other on one scale, their parts in the same order and colours.

    words: a length in words. limit: the length at which a rule crosses all bars, and what it is. in_legend: whether the
    legend says how long the parts of the only bar are, and not the end of the bar how long it is.
    """
    names = [*dict.fromkeys(name for bar in bars for name, length in bar.parts.items() if length > 0)]
    totals = [sum(bar.parts.values()) for bar in bars]
    longest = max([*totals, limit[0] if limit else 0.0]) or 1.0
    entries = [f"{name} {words(bars[0].parts[name])}" if in_legend else name for name in names]
    legend = "".join(f"<span class='{_colour(at)}'>{escape(entry)}</span>" for at, entry in enumerate(entries))
    rule = f'<b style="left:{100 * limit[0] / longest:.2f}%"></b>' if limit else ""
    ends = ["" if in_legend else words(total) for total in totals]
    rows = "".join(
        f"<div class=bar><span>{escape(bar.label[:LONGEST_TEXT])}</span>"
        f"<span class=track>{_parts(bar, names, longest, words)}{rule}</span><span>{escape(end)}</span></div>"
        for bar, end in zip(bars, ends, strict=True)
    )
    named = f"<p class=note>the line: {escape(limit[1])}</p>" if limit else ""
    caption = f"<figcaption>{escape(title)}<span class=legend>{legend}</span></figcaption>"
    return f"<figure class=bars>{caption}{rows}{named}</figure>"


def _parts(bar: StackedBar, names: Sequence[str], longest: float, words: Callable[[float], str]) -> str:
    return "".join(
        f'<i class="{_colour(at)}" style="width:{100 * length / longest:.3f}%" '
        f'title="{escape(f"{name}: {words(length)}")}"></i>'
        for at, name in enumerate(names)
        if (length := bar.parts.get(name, 0.0)) > 0
    )


# --- cut matrices --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CutMatrix:
    """A matrix, or a vector, of `shape`; along `dim` it is dealt to `ranks` in turn, `times` over. dim None: whole."""

    name: str
    shape: Sequence[int]
    dim: int | None
    ranks: int
    times: int = 1


def matrices(found: Sequence[CutMatrix], *, title: str) -> str:
    """Matrices next to each other, about as wide and high as they are to each other, a colour for each rank's part."""
    most = max((max(one.shape, default=1) for one in found), default=1)
    ranks = max((one.ranks for one in found), default=1)
    legend = "".join(f"<span class=c{rank % COLOURS}>rank {rank}</span>" for rank in range(min(ranks, COLOURS)))
    drawn = "".join(_matrix(one, most) for one in found)
    return (
        f"<figure class=matrices><figcaption>{escape(title)}<span class=legend>{legend}</span></figcaption>"
        f"<div class=shelf>{drawn}</div></figure>"
    )


def _matrix(one: CutMatrix, most: int) -> str:
    """Sides grow with the square root, so that a thin one can be seen."""
    rows, columns = (*one.shape, 1, 1)[:2] if len(one.shape) != 1 else (one.shape[0], 1)
    high, wide = (max(0.9, 8 * (side / most) ** 0.5) for side in (rows, columns))
    parts = one.ranks * one.times if one.dim in (0, 1) else 0
    stripes = "".join(f"<i class=c{at % one.ranks % COLOURS}></i>" for at in range(min(parts, 96)))
    size = " x ".join(f"{side:,}" for side in one.shape)
    kind = "matrix columns" if one.dim == 1 else "matrix"
    return (
        f'<div class="{kind}"><b style="height:{high:.2f}rem;width:{wide:.2f}rem">{stripes}</b>'
        f"<span>{escape(one.name[:LONGEST])}</span><span class=note>{size}</span></div>"
    )
