"""`evenly bench comm`: measures how fast the ranks of this machine talk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evenly.cluster.clusterfile import Cluster, Link, write_cluster
from evenly.cluster.launch import Launch, start_ranks, warm_up
from evenly.errors import UserError

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def bench_comm(
    *, devices: int | None, operations: str, most: str, out: Path | None, save: Path | None, json_only: bool
) -> int:
    """Measures, shows, and writes what was asked for; returns the exit code."""
    warm_up(["evenly.comm.bench"])
    from evenly.cli.run import devices_here
    from evenly.comm.bench import OPERATIONS, measure

    names = list(OPERATIONS) if operations == "all" else operations.split(",")
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise UserError(f"measure {', '.join(unknown)}", "no such operation", f"choose from {', '.join(OPERATIONS)}")
    count = devices or max(devices_here(None, 1), 2)
    results = start_ranks(measure, (names, parse_size(most)), Launch(devices=count, preload=["evenly.comm.bench"]))
    bench = results[0]
    if json_only:
        print(json.dumps(bench.as_json()))
    else:
        _show(bench.as_json())
    if out is not None:
        _write_report(out, bench.as_json(), quiet=json_only)
    if save is not None:
        kind = bench.link.partition(" on ")[2]
        links = {(fit.operation, fit.ranks): Link(fit.alpha_s, fit.beta_s_per_byte) for fit in bench.fits}
        write_cluster(save, Cluster(bench.nodes, count, kind, bench.link.partition(" on ")[0], links))
        print(f"links saved as {save}", file=sys.stderr)
    return 0


def parse_size(text: str) -> int:
    """'256M' -> bytes; units K, M and G are powers of 1024."""
    lower = text.lower().removesuffix("ib").removesuffix("b")
    number, unit = (lower[:-1], lower[-1]) if lower[-1:].isalpha() else (lower, "")
    if not number.isdecimal() or unit not in UNITS or int(number) < 1:
        raise UserError(f"sizes up to {text!r}", "it is no size", "give bytes, or a number with K, M or G: 256M")
    return int(number) * UNITS[unit]


def _show(bench: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    from evenly.report.comm import FIT_HEADS, MEASURED_HEADS, fit_rows, measured_rows

    console = Console()
    for heads, rows in ((MEASURED_HEADS, measured_rows(bench)), (FIT_HEADS, fit_rows(bench))):
        table = Table(*heads, title=f"{bench['ranks']} ranks, {bench['link']}")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _write_report(folder: Path, bench: dict[str, object], *, quiet: bool) -> None:
    from evenly.report.comm import page

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comm.json").write_text(json.dumps(bench, indent=1) + "\n", encoding="utf-8")
        (folder / "comm.html").write_text(page(bench), encoding="utf-8")
    except OSError as problem:
        raise UserError(f"write the report into {folder}", str(problem), "name a folder that can be written") from None
    if not quiet:
        print(f"pictures in {folder / 'comm.html'}, figures in {folder / 'comm.json'}")
