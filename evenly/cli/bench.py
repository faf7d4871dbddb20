"""`evenly bench`: measures how fast the ranks of one machine or several talk, and what their devices reach."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenly.cli.on_nodes import NodePlace, run_everywhere
from evenly.cli.tables import print_table
from evenly.errors import UserError
from evenly.hardware.cluster import Cluster, Link, Rates
from evenly.hardware.cluster_file import read_cluster, write_cluster
from evenly.hardware.cluster_text import kind_here, local_cluster, local_devices
from evenly.hardware.links import far_link
from evenly.launcher.agent import Launch, warm_up

if TYPE_CHECKING:
    from evenly.comm.bench import Bench

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def bench_comm(
    *,
    devices: int | None,
    operations: str,
    most: str,
    out: Path | None,
    save: Path | None,
    json_only: bool,
    place: NodePlace = NodePlace(),  # noqa: B008  (frozen)
) -> int:
    """Measures, shows, and writes what was asked for, on the first node; returns the exit code."""
    warm_up(["evenly.comm.bench"])
    from evenly.cli.run import devices_here
    from evenly.comm.bench import OPERATIONS, measure

    names = list(OPERATIONS) if operations == "all" else operations.split(",")
    if unknown := [name for name in names if name not in OPERATIONS]:
        raise UserError(f"measure {', '.join(unknown)}", "no such operation", f"choose from {', '.join(OPERATIONS)}")
    count = devices or (devices_here(None, place.nodes) if place.nodes > 1 else max(devices_here(None, 1), 2))
    saved = None if save is None else _saved_before(save, count, place.nodes)
    launch = Launch(devices=count, preload=["evenly.comm.bench"])
    bench: Bench | None = run_everywhere(measure, (names, parse_size(most)), launch, place)
    if bench is None:
        return 0
    document = asdict(bench)
    if json_only:
        print(json.dumps(document))
    else:
        _show(document)
    if out is not None:
        _write_report(out, document, quiet=json_only)
    if save is not None and saved is not None:
        shaped = _saved_before(save, bench.ranks // bench.nodes, bench.nodes)
        write_cluster(save, with_links(shaped, bench))
        print(f"links saved as {save}", file=sys.stderr)
    return 0


def bench_device(
    *,
    save: Path | None,
    json_only: bool,
    devices: int | None = None,
    place: NodePlace = NodePlace(),  # noqa: B008  (frozen)
) -> int:
    """Measures this machine's first device, shows, and saves its rates where asked for; returns the exit code.

    On several nodes, or with `devices`, all devices work at the same time, and the slowest counts.
    """
    kind, count = kind_here(), devices or local_devices()
    saved = None if save is None else _saved_before(save, count, place.nodes)
    rates = _rates_of_all(kind, count, place) if devices or _in_company(place) else _rates_of_one(kind)
    if rates is None:
        return 0
    if json_only:
        print(json.dumps({"kind": kind, **asdict(rates)}))
    else:
        _show_rates(kind, rates)
    if save is not None and saved is not None:
        write_cluster(save, replace(saved, rates=rates))
        print(f"rates saved as {save}", file=sys.stderr)
    return 0


def _in_company(place: NodePlace) -> bool:
    found = place.under_launcher()
    return found is None or found.nodes > 1


def _rates_of_one(kind: str) -> Rates:
    from evenly.hardware.probe import probe

    return probe("cpu" if kind == "cpu" else "cuda")


def _rates_of_all(kind: str, devices: int, place: NodePlace) -> Rates | None:
    """Of the slowest device, while all work; None on other nodes and ranks than the first."""
    warm_up(["evenly.comm.bench"])
    from evenly.comm.bench import measure_devices
    from evenly.hardware.probe import slowest

    launch = Launch(devices=devices, preload=["evenly.comm.bench"])
    rates: list[Rates] | None = run_everywhere(measure_devices, ("cpu" if kind == "cpu" else "cuda",), launch, place)
    return None if rates is None else slowest(rates)


def with_links(cluster: Cluster, bench: Bench) -> Cluster:
    """The cluster with the measured links added to those it has, unless another backend measured them.

    The network's rate follows from messages between two nodes, all devices sending at once: groups of a shape that was
    not measured are predicted from it.
    """
    backend = bench.link.partition(" on ")[0]
    if cluster.backend != backend:
        cluster = replace(cluster, links={}, between={}, hops={})
    measured = _links_of(bench)
    near = {(name, ranks): link for (name, nodes, ranks), link in measured.items() if nodes == 1}
    far = {key: link for key, link in measured.items() if key[1] > 1}
    links, between, hops = {**cluster.links, **near}, {**cluster.between, **far}, _hops_of(bench) or cluster.hops
    found = replace(cluster, backend=backend, links=links, between=between, hops=hops)
    sent = measured.get(("send", 2, 1))
    if sent is None:
        return found
    share = far_link(cluster.network or cluster.device.network)["share"]
    largest, took_s = sent.points[-1]
    return replace(found, network_bytes_per_s=largest / took_s / share)


def _links_of(bench: Bench) -> dict[tuple[str, int, int], Link]:
    """(operation, nodes, ranks on each) -> the link, with the sizes that were measured."""
    points: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for one in bench.measured:
        points.setdefault((one.operation, one.nodes, one.ranks // one.nodes), []).append((one.size_bytes, one.seconds))
    shaped = {(fit.operation, fit.nodes, fit.ranks // fit.nodes): fit for fit in bench.fits}
    return {key: Link(fit.alpha_s, fit.beta_s_per_byte, tuple(points[key])) for key, fit in shaped.items()}


def _hops_of(bench: Bench) -> dict[tuple[int, int], Link]:
    from evenly.comm.bench import fit

    fits = {(hop.node, hop.other): (fit("send", 2, hop.points, nodes=2), hop.points) for hop in bench.hops}
    return {ends: Link(one.alpha_s, one.beta_s_per_byte, tuple(points)) for ends, (one, points) in fits.items()}


def _saved_before(path: Path, devices: int, nodes: int) -> Cluster:
    """The cluster of a file that is there, to be completed; else one of nodes of this machine's devices.

    Raises `UserError` where the file is of other devices, or of other nodes.
    """
    here = kind_here()
    if not path.exists():
        return replace(local_cluster(devices), nodes=nodes)
    saved = read_cluster(path)
    if saved.kind not in (here, "cuda"):
        raise UserError(f"save into {path}", f"it is of {saved.kind}, this machine has {here}", "name another file")
    if nodes > 1 and saved.nodes == 1 and saved.devices == devices:
        saved = replace(saved, nodes=nodes)
    if nodes > 1 and (saved.nodes, saved.devices) != (nodes, devices):
        found = f"it is of {saved.nodes} x {saved.devices} devices, and these are {nodes} x {devices}"
        raise UserError(f"save into {path}", found, "name another file")
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
