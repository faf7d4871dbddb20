"""How the devices of a cluster are joined, as plain numbers: the constants of `links.toml` with a device's rates. Pure.

A *domain* is the devices joined by the fast link: one node, or a rack of them. Rates are bytes per second, one way.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evenly.errors import UserError
from evenly.hardware.devices import Device

FILE = Path(__file__).with_name("links.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """What operations between devices cost. See links.toml for what each constant means.

    ring_rate:       that a device reaches within a domain, with all of it. peers: others of a mesh, each with a wire
                     of its own; 0 for switches and buses, at which any number reaches the same.
    in_network_rate: of reductions within the switches; 0 where there are none. in_network_most: bus bandwidth, limit.
    domain_rate:     of all network cards of a domain together. card_rate: of one.
    """

    ring_rate: float
    peers: int
    base_s: float
    hop_s: float
    tree_hop_s: float
    quick_hop_s: float
    quick_share: float
    fill_s: float
    in_network_rate: float
    in_network_most: float
    in_network_s: float
    in_network_fill_s: float
    domain_rate: float
    card_rate: float
    far_hop_s: float
    far_tree_hop_s: float
    far_quick_hop_s: float


def fabric_of(
    device: Device,
    *,
    per_domain: int,
    network_bytes_per_s: float | None = None,
    network: str | None = None,
    cards_per_device: float = 1.0,
    in_network: bool = True,
) -> Fabric:
    """The fabric of domains of `per_domain` devices; None takes what is typical of the device.

    Raises `UserError` for a link or network that is not known.
    """
    near, far = near_link(device.link), far_link(network or device.network)
    per_device = far["share"] * (device.network_bytes_per_s if network_bytes_per_s is None else network_bytes_per_s)
    reduces = in_network and "in_network" in near
    # More devices than a node is sold with, as in a DGX-2, are joined by switches.
    mesh = near["topology"] == "mesh" and per_domain <= device.domain
    hops = ("hop_us", "tree_hop_us", "quick_hop_us")
    in_seconds = {name.removesuffix("us") + "s": near[name] / 1e6 for name in ("base_us", *hops, "fill_us")}
    far_in_seconds = {"far_" + name.removesuffix("us") + "s": far[name] / 1e6 for name in hops}
    return Fabric(
        ring_rate=near["ring"] * device.link_bytes_per_s,
        peers=per_domain - 1 if mesh else 0,
        quick_share=near["quick_share"],
        in_network_rate=near["in_network"] * device.link_bytes_per_s if reduces else 0.0,
        in_network_most=near["in_network_most"] * device.link_bytes_per_s if reduces else 0.0,
        in_network_s=near.get("in_network_us", 0.0) / 1e6,
        in_network_fill_s=near.get("in_network_fill_us", 0.0) / 1e6,
        domain_rate=per_device * per_domain,
        card_rate=per_device / cards_per_device,
        **in_seconds,
        **far_in_seconds,
    )


def near_link(name: str) -> dict[str, Any]:
    return _named(name, {key: table for key, table in _tables().items() if key != "network"}, "link")


def far_link(name: str) -> dict[str, Any]:
    return _named(name, _tables()["network"], "network")


def network_names() -> list[str]:
    return list(_tables()["network"])


def _named(name: str, tables: dict[str, dict[str, Any]], what: str) -> dict[str, Any]:
    if name not in tables:
        raise UserError(f"the {what} {name!r}", "no such one is known", f"take one of {', '.join(tables)}")
    return tables[name]


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
