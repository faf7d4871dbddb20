"""The plans of one question as a table to sort and as points, time against memory; and of a grid of questions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from evenly.planner.around import Grid, GridCell, frontier
from evenly.planner.prediction import Prediction
from evenly.report.comm import size_in_words, time_in_words
from evenly.report.draw import BYTES, SECONDS, Point, axis, points
from evenly.report.page import Figure, Slider, SortedCell, as_table, head, panes, sortable, text
from evenly.report.plans import against, common, is_fuller, rate_per_device, short, time_in_causes, worst_rank

BEST, FRONTIER, OTHERS = "fastest", "on the frontier", "slower, with no less memory"
FULLER, TOO_LARGE = "fits, but leaves no reserve", "does not fit"
COLOURS = {BEST: "c2", FRONTIER: "c0", OTHERS: "c7", FULLER: "c1", TOO_LARGE: "c6"}
WHY = "why not the first"
GRID_HEADS = ("devices", "global batch", "fastest plan", "step", "samples/s", "peak")


def explorer(grid: Grid) -> str:
    """The answer that was asked for, and by sliders those around it; what is left out, and why, below."""
    devices, batches = (sorted({key[at] for key in (*grid.cells, *grid.left_out)}) for at in (0, 1))
    sliders = [Slider("devices", devices, grid.asked[0]), Slider("global batch", batches, grid.asked[1])]
    shown = {key: answer(cell) for key, cell in grid.cells.items()}
    shown |= {key: text("There was no time to look at this one.", kind="note") for key in grid.left_out}
    return panes(sliders, shown) + _notes(grid)


def _notes(grid: Grid) -> str:
    alone = "".join(text(f"Other {what}: {why}.", kind="note") for what, why in grid.alone.items())
    if len(grid.cells) + len(grid.left_out) == 1:
        return alone
    left_out = ", ".join(f"{devices:,} with {batch:,}" for devices, batch in sorted(grid.left_out))
    words = f"Left out for want of time (devices with batch): {left_out}." if left_out else ""
    return alone + (text(words, kind="note") if words else "") + as_table(GRID_HEADS, _rows(grid), "all in one table")


def _rows(grid: Grid) -> list[tuple[str, ...]]:
    found = list[tuple[str, ...]]()
    for (devices, batch), cell in sorted(grid.cells.items()):
        if cell.refused or not cell.plans:
            found.append((f"{devices:,}", f"{batch:,}", cell.refused, "", "", ""))
            continue
        best = cell.plans[0]
        rate = number_in_words(best.samples_per_s)
        numbers = (time_in_words(best.step_s), rate, size_in_words(best.peak_bytes))
        found.append((f"{devices:,}", f"{batch:,}", short(best.plan, common([best])), *numbers))
    return found


# --- one question --------------------------------------------------------------------------------------


def answer(cell: GridCell) -> str:
    """Its best plan in figures, all of its plans as points, and as a table."""
    if not cell.plans:
        return text(f"{cell.devices:,} devices, a batch of {cell.batch:,}: {cell.refused}", kind="warn")
    warning = text(f"Nothing fits: {cell.refused}", kind="warn") if cell.refused else ""
    on = f" of {cell.cluster}" if cell.devices != cell.plans[0].plan.devices else f" ({cell.cluster})"
    where = f"{cell.devices:,} device{'s' * (cell.devices != 1)}{on}, a batch of {cell.batch:,}"
    return warning + head(_figures(cell.plans[0])) + _picture(cell, where) + _table(cell, where)


def _figures(best: Prediction) -> list[Figure]:
    unit = "tokens" if best.tokens else "samples"
    rate = rate_per_device(best)
    whole, each = number_in_words(rate * best.plan.devices), number_in_words(rate)
    return [
        Figure("step", time_in_words(best.step_s), short(best.plan, common([best]))),
        Figure(f"{unit}/s of all", whole, f"{each} of each device"),
        Figure("peak memory", size_in_words(best.peak_bytes), f"{best.peak_bytes / best.limit_bytes:.0%} of a device"),
        Figure("MFU", f"{best.mfu:.1%}", f"bubble {best.bubble:.1%}" if best.bubble else ""),
    ]


def number_in_words(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _kinds(plans: Sequence[Prediction]) -> list[str]:
    first = {*frontier([(one.step_s, one.peak_bytes) for one in plans])}
    kinds = [FRONTIER if at in first else OTHERS for at in range(len(plans))]
    for at, one in enumerate(plans):
        kinds[at] = TOO_LARGE if not one.fits else FULLER if is_fuller(one) else BEST if at == 0 else kinds[at]
    return kinds


def _key(cell: GridCell, number: int) -> str:
    return f"{cell.cluster} {cell.devices} {cell.batch} {number}"


def _picture(cell: GridCell, where: str) -> str:
    plans, above = cell.plans, common(cell.plans)
    times, sizes = [one.step_s for one in plans], [one.peak_bytes for one in plans]
    limit = plans[0].limit_bytes
    found = [
        Point(one.step_s, one.peak_bytes, kind, _of_point(number, one, short(one.plan, above)), _key(cell, number))
        for number, (one, kind) in enumerate(zip(plans, _kinds(plans), strict=True), 1)
    ]
    return points(
        found,
        COLOURS,
        title=f"memory against time, {where}",
        across=axis([0.97 * min(times), 1.03 * max(times)], "time of a step", units=SECONDS),
        up=axis([*sizes, *([1.03 * limit] if limit < 3 * max(sizes) else [])], "memory", units=BYTES, zero=True),
        limit=(limit, f"{size_in_words(limit)} per device"),
        frontier=[(times[at], sizes[at]) for at in frontier([*zip(times, sizes, strict=True)])],
    )


def _of_point(number: int, one: Prediction, plan: str) -> str:
    return f"{number}. {plan}\n{time_in_words(one.step_s)}, {size_in_words(one.peak_bytes)}"


def _table(cell: GridCell, where: str) -> str:
    plans, above = cell.plans, common(cell.plans)
    unit = "tokens" if plans[0].tokens else "samples"
    heads = ("#", "plan", "step", "peak", "full", "rank", f"{unit}/s\n/device", "MFU", "bubble", WHY)
    rows = [
        (
            SortedCell(str(number), number),
            SortedCell(short(one.plan, above)),
            SortedCell(time_in_words(one.step_s), one.step_s),
            SortedCell(size_in_words(one.peak_bytes), one.peak_bytes),
            SortedCell(f"{one.peak_bytes / one.limit_bytes:.0%}", one.peak_bytes / one.limit_bytes),
            SortedCell(worst_rank(one)),
            SortedCell(number_in_words(rate_per_device(one)), rate_per_device(one)),
            SortedCell(f"{one.mfu:.1%}", one.mfu),
            SortedCell(f"{one.bubble:.1%}" if one.bubble else "-", one.bubble),
            SortedCell(_why(plans[0], one, number), number),
        )
        for number, one in enumerate(plans, 1)
    ]
    keys = [_key(cell, number) for number in range(1, len(plans) + 1)]
    return sortable(heads, rows, label=f"plans for {where}", keys=keys, words=WHY)


def _why(best: Prediction, one: Prediction, number: int) -> str:
    left = f"does not fit: {one.peak_bytes / one.limit_bytes - 1:.0%} too much. " if not one.fits else ""
    if number == 1:
        return left + time_in_causes(one)
    left = f"leaves less than {one.reserve_bytes / one.limit_bytes:.0%} of the memory. " if is_fuller(one) else left
    return left + against(best, one)
