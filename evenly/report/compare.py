"""Several runs next to each other: in which settings they differ, and what came of it; as rows and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenly.observe.progress import duration
from evenly.report import analysis
from evenly.report.comm import size_in_words, time_in_words
from evenly.report.draw import BYTES, ROOM, SECONDS, ChartAxis, Line, axis, curves
from evenly.report.page import Section, as_table, document, side_by_side, table, text
from evenly.report.run import RunSummary, by_set

Runs = Mapping[str, RunSummary]

# Of plan.json, what is no setting, or is a row of its own.
NO_SETTINGS = ("plan", "predicted", "settings", "memory_limit_bytes")
COLUMNS = 600


def named(folders: Sequence[Path], runs: Sequence[RunSummary]) -> dict[str, RunSummary]:
    """The runs by names that tell them apart: those of their folders, as far up as it takes."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len({*names}) == len(names):
            return dict(zip(names, runs, strict=True))
    return {f"{number}: {path.name}": run for number, (path, run) in enumerate(zip(paths, runs, strict=True), 1)}


# --- rows ----------------------------------------------------------------------------------------------


def settings_of(run: RunSummary) -> dict[str, str]:
    """What was set: the keys of the plan, what else plan.json has, and the job's settings."""
    found: dict[str, str] = {}
    for word in str(run.plan.get("plan")).split():
        key, _, value = word.partition("=")
        found[f"plan: {key}"] = value or "yes"
    found |= {key: _words(value) for key, value in run.plan.items() if key not in NO_SETTINGS}
    settings = run.plan.get("settings")
    of_job = settings if isinstance(settings, dict) else {}
    return found | {f"--set {key}": _words(value) for key, value in of_job.items()}


def _words(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def setting_rows(runs: Runs, *, differing: bool) -> list[tuple[str, ...]]:
    """A row for each setting: its name, and the value in each run; differing: those alone that are not all equal."""
    found = [settings_of(run) for run in runs.values()]
    keys = dict.fromkeys(key for one in found for key in one)
    table = [(key, *(one.get(key, "-") for one in found)) for key in keys]
    return [row for row in table if not differing or len({*row[1:]}) > 1]


def results_of(run: RunSummary, now_s: float) -> dict[str, str]:
    state, speed, shares = analysis.state_of(run, now_s), analysis.speed_of(run), analysis.shares_of(run)
    found = {"state": state, "steps done": f"{run.steps[-1]['step']:,}" if run.steps else "0"}
    if run.steps and speed is not None:
        found["loss, smoothed"] = _loss(analysis.smoothed(analysis.numbers_of(run.steps, "loss"))[-1])
        found["a step"] = time_in_words(speed.step_s)
        found["samples/s"] = f"{speed.samples_per_s:,.0f}"
        if speed.tokens_per_s is not None:
            found["tokens/s"] = f"{speed.tokens_per_s:,.0f}"
        found["peak memory"] = size_in_words(analysis.peak_bytes(run) or 0)
        found["time"] = duration(analysis.total_s(run))
    for name, records in by_set(run).items():
        losses = [loss for loss in analysis.numbers_of(records, "eval_loss") if loss is not None]
        what = f"evaluation loss{f', {name}' if name else ''}"
        found[f"{what}, last"] = _loss(losses[-1] if losses else None)
        found[f"{what}, best"] = _loss(min(losses, default=None))
    if shares is not None:
        found["computing"], found["waiting"] = f"{shares.computing:.0%}", f"{shares.waiting:.0%}"
        found["communication"] = f"{shares.communication:.0%}"
    if (hidden := analysis.hidden_of(analysis.communication_of(run))) is not None:
        found["communication hidden"] = f"{hidden:.0%}"
    return found


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def result_rows(runs: Runs, now_s: float) -> list[tuple[str, ...]]:
    found = [results_of(run, now_s) for run in runs.values()]
    keys = dict.fromkeys(key for one in found for key in one)
    return [(key, *(one.get(key, "-") for one in found)) for key in keys]


def rows(runs: Runs, now_s: float, *, differing: bool) -> list[tuple[str, ...]]:
    """Settings and results."""
    return setting_rows(runs, differing=differing) + result_rows(runs, now_s)


def as_json(runs: Runs, now_s: float) -> dict[str, Any]:
    """Settings and results of each run by its name, as texts, and its losses by step."""
    return {
        "runs": {
            name: {
                "settings": settings_of(run),
                "results": results_of(run, now_s),
                "losses": [[row["step"], loss] for row, loss in _losses(run)],
            }
            for name, run in runs.items()
        }
    }


def _losses(run: RunSummary) -> list[tuple[Mapping[str, Any], float | None]]:
    return [*zip(run.steps, analysis.numbers_of(run.steps, "loss"), strict=True)]


# --- the page ------------------------------------------------------------------------------------------


def page(runs: Runs, *, now_s: float) -> str:
    begun = {name: run for name, run in runs.items() if run.steps}
    different = setting_rows(runs, differing=True)
    parts: list[str | Section] = [
        Section("Results", [table(("", *runs), result_rows(runs, now_s), label="results")]),
        Section(
            "In which settings they differ",
            [
                table(("", *runs), different, label="differences") if different else text("In none."),
                as_table(("", *runs), setting_rows(runs, differing=False), "all settings"),
            ],
        ),
    ]
    if begun:
        parts[:0] = [_loss_section(begun)]
        parts.append(_speed_section(begun))
    return document(f"{len(runs)} runs", *parts, lead=", ".join(runs))


def _across(runs: Runs) -> ChartAxis:
    steps = [row["step"] for run in runs.values() for row in (run.steps[0], run.steps[-1])]
    return axis(steps, "step")


def _loss_section(runs: Runs) -> Section:
    lines = [
        Line(name, [row["step"] for row in run.steps], analysis.smoothed(analysis.numbers_of(run.steps, "loss")))
        for name, run in runs.items()
    ]
    up = axis(_values(lines), "loss", room=ROOM)
    parts = [curves(lines, title="loss, smoothed", across=_across(runs), up=up, columns=COLUMNS)]
    evaluated = [
        Line(f"{name}{f', {of_set}' if of_set else ''}", *_evaluations(records), dots=len(records) == 1, colour=number)
        for number, (name, run) in enumerate(runs.items())
        for of_set, records in by_set(run).items()
    ]
    if evaluated:
        up = axis(_values(evaluated), "loss", room=ROOM)
        parts.append(curves(evaluated, title="evaluation loss", across=_across(runs), up=up, columns=COLUMNS))
    return Section("Loss", parts)


def _evaluations(records: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float | None]]:
    return [row["step"] for row in records], analysis.numbers_of(records, "eval_loss")


def _speed_section(runs: Runs) -> Section:
    times = [
        Line(name, [row["step"] for row in run.steps], analysis.smoothed([row["step_s"] for row in run.steps]))
        for name, run in runs.items()
    ]
    memory = [
        Line(name, [row["step"] for row in run.steps], [max(row["memory_bytes"]) for row in run.steps])
        for name, run in runs.items()
    ]
    pictures = [
        curves(
            lines, title=title, across=_across(runs), up=axis(_values(lines), title, units=units, zero=True, room=ROOM)
        )
        for lines, title, units in (
            (times, "seconds per step, smoothed", SECONDS),
            (memory, "peak memory of the fullest device", BYTES),
        )
    ]
    return Section("Speed and memory", [side_by_side(*pictures)])


def _values(lines: Sequence[Line]) -> list[float | int | None]:
    return [y for line in lines for y in line.ys]
