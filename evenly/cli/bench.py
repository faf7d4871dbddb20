"""`evenly bench`: measures how fast the ranks of this machine talk, and what its device reaches."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from evenly.cli.tables import print_table
from evenly.errors import UserError
from evenly.hardware.cluster import Cluster, Link, Rates
from evenly.hardware.cluster_file import read_cluster, write_cluster
from evenly.hardware.cluster_text import kind_here, local_cluster, local_devices
from evenly.launcher.agent import Launch, start_ranks, warm_up

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
    saved = None if save is None else _saved_before(save, count)
    results = start_ranks(measure, (names, parse_size(most)), Launch(devices=count, preload=["evenly.comm.bench"]))
    bench = results[0]
    document = asdict(bench)
    if json_only:
        print(json.dumps(document))
    else:
        _show(document)
    if out is not None:
        _write_report(out, document, quiet=json_only)
    if save is not None and saved is not None:
        links = {(fit.operation, fit.ranks): Link(fit.alpha_s, fit.beta_s_per_byte) for fit in bench.fits}
        write_cluster(save, with_links(saved, bench.link.partition(" on ")[0], links))
        print(f"links saved as {save}", file=sys.stderr)
    return 0


def bench_device(*, save: Path | None, json_only: bool) -> int:
    """Measures this machine's first device, shows, and saves its rates where asked for; returns the exit code."""
    saved = None if save is None else _saved_before(save, local_devices())
    from evenly.hardware.probe import probe

    kind = kind_here()
    rates = probe("cpu" if kind == "cpu" else "cuda")
    if json_only:
        print(json.dumps({"kind": kind, **asdict(rates)}))
    else:
        _show_rates(kind, rates)
    if save is not None and saved is not None:
        write_cluster(save, replace(saved, rates=rates))
        print(f"rates saved as {save}", file=sys.stderr)
    return 0


def with_links(cluster: Cluster, backend: str, links: Mapping[tuple[str, int], Link]) -> Cluster:
    """The cluster with these links added to those it has, unless another backend measured them."""
    older = cluster.links if cluster.backend == backend else {}
    return replace(cluster, backend=backend, links={**older, **links})


def _saved_before(path: Path, devices: int) -> Cluster:
    """The cluster of a file that is there, to be completed; else one node of this machine's devices.

    Raises `UserError` where the file is of other devices.
    """
    here = kind_here()
    if not path.exists():
        return local_cluster(devices)
    saved = read_cluster(path)
    if saved.kind not in (here, "cuda"):
        raise UserError(f"save into {path}", f"it is of {saved.kind}, this machine has {here}", "name another file")
    return replace(saved, kind=here)


def _show_rates(kind: str, rates: Rates) -> None:
    sizes = sorted({n for by_size in rates.matmul.values() for n in by_size})
    rows = [
        [precision, *(f"{by_size[n] / 1e12:.3g}" if n in by_size else "-" for n in sizes)]
        for precision, by_size in rates.matmul.items()
    ]
    print_table(f"{kind}: TFLOP/s of n x n x n matmuls", ["precision", *map(str, sizes)], rows)
    if rates.memory is not None:
        print(f"memory: {rates.memory / 1e9:.1f} GB/s, read and written by a copy")


def parse_size(text: str) -> int:
    """'256M' -> bytes; units K, M and G are powers of 1024."""
    lower = text.lower().removesuffix("ib").removesuffix("b")
    number, unit = (lower[:-1], lower[-1]) if lower[-1:].isalpha() else (lower, "")
    if not number.isdecimal() or unit not in UNITS or int(number) < 1:
        raise UserError(f"sizes up to {text!r}", "it is no size", "give bytes, or a number with K, M or G: 256M")
    return int(number) * UNITS[unit]


def _show(bench: dict[str, object]) -> None:
    from evenly.report.comm import FIT_HEADS, MEASURED_HEADS, fit_rows, measured_rows

    for heads, rows in ((MEASURED_HEADS, measured_rows(bench)), (FIT_HEADS, fit_rows(bench))):
        print_table(f"{bench['ranks']} ranks, {bench['link']}", heads, rows)


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
