"""A cluster as a TOML file: its devices, and how fast they compute and talk as measured.

nodes = 1
devices = 2                 # of one node
kind = "cpu"                # as in devices.toml
backend = "gloo"            # that the links were measured with

network_gbit_per_s = 400    # all four may be missing: one way per device to other nodes
network = "rdma"            # one of links.toml
cards = 8                   # network cards of a node
in_network = false          # switches within a node do not reduce (NVLS), though they could

[device]                    # may be missing: facts that replace those of the kind, or describe one that is not known
memory_gib = 79.6

[links.all_reduce.2]        # an operation over 2 ranks of a node takes alpha_s + beta_s_per_byte x size
alpha_s = 8.1e-05
beta_s_per_byte = 4.2e-10

[links.all_reduce.4x1]      # over 4 nodes, 1 rank on each, while their other ranks do the same among each other
alpha_s = 1.1e-03
beta_s_per_byte = 6.1e-08
points = [[1024, 1.2e-03], [4096, 1.4e-03]]     # may be missing: sizes and seconds, as measured, in place of the line

[links.send.0-1]            # from node 0 to node 1; of all neighbours on a ring of the nodes, or of none
alpha_s = 6.2e-04
beta_s_per_byte = 1.6e-07

[rates]                     # of one device
memory = 1.1e10             # bytes/s of a copy, read and written
small = 8.1e5               # of a CPU: operations/s on one number, started from Python

[rates.matmul.float32]      # FLOP/s of n x n x n
1024 = 7.9e10
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from evenly.errors import UserError
from evenly.hardware.cluster import MOST_DEVICES, Cluster, Link, Rates
from evenly.hardware.links import far_link

_Field = tuple[Callable[[Any], bool], str]  # whether a value is one, and what to give


MOST = 1e30  # of what a device does in a second, in bytes and FLOP
LONGEST_COUNT = 12  # digits

NUMBER: _Field = (lambda value: type(value) in (int, float) and 0 <= value <= MOST, f"give a number from 0 to {MOST:g}")
COUNT: _Field = (
    lambda value: type(value) is int and 1 <= value <= MOST_DEVICES,
    f"give a whole number from 1 to {MOST_DEVICES}",
)
POINTS: _Field = (lambda value: _are_points(value), "give [size, seconds] pairs, from small sizes to large")
TRUTH: _Field = (lambda value: isinstance(value, bool), "give true or false")
TEXT: _Field = (lambda value: isinstance(value, str) and '"' not in value, "give a word")
FIELDS = {
    "nodes": COUNT,
    "devices": COUNT,
    "kind": TEXT,
    "backend": TEXT,
    "network_gbit_per_s": NUMBER,
    "network": TEXT,
    "cards": COUNT,
    "in_network": TRUTH,
}
HEAD = "see the head of evenly/hardware/cluster_file.py"


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Writes what `read_cluster` reads; replaces the file. Raises `UserError` where it cannot be written."""
    try:
        path.write_text("\n".join(_lines(cluster)) + "\n", encoding="utf-8")
    except OSError as problem:
        raise UserError(f"save the cluster as {path}", str(problem), "name a file that can be written") from None


def _lines(cluster: Cluster) -> Iterator[str]:
    yield "# Measured by `evenly bench`."
    yield from _entries({"nodes": cluster.nodes, "devices": cluster.devices, "kind": cluster.kind})
    network = cluster.network_bytes_per_s
    chosen = {
        "backend": cluster.backend or None,
        "network_gbit_per_s": None if network is None else network * 8 / 1e9,
        "network": cluster.network,
        "cards": cluster.cards,
        "in_network": None if cluster.in_network else False,
    }
    yield from _entries(chosen)
    tables = {"device": {k: v for k, v in cluster.own.items() if k != "tflops"}}
    tables["device.tflops"] = cluster.own.get("tflops", {})
    for (operation, ranks), link in sorted(cluster.links.items()):
        tables[f"links.{operation}.{ranks}"] = _numbers(link)
    for (operation, nodes, ranks), link in sorted(cluster.between.items()):
        tables[f"links.{operation}.{nodes}x{ranks}"] = _numbers(link)
    for (node, other), link in sorted(cluster.hops.items()):
        tables[f"links.send.{node}-{other}"] = _numbers(link)
    measured = {"memory": cluster.rates.memory, "small": cluster.rates.small}
    tables["rates"] = {name: float(rate) for name, rate in measured.items() if rate is not None}
    for precision, by_size in cluster.rates.matmul.items():
        tables[f"rates.matmul.{precision}"] = {str(n): float(rate) for n, rate in sorted(by_size.items())}
    for name, entries in tables.items():
        if entries:
            yield from ("", f"[{name}]", *_entries(entries))


def _numbers(link: Link) -> dict[str, Any]:
    points = {"points": [[size, float(seconds)] for size, seconds in link.points]} if link.points else {}
    return {"alpha_s": float(link.alpha_s), "beta_s_per_byte": float(link.beta_s_per_byte), **points}


