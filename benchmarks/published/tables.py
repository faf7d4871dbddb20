"""The figures as tables in Markdown, which a terminal shows well too. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = Sequence[Sequence[str]]
CAPTION = (
    "Errors are |predicted / measured - 1|; p90: nine rows of ten are below it. Bias is exp(mean log(predicted / "
    "measured)) - 1. Time: seconds of a step, grades A and B. Memory: peak of the worst rank, grade A; grade B (one "
    "thing inferred, or what is printed includes the allocator's cache) apart. Order: Spearman's rank correlation of "
    "tokens per second and device, over all rows of a source, and within its sweeps: rows with the same model, device, "
    "number of devices, sequence and precision, 3 or more (a mean weighted by rows; in brackets how many sweeps). "
    "Fits: rows that ran and are predicted to fit, or ran out of memory and are predicted to."
)
HEADS = (
    *("source", "time: rows", "median", "p90", "bias"),
    *("memory: rows", "median", "p90", "bias", "memory B: rows", "median", "p90", "bias"),
    *("order", "in sweeps", "fits"),
)


def sources_table(document: Mapping[str, Any]) -> str:
    """One line per source, and one of all."""
    figures = {**document["sources"], "all": document["overall"]}
    return markdown([HEADS, *(_line(name, each) for name, each in figures.items())])


def skipped_table(document: Mapping[str, Any]) -> str:
    """How many rows do not count, in whole or in part, per reason, and which."""
    rows: dict[str, list[str]] = {}
    for each in document["skipped"]:
        rows.setdefault(each["reason"], []).append(each["id"])
    ordered = sorted(rows.items(), key=lambda reason: -len(reason[1]))
    table = markdown([("not counted, because", "rows"), *((why, str(len(ids))) for why, ids in ordered)])
    which = ["which", "-----", *(", ".join(ranges(ids)) for _, ids in ordered)]
    return "\n".join(f"{line} {names} |" for line, names in zip(table.splitlines(), which, strict=True))


def ranges(ids: Sequence[str]) -> list[str]:
    """Ids in their order, those with consecutive numbers at their end as one: `a-001 to 003`."""
    found: list[list[str]] = []
    for each in ids:
        name, _, number = each.rpartition("-")
        last = found[-1][-1] if found else ""
        follows = number.isdecimal() and last == f"{name}-{int(number) - 1:0{len(number)}d}"
        if follows:
            found[-1].append(each)
        else:
            found.append([each])
    return [run[0] + (f" to {run[-1].rpartition('-')[2]}" if len(run) > 1 else "") for run in found]


def rows_table(document: Mapping[str, Any]) -> str:
    """Every row that was predicted, the worst step time first."""
    rows = sorted(document["rows"], key=lambda row: -abs(row.get("time_s", {}).get("error", 0.0)))
    heads = ("row", "step s", "predicted", "error", "peak GiB", "predicted", "error", "fits")
    return markdown([heads, *map(_row, rows)])


def wrong_fits(document: Mapping[str, Any]) -> str:
    """The rows on whose room prediction and run disagree, in a line or two."""
    fits = document["overall"]["fits"]
    named = {
        "Ran, but predicted not to fit": "ran_but_refused",
        "Ran out, but predicted to fit": "ran_out_but_accepted",
    }
    return "\n".join(f"{words}: {', '.join(fits[key])}." for words, key in named.items() if fits[key])


def markdown(rows: Table) -> str:
    """The first row as heads; columns as wide as their widest cell, the first to the left and others to the right."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heads, *others = (_aligned(row, widths) for row in rows)
    rule = _aligned(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], widths)
    return "\n".join([heads, rule, *others])


def _line(name: str, figures: Mapping[str, Any]) -> Sequence[str]:
    order = "" if name == "all" else _number(figures["rank_correlation"])
    sweeps = f"{_number(figures['rank_correlation_in_sweeps'])} ({figures['sweeps']})" if figures["sweeps"] else ""
    fits = figures["fits"]
    agree = f"{round(fits['agree'] * fits['rows'])} of {fits['rows']}" if fits["rows"] else ""
    causes = [cell for key in ("time", "memory", "memory_b") for cell in _accuracy(figures[key])]
    return (name, *causes, order, sweeps, agree)


def _accuracy(figures: Mapping[str, Any]) -> Sequence[str]:
    if not figures["rows"]:
        return ("", "", "", "")
    return (str(figures["rows"]), _percent(figures["median"]), _percent(figures["p90"]), _percent(figures["bias"], "+"))


def _row(row: Mapping[str, Any]) -> Sequence[str]:
    time = _both(row.get("time_s"), 1.0)
    memory = _both(row.get("memory_bytes"), 2.0**30)
    room = {None: "", True: "yes", False: "no"}[row["fits"]]
    wrong = " (wrong)" if row["fits"] == (not row["ran"]) else ""
    return (row["id"], *time, *memory, room + wrong)


def _both(pair: Mapping[str, float] | None, unit: float) -> Sequence[str]:
    if pair is None:
        return ("", "", "")
    return (f"{pair['measured'] / unit:.4g}", f"{pair['predicted'] / unit:.4g}", _percent(pair["error"], "+"))


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"
