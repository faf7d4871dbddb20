"""A cluster as a TOML file: its devices, and how fast they talk as measured.

nodes = 1
devices = 2                 # of one node
kind = "cpu"
backend = "gloo"

[links.all_reduce.2]        # an operation over 2 ranks takes alpha_s + beta_s_per_byte x size
alpha_s = 8.1e-05
beta_s_per_byte = 4.2e-10
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from evenly.errors import UserError


@dataclass(frozen=True)
class Link:
    """What an operation costs at any size, s, and per byte of its largest buffer, s/byte."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, size_bytes: float) -> float:
        """Predicted time of the operation at `size_bytes`."""
        return self.alpha_s + self.beta_s_per_byte * size_bytes


@dataclass(frozen=True)
class Cluster:
    """Devices and measured links. links: (operation, number of ranks) -> its link."""

    nodes: int
    devices: int
    kind: str
    backend: str
    links: Mapping[tuple[str, int], Link] = field(default_factory=dict[tuple[str, int], Link])


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Writes what `read_cluster` reads; replaces the file. Raises `UserError` where it cannot be written."""
    lines = [
        "# Measured by `evenly bench comm`.",
        f"nodes = {cluster.nodes}",
        f"devices = {cluster.devices}",
        f'kind = "{cluster.kind}"',
        f'backend = "{cluster.backend}"',
    ]
    for (operation, ranks), link in sorted(cluster.links.items()):
        lines += ["", f"[links.{operation}.{ranks}]"]
        lines += [f"alpha_s = {float(link.alpha_s)!r}", f"beta_s_per_byte = {float(link.beta_s_per_byte)!r}"]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as problem:
        raise UserError(f"save the cluster as {path}", str(problem), "name a file that can be written") from None


def read_cluster(path: Path) -> Cluster:
    """The cluster of a file. Raises `UserError`, naming the field, for what is not one."""
    asked = f"read the cluster {path}"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(asked, str(problem), "make one with `evenly bench comm --save FILE`") from None
    links: dict[tuple[str, int], Link] = {}
    for operation, by_ranks in _table(content, "links", asked).items():
        for ranks, numbers in _table({operation: by_ranks}, operation, asked).items():
            where = f"links.{operation}.{ranks}"
            if not ranks.isdecimal():
                raise UserError(asked, f"{where} does not end in a number of ranks", "write it as links.all_reduce.2")
            table = _table({where: numbers}, where, asked)
            alpha_s, beta = (_number(table, name, where, asked) for name in ("alpha_s", "beta_s_per_byte"))
            links[operation, int(ranks)] = Link(alpha_s, beta)
    return Cluster(
        nodes=_count(content, "nodes", asked),
        devices=_count(content, "devices", asked),
        kind=_text(content, "kind", asked),
        backend=_text(content, "backend", asked),
        links=links,
    )


def _table(content: Mapping[str, Any], name: str, asked: str) -> dict[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise UserError(asked, f"{name} is {value!r}, not a table", "see the head of evenly/cluster/clusterfile.py")
    return value


def _number(content: Mapping[str, Any], name: str, where: str, asked: str) -> float:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value >= 0):
        raise UserError(asked, f"{where}.{name} is {value!r}", "give a number that is not negative, in seconds")
    return float(value)


def _count(content: Mapping[str, Any], name: str, asked: str) -> int:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(asked, f"{name} is {value!r}", "give a whole number of at least 1")
    return value


def _text(content: Mapping[str, Any], name: str, asked: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or '"' in value:
        raise UserError(asked, f"{name} is {value!r}", "give a word")
    return value
