"""The page of one run: what matters at its head, then curves, times, memory, predictions and what befell it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from evenly.observe.progress import duration
from evenly.report import analysis, events
from evenly.report import predicted as prediction
from evenly.report.comm import size_in_words, time_in_words
from evenly.report.draw import BYTES, COLUMNS, ROOM, SECONDS, ChartAxis, Line, StackedBar, axis, curves, stacked
from evenly.report.page import Figure, Section, as_table, contents, document, head, side_by_side, table, text
from evenly.report.run import (
    MEMORY_HEADS,
    Row,
    RunSummary,
    amount,
    balance,
    by_set,
    course_rows,
    is_count,
    logged_curves,
    memory_rows,
    metric_curves,
)

TABLE_ROWS = 20  # of a curve in numbers
MOST_DEVICES = 8  # whose memory is drawn
MOST_METRICS = 24  # that are drawn, each in a picture of its own
ALL_COLUMNS = 16_000  # of all lines of a page, which keeps it under a megabyte
SLOW_HEADS = ("step", "time", "of the median", "rank", "why")
WAIT_HEADS = ("rank", "computes", "waits for slower ranks", "of a step", "mostly for")
LOGGED_HEADS = ("figure", "first", "last", "least", "largest", "times")
REST = "samples, update and the rest"
GROWTH_HEADS = ("device", "peak", "rose in the second half")


def page(run: RunSummary, folder: Path | None, *timeline: Section, now_s: float, script: str = "") -> str:
    """The page of `run`; timeline: of one of its steps. script: of a page that is served, see `page.document`."""
    title, parts = _parts(run, folder, timeline, now_s)
    return document(title, *parts, lead=lead(run), script=script)


def inside(run: RunSummary, folder: Path | None, *timeline: Section, now_s: float) -> str:
    """What the page shows, to be put in the place of what it has shown before."""
    title, parts = _parts(run, folder, timeline, now_s)
    return contents(title, *parts, lead=lead(run))


def lead(run: RunSummary) -> str:
    world = run.plan.get("world")
    return f"{run.plan.get('plan')}, {world} rank{'s' * (world != 1)}"


def _parts(
    run: RunSummary, folder: Path | None, timeline: Sequence[Section], now_s: float
) -> tuple[str, list[str | Section]]:
    parts: list[str | Section] = [head(figures(run, now_s)), *warnings(run)]
    if run.steps:
        columns = _columns(run)
        parts += [_losses(run, columns), *_logged(run, columns), _rates(run, columns), _speeds(run, columns)]
        if (time := _time(run)) is not None:
            parts.append(time)
    parts += timeline
    if run.steps:
        parts.append(_memory(run, _columns(run)))
    if (found := prediction.predicted_of(run)) is not None:
        parts.append(prediction.section(run, found))
    if rows := events.rows(run.events, run.slow, folder):
        parts.append(Section("Starts, faults and restarts", [table(events.HEADS, rows, label="events", words=True)]))
    parts.append(Section("The run in words", [table((), course_rows(run), label="the run in words", words=True)]))
    return str(run.plan.get("job")), parts


def _columns(run: RunSummary) -> int:
    lines = 12 + len(by_set(run)) + min(MOST_DEVICES, len(run.steps[-1]["memory_bytes"]))
    lines += sum(map(len, [*metric_curves(run).values()][:MOST_METRICS])) + min(MOST_METRICS, len(logged_curves(run)))
    return min(COLUMNS, ALL_COLUMNS // lines)


# --- the head ------------------------------------------------------------------------------------------


def figures(run: RunSummary, now_s: float) -> list[Figure]:
    """What matters: state, loss, speed, time, memory, and where the time goes."""
    state, steps = analysis.state_of(run, now_s), run.plan.get("steps")
    done = run.steps[-1]["step"] if run.steps else 0
    of_steps = f"step {done:,} of {steps:,}" if is_count(steps) else f"step {done:,}"
    found = [Figure("state", state, of_steps)]
    if run.steps:
        found.append(Figure("loss", _number(run.steps[-1]["loss"]), f"from {_number(run.steps[0]['loss'])}"))
    for name, records in [*by_set(run).items()][:2]:
        best = min((loss for row in records if (loss := row["eval_loss"]) is not None), default=None)
        what = f"evaluation loss{f', {name}' if name else ''}"
        found.append(Figure(what, _number(records[-1]["eval_loss"]), f"best {_number(best)}"))
    return [*found, *_speed_figures(run, state), *_memory_figures(run), *_share_figures(run)]


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) and isfinite(value) else "not finite"


def _speed_figures(run: RunSummary, state: analysis.State) -> list[Figure]:
    speed = analysis.speed_of(run, recent=state == "running")
    if speed is None:
        return []
    if speed.tokens_per_s is not None:
        rate, further = f"{speed.tokens_per_s:,.0f} tokens/s", f", {speed.samples_per_s:,.0f} samples/s"
    else:
        rate, further = f"{speed.samples_per_s:,.0f} samples/s", ""
    found = [Figure("speed", rate, f"{time_in_words(speed.step_s)} a step{further}")]
    left_s, total_s = analysis.left_s(run), analysis.total_s(run)
    total = duration(total_s) if total_s >= 10 else time_in_words(total_s)
    if state == "running" and left_s is not None:
        return [*found, Figure("time left", duration(left_s), f"{total} so far")]
    return [*found, Figure("time", total, "all starts, evaluations and checkpoints")]


def _memory_figures(run: RunSummary) -> list[Figure]:
    peak, limit = analysis.peak_bytes(run), _limit(run)
    if peak is None:
        return []
    note = f"{peak / limit:.0%} of {size_in_words(limit)}" if limit else "the fullest device"
    return [Figure("peak memory", size_in_words(peak), note)]


def _share_figures(run: RunSummary) -> list[Figure]:
    shares = analysis.shares_of(run)
    if shares is None:
        return []
    note = f"{shares.waiting:.0%} waiting, {shares.communication:.0%} {_communication(run)}"
    if run.plan.get("world") == 1:
        note = f"{shares.rest:.0%} {REST}"
    return [Figure("computing", f"{shares.computing:.0%}", note), *_hidden_figures(run)]


def _hidden_figures(run: RunSummary) -> list[Figure]:
    axes = analysis.communication_of(run)
    hidden = analysis.hidden_of(axes)
    if hidden is None:
        return []
    return [Figure("communication hidden", f"{hidden:.0%}", ", ".join(f"{one.axis} {one.hidden:.0%}" for one in axes))]


def _communication(run: RunSummary) -> str:
    return "communication and bubble" if _has_pipeline(run) else "communication"


def _has_pipeline(run: RunSummary) -> bool:
    return "pipeline=" in str(run.plan.get("plan"))


def warnings(run: RunSummary) -> list[str]:
    found = [f"Slow: {words}" for words in run.slow]
    rose = [one for one in analysis.growth_of(run) if analysis.grows(one)]
    if rose and len(analysis.since_last_start(run)) >= 20:
        one = max(rose, key=lambda one: one.rose_bytes)
        found.append(f"Memory still grew: device {one.device} by {size_in_words(one.rose_bytes)} in the second half")
    return [text(words, kind="warn") for words in found]


# --- curves --------------------------------------------------------------------------------------------


def _steps(rows: Sequence[Row]) -> list[int]:
    return [row["step"] for row in rows]


def _across(run: RunSummary) -> ChartAxis:
    return axis((run.steps[0]["step"], run.steps[-1]["step"]), "step")


def _picture(run: RunSummary, title: str, lines: Sequence[Line], columns: int, **how: Any) -> str:
    up = axis((y for line in lines for y in line.ys), title, room=ROOM, **how)
    return curves(lines, title=title, across=_across(run), up=up, columns=columns)


def _with_smoothed(run: RunSummary, values: Sequence[float | None], colour: int) -> list[Line]:
    xs = _steps(run.steps)
    if len(values) <= analysis.SMOOTHED:
        return [Line("each step", xs, values, colour=colour)]
    return [
        Line("each step", xs, values, faint=True, colour=colour),
        Line("smoothed", xs, analysis.smoothed(values), colour=colour),
    ]


def _losses(run: RunSummary, columns: int) -> Section:
    losses = analysis.numbers_of(run.steps, "loss")
    smooth = analysis.smoothed(losses)
    lines = _with_smoothed(run, losses, 0)
    for number, (name, records) in enumerate(by_set(run).items(), 1):
        values = analysis.numbers_of(records, "eval_loss")
        few = len(records) <= 60
        lines.append(Line(name or "evaluation", _steps(records), values, dots=few, colour=number))
    rows = _sampled(run.steps, lambda at: (_number(losses[at]), _number(smooth[at])))
    parts = [_picture(run, "loss", lines, columns), as_table(("step", "loss", "smoothed"), rows)]
    evaluated = [
        (name or "-", str(row["step"]), _number(row["eval_loss"]))
        for name, records in by_set(run).items()
        for row in records
    ]
    if evaluated:
        parts.append(as_table(("set", "step", "evaluation loss"), evaluated, "evaluations as a table"))
    metrics = [*metric_curves(run).items()]
    pictures = [
        _picture(run, name, [Line(of, xs, ys, dots=len(xs) == 1) for of, (xs, ys) in found.items()], columns)
        for name, found in metrics[:MOST_METRICS]
    ]
    parts += [side_by_side(*pictures)] if pictures else []
    if len(metrics) > MOST_METRICS:
        parts.append(
            text(f"{len(metrics) - MOST_METRICS} further metrics are among the run's words below", kind="note")
        )
    return Section("Loss", parts)


def _logged(run: RunSummary, columns: int) -> list[Section]:
    found = logged_curves(run)
    if not found:
        return []
    steps = run.steps[0]["step"], run.steps[-1]["step"]
    pictures = [
        curves(
            [Line(name, xs, ys, dots=len(xs) <= 60, colour=5)],
            title=name,
            across=axis([*steps, *xs], "step"),
            up=axis(ys, name, room=ROOM),
            columns=columns,
        )
        for name, (xs, ys) in [*found.items()][:MOST_METRICS]
    ]
    rows = [_logged_row(name, ys) for name, (_, ys) in found.items()]
    parts = [side_by_side(*pictures), as_table(LOGGED_HEADS, rows)]
    if len(found) > MOST_METRICS:
        parts.append(text(f"{len(found) - MOST_METRICS} further figures are in the table", kind="note"))
    return [Section("What the job logged", parts)]


def _logged_row(name: str, values: Sequence[Any]) -> tuple[str, ...]:
    finite = [value for value in values if value is not None and isfinite(value)]
    ends = [values[0], values[-1], *((min(finite), max(finite)) if finite else (None, None))]
    return (name, *map(_short, ends), str(len(values)))


def _sampled(rows: Sequence[Row], cells: Callable[[int], tuple[str, ...]]) -> list[tuple[str, ...]]:
    last = len(rows) - 1
    places = sorted({round(last * at / max(1, TABLE_ROWS - 1)) for at in range(TABLE_ROWS)})
    return [(str(rows[at]["step"]), *cells(at)) for at in places]


def _rates(run: RunSummary, columns: int) -> Section:
    rates, norms = analysis.numbers_of(run.steps, "lr"), analysis.numbers_of(run.steps, "grad_norm")
    pictures = [
        _picture(run, "learning rate", [Line("", _steps(run.steps), rates, colour=3)], columns, zero=True),
        _picture(run, "gradient norm, before clipping", _with_smoothed(run, norms, 1), columns, zero=True),
    ]
    rows = _sampled(run.steps, lambda at: (_short(rates[at]), _short(norms[at])))
    heads = ("step", "learning rate", "gradient norm")
    return Section("Learning rate and gradient", [side_by_side(*pictures), as_table(heads, rows)])


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# --- time ----------------------------------------------------------------------------------------------


def _speeds(run: RunSummary, columns: int) -> Section:
    times = analysis.step_times(run)
    assert times is not None  # there are steps
    seconds = [row["step_s"] for row in run.steps]
    slow = sorted(times.slowest, key=lambda one: one.step)
    lines = _with_smoothed(run, seconds, 2)
    if slow:
        lines.append(Line("slow steps", [one.step for one in slow], [one.step_s for one in slow], dots=True, colour=6))
    words = (
        f"{time_in_words(times.median_s)} in the median, 9 of 10 steps between {time_in_words(times.low_s)} and "
        f"{time_in_words(times.high_s)}"
    )
    count = times.outliers
    words += f"; {count} step{'s' * (count != 1)} took much longer" if count else "; no step took much longer"
    parts = [text(f"{words}."), _picture(run, "seconds per step", lines, columns, units=SECONDS, zero=True)]
    rows = [
        (
            str(one.step),
            time_in_words(one.step_s),
            f"{one.ratio:.1f} x",
            "" if one.rank is None else str(one.rank),
            one.why,
        )
        for one in times.slowest
    ]
    if rows:
        which = f"The {len(rows)} slowest" if count > len(rows) else f"The slow step{'s' * (count != 1)}"
        parts += [text(f"{which}:"), table(SLOW_HEADS, rows, label="slow steps", words=True)]
    return Section("Time of steps", parts)


def _time(run: RunSummary) -> Section | None:
    shares, waits = analysis.shares_of(run), analysis.waits_of(run)
    if shares is None:
        return None
    names = {"communication": _communication(run), "rest": REST}
    bar = StackedBar("a step, mean of all ranks", {names.get(name, name): x for name, x in asdict(shares).items()})
    numbers = [(name, f"{share:.1%}") for name, share in bar.parts.items()]
    picture = stacked([bar], lambda share: f"{share:.0%}", title="shares of a step", in_legend=True)
    parts = [picture, as_table(("", "share"), numbers)]
    if waits:
        speed = analysis.speed_of(run)
        step_s = speed.step_s if speed else 1.0
        bars = [
            StackedBar(f"rank {one.rank}", {"computes": one.busy_s, "waits for slower ranks": one.waits_s})
            for one in waits
        ]
        rows = [_wait_row(one, step_s) for one in waits]
        words = "Who waits for whom: in each step all wait for the rank that computes for longest."
        if _has_pipeline(run):
            words += " Stages also wait for each other's messages: see the timeline."
        parts.append(text(words))
        parts += [stacked(bars[:64], time_in_words, title="seconds of a step"), table(WAIT_HEADS, rows, label="waits")]
    if rows := analysis.communication_rows(run):
        words = (
            "Communication is hidden as far as it is under way while ranks do something else. Seconds of a step, mean "
            "of all ranks, in the steps of which a timeline was recorded:"
        )
        parts += [text(words), table(analysis.COMMUNICATION_HEADS, rows, label="communication")]
    return Section("Where time goes", parts)


def _wait_row(one: analysis.RankWaits, step_s: float) -> tuple[str, ...]:
    mostly = "-" if one.waited_for is None else f"rank {one.waited_for} ({one.of_that:.0%})"
    waits = (time_in_words(one.waits_s), f"{one.waits_s / step_s:.1%}") if one.waits_s else ("-", "-")
    return (str(one.rank), time_in_words(one.busy_s), *waits, mostly)


# --- memory --------------------------------------------------------------------------------------------


def _memory(run: RunSummary, columns: int) -> Section:
    growth = analysis.growth_of(run)
    devices = _devices_shown(growth)
    lines = [_memory_line(run, device, number) for number, device in enumerate(devices)]
    limit = _limit(run)
    peak = analysis.peak_bytes(run) or 0
    near = limit is not None and limit < 2 * peak
    values = [y for line in lines for y in line.ys] + ([limit] if near else [])
    up = axis(values, "memory", units=BYTES, zero=True, room=ROOM)
    rule = (limit, f"{size_in_words(limit)}, all there is") if near and limit is not None else None
    parts = [curves(lines, title="peak so far", across=_across(run), up=up, limit=rule, columns=columns)]
    if len(devices) < len(growth):
        parts.append(
            text(f"{len(devices)} of {len(growth)} devices: the fullest, the emptiest, the growing", kind="note")
        )
    if limit is not None:
        parts.append(text(f"The fullest device came to {peak / limit:.0%} of {size_in_words(limit)}."))
    rows = [(str(one.device), size_in_words(one.peak_bytes), size_in_words(one.rose_bytes)) for one in growth]
    parts.append(as_table(GROWTH_HEADS, rows))
    if run.memory:
        bars = [StackedBar(f"device {number}", device) for number, device in enumerate(run.memory)]
        words = f" of each device: {balance(run.memory)}" if len(bars) > 1 else ""
        parts += [
            text(f"What tensors take at the peak{words}."),
            stacked(bars[:64], size_in_words, title="tensors by category"),
        ]
        parts.append(as_table(MEMORY_HEADS, memory_rows(run.memory)))
    return Section("Memory", parts)


def _limit(run: RunSummary) -> float | None:
    return amount(run.plan.get("memory_limit_bytes")) or None


def _devices_shown(growth: Sequence[analysis.Growth]) -> list[int]:
    if len(growth) <= MOST_DEVICES:
        return [one.device for one in growth]
    by_size = [one.device for one in sorted(growth, key=lambda one: -one.peak_bytes)]
    by_growth = [one.device for one in sorted(growth, key=lambda one: -one.rose_bytes)]
    return sorted([*dict.fromkeys([*by_size[:3], by_size[-1], *by_growth])][:MOST_DEVICES])


def _memory_line(run: RunSummary, device: int, colour: int) -> Line:
    rows = [row for row in run.steps if device < len(row["memory_bytes"])]
    return Line(f"device {device}", _steps(rows), [row["memory_bytes"][device] for row in rows], colour=colour)
