"""A cluster: its devices, how they are joined, and what was measured of them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from evenly.hardware.devices import Device, device_with, known_device
from evenly.hardware.links import Fabric, fabric_of

MOST_DEVICES = 1_000_000  # a search goes through the divisors of their number


@dataclass(frozen=True)
class Link:
    """What an operation costs at any size, s, and per byte of its largest buffer, s/byte.

    points: (size, seconds) as measured, from small to large, which count where they are given: a switch that lets a
    burst through, or a cache, leads to no such line.
    """

    alpha_s: float
    beta_s_per_byte: float
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, size_bytes: float) -> float:
        """Predicted time of the operation at `size_bytes`."""
        if not self.points:
            return self.alpha_s + self.beta_s_per_byte * size_bytes
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, size_bytes)
        if place == 0:
            return self.points[0][1]
        (size, before_s), (larger, after_s) = self.points[place - 1], self.points[min(place, len(sizes) - 1)]
        if place == len(sizes):
            return before_s * size_bytes / size
        return before_s + (after_s - before_s) * (size_bytes - size) / (larger - size)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device was measured to reach.

    matmul: precision -> n -> FLOP/s of an n x n x n matmul. memory: bytes/s of a copy of large tensors, read and
    written. small: operations/s on one number, started from Python, of a CPU. None: not measured.
    """

    matmul: Mapping[str, Mapping[int, float]] = field(default_factory=dict[str, Mapping[int, float]])
    memory: float | None = None
    small: float | None = None


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `devices` devices each, `MOST_DEVICES` in all.

    kind:       of device; see `find_device`. own: facts that replace those of the kind, in the words of devices.toml.
    backend:    that the links were measured with, "" where none were.
    links:      measured within a node: (operation, number of ranks) -> its link; or of all devices of the cluster.
    between:    measured over nodes: (operation, nodes, ranks on each) -> its link, while all like it talked.
    hops:       measured from each node to the next on a ring of all: (node, next node) -> the link of a send.
    rates:      measured of one device; of the slowest, where there were several.
    network_bytes_per_s: one way, per device, to other nodes; None for what is typical of the kind.
    network:    its name in links.toml; None for what is typical of the kind.
    cards:      network cards of a node; None for one per device.
    in_network: whether switches within a node may reduce (NVLS), where they can.
    """

    nodes: int
    devices: int
    kind: str
    backend: str = ""
    links: Mapping[tuple[str, int], Link] = field(default_factory=dict[tuple[str, int], Link])
    between: Mapping[tuple[str, int, int], Link] = field(default_factory=dict[tuple[str, int, int], Link])
    hops: Mapping[tuple[int, int], Link] = field(default_factory=dict[tuple[int, int], Link])
    rates: Rates = field(default_factory=Rates)
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])
    network_bytes_per_s: float | None = None
    network: str | None = None
    cards: int | None = None
    in_network: bool = True

    @property
    def size(self) -> int:
        return self.nodes * self.devices

    @cached_property
    def device(self) -> Device:
        """The facts of its kind of device. Raises `UserError` for an unknown kind."""
        return device_with(self.kind, self.own)

    @cached_property
    def domain(self) -> int:
        """Devices joined by the fast link: those of a node, or of several that the kind joins.

        Nodes join in equal numbers: 32 trays of 4 GB200 make two domains of 64, not one of 72 and one of 56. Kinds
        whose link ends at the node join none, however few devices a node has.
        """
        joins = self.device.domain > self.device.node
        most = max(1, self.device.domain // self.devices) if joins else 1
        return self.devices * max(joined for joined in range(1, most + 1) if self.nodes % joined == 0)

    @cached_property
    def fabric(self) -> Fabric:
        return fabric_of(
            self.device,
            per_domain=self.domain,
            network_bytes_per_s=self.network_bytes_per_s,
            network=self.network,
            cards_per_device=1.0 if self.cards is None else self.cards / self.devices,
            in_network=self.in_network,
        )

    def __str__(self) -> str:
        """The form that `parse_cluster` reads: 4x8xH100."""
        sold = known_device(self.kind)
        one_node = self.nodes == 1 and (sold is None or self.devices <= sold.node)
        return f"{self.devices}x{self.kind}" if one_node else f"{self.nodes}x{self.devices}x{self.kind}"