def _entries(values: Mapping[str, Any]) -> Iterator[str]:
    return (f"{name} = {json.dumps(value)}" for name, value in values.items() if value is not None)


def read_cluster(path: Path) -> Cluster:
    """The cluster of a file. Raises `UserError`, naming the field, for what is not one."""
    asked = f"read the cluster {path}"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(asked, str(problem), "make one with `evenly bench comm --save FILE`") from None
    facts = {
        name: _value(content.get(name), name, asked, field)
        for name, field in FIELDS.items()
        if name in content or name in ("nodes", "devices", "kind")
    }
    rate = facts.pop("network_gbit_per_s", None)
    if facts["nodes"] * facts["devices"] > MOST_DEVICES:
        found = f"nodes and devices make {facts['nodes'] * facts['devices']} devices"
        raise UserError(asked, found, f"give up to {MOST_DEVICES} in all")
    links, hops = _links(content, asked), _hops(content, facts["nodes"], asked)
    cluster = Cluster(
        **facts,
        links={(name, size[0]): link for (name, size), link in links.items() if len(size) == 1},
        between={(name, size[0], size[1]): link for (name, size), link in links.items() if len(size) == 2},
        hops=hops,
        rates=_rates(content, asked),
        own=_table(content, "device", asked),
        network_bytes_per_s=None if rate is None else rate * 1e9 / 8,
    )
    if cluster.network is not None:
        far_link(cluster.network)
    return cluster


def _links(content: Mapping[str, Any], asked: str) -> dict[tuple[str, tuple[int, ...]], Link]:
    """Operation and ranks, or nodes and ranks on each, -> the link."""
    links: dict[tuple[str, tuple[int, ...]], Link] = {}
    for operation, by_ranks in _table(content, "links", asked).items():
        for ranks, numbers in _table({operation: by_ranks}, operation, asked).items():
            if operation == "send" and "-" in ranks:
                continue
            where = f"links.{operation}.{ranks}"
            size = ranks.split("x")
            if len(size) > 2 or not all(map(_is_count, size)):
                do = "write it as links.all_reduce.2, or links.all_reduce.4x1 over 4 nodes"
                raise UserError(asked, f"{where} does not end in a number of ranks", do)
            links[operation, tuple(map(int, size))] = _link(numbers, where, asked)
    return links


def _hops(content: Mapping[str, Any], nodes: int, asked: str) -> dict[tuple[int, int], Link]:
    """A node and the next on a ring -> the link of a send; of all nodes or of none."""
    sends = _table(_table(content, "links", asked), "send", asked)
    found: dict[tuple[int, int], Link] = {}
    for name, numbers in sends.items():
        where, (node, dash, other) = f"links.send.{name}", name.partition("-")
        if not dash:
            continue
        if not (_is_count(node) and _is_count(other) and int(node) < nodes and int(other) == (int(node) + 1) % nodes):
            raise UserError(asked, f"{where} names no neighbours of {nodes} nodes", "write it as links.send.0-1")
        found[int(node), int(other)] = _link(numbers, where, asked)
    if 0 < len(found) < nodes:
        raise UserError(asked, f"{len(found)} of {nodes} links from a node to the next", "give all, or none")
    return found


def _link(numbers: Any, where: str, asked: str) -> Link:
    table = _table({where: numbers}, where, asked)
    alpha_s, beta = (
        _value(table.get(name), f"{where}.{name}", asked, NUMBER) for name in ("alpha_s", "beta_s_per_byte")
    )
    points = _value(table.get("points", []), f"{where}.points", asked, POINTS)
    return Link(float(alpha_s), float(beta), tuple(map(tuple, points)))


def _are_points(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    pairs: list[Any] = value
    numbers = all(isinstance(pair, list) and len(pair) == 2 and all(map(NUMBER[0], pair)) for pair in pairs)
    return numbers and all(0 < a[0] < b[0] for a, b in pairwise([[1e-9, 0], *pairs]))


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= LONGEST_COUNT


def _rates(content: Mapping[str, Any], asked: str) -> Rates:
    table = _table(content, "rates", asked)
    stated = {
        name: float(_value(table[name], f"rates.{name}", asked, NUMBER))
        for name in ("memory", "small")
        if name in table
    }
    matmul: dict[str, dict[int, float]] = {}
    for precision, by_size in _table(table, "matmul", asked).items():
        where = f"rates.matmul.{precision}"
        sizes = _table({where: by_size}, where, asked)
        if wrong := [size for size in sizes if not _is_count(size)]:
            raise UserError(asked, f"{where} has {', '.join(wrong)}", "name each rate by its n, a whole number")
        matmul[precision] = {int(n): float(_value(sizes[n], f"{where}.{n}", asked, NUMBER)) for n in sizes}
    return Rates(matmul=matmul, **stated)


def _table(content: Mapping[str, Any], name: str, asked: str) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise UserError(asked, f"{name} is {value!r}, not a table", HEAD)
    return value


def _value(value: Any, name: str, asked: str, field: _Field) -> Any:
    fits, do = field
    if not fits(value):
        raise UserError(asked, f"{name} is {value!r}", do)
    return value
