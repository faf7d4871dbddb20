"""What `evenly bench comm` measured, as a table for a terminal and as one HTML file with pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def size_in_words(size_bytes: float) -> str:
    """1048576 -> '1 MiB'; no power of ten where there are thousands of GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 999.5:  # beyond, three digits are not enough
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.0f} GiB" if size_bytes >= 999.5 else f"{size_bytes:.3g} GiB"


def time_in_words(seconds: float) -> str:
    """0.00012 -> '120 us'."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:,.0f} s" if seconds >= 999.5 else f"{seconds:.3g} s"


def rate_in_words(bytes_per_s: float) -> str:
    """2e9 -> '2 GB/s'; as others have it, GB is 10^9."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if bytes_per_s < 999.5:
            return f"{bytes_per_s:.3g} {unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.3g} GB/s"


def fit_rows(bench: Row) -> list[tuple[str, str, str, str, str]]:
    """Operation, alpha, rate at large sizes, largest bus bandwidth, worst error of the fit."""
    rows: list[tuple[str, str, str, str, str]] = []
    for fit in bench["fits"]:
        measured = _of(bench, fit)
        beta, fastest = fit["beta_s_per_byte"], max(row["bus_bandwidth"] for row in measured)
        rate = rate_in_words(1 / beta) if beta > 0 else "-"
        worst = f"{fit['worst']:.0%}"
        rows.append((_named(bench, fit), time_in_words(fit["alpha_s"]), rate, rate_in_words(fastest), worst))
    return [*rows, *_hop_rows(bench)]


def _hop_rows(bench: Row) -> list[tuple[str, str, str, str, str]]:
    """Sends from each node to the next: the time of the smallest, the rate of the largest."""
    rows: list[tuple[str, str, str, str, str]] = []
    for hop in sorted(bench.get("hops", ()), key=lambda hop: hop["node"]):
        (_, least_s), (largest, took_s) = hop["points"][0], hop["points"][-1]
        rate = rate_in_words(largest / took_s)
        rows.append((f"send {hop['node']} -> {hop['other']}", time_in_words(least_s), rate, rate, "-"))
    return rows


FIT_HEADS = ("operation", "alpha", "1/beta", "most bus bandwidth", "worst error")


def page(bench: Row) -> str:
    from evenly.report.draw import SECONDS
    from evenly.report.page import Section, document, table  # words do without

    return document(
        f"How fast ranks talk: {bench['ranks']} ranks, {bench['link']}",
        _picture(bench, "seconds", "time", SECONDS),
        _picture(bench, "bus_bandwidth", "bus bandwidth", ((1.0, "B/s"), (1e6, "MB/s"), (1e9, "GB/s"))),
        Section("alpha + beta x size", [table(FIT_HEADS, fit_rows(bench), label="fits")]),
        Section("Measured", [table(MEASURED_HEADS, measured_rows(bench), label="measured")]),
    )


MEASURED_HEADS = ("operation", "size", "time", "algorithm bandwidth", "bus bandwidth", "rounds")


def measured_rows(bench: Row) -> list[tuple[str, ...]]:
    return [
        (
            _named(bench, row),
            size_in_words(row["size_bytes"]),
            time_in_words(row["seconds"]),
            rate_in_words(row["algorithm_bandwidth"]),
            rate_in_words(row["bus_bandwidth"]),
            str(row["rounds"]),
        )
        for row in bench["measured"]
    ]


def _of(bench: Row, one: Row) -> list[Row]:
    return [row for row in bench["measured"] if _named(bench, row) == _named(bench, one)]


def _named(bench: Row, row: Row) -> str:
    """The operation; between nodes also over how many, and how many ranks on each: all_reduce 4x1."""
    nodes = row.get("nodes", 1)
    return row["operation"] if bench["nodes"] == 1 else f"{row['operation']} {nodes}x{row['ranks'] // nodes}"


def _picture(bench: Row, value: str, title: str, units: Sequence[tuple[float, str]]) -> str:
    from evenly.report.draw import Line, axis, curves

    names = dict.fromkeys(_named(bench, row) for row in bench["measured"])
    found = {name: [row for row in bench["measured"] if _named(bench, row) == name] for name in names}
    lines = [Line(name, [row["size_bytes"] for row in of], [row[value] for row in of]) for name, of in found.items()]
    across = axis((x for line in lines for x in line.xs), "size in bytes", log=True)
    up = axis((y for line in lines for y in line.ys), title, units=units, log=True)
    return curves(lines, title=title, across=across, up=up)
