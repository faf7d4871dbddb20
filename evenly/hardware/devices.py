"""Kinds of devices: what each can do and hold, from `devices.toml`. No torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, cast

from evenly.errors import UserError
from evenly.hardware.variants import variant_facts

FILE = Path(__file__).with_name("devices.toml")
MAKERS = ("nvidia", "tesla", "geforce", "amd", "instinct", "quadro", "google", "intel", "aws")
NEAREST = 3
NEEDED = ("memory_gib", "memory_gb_per_s", "tflops", "node", "link", "link_gb_per_s", "network_gbit_per_s")
COUNTS, MOST_IN_A_DOMAIN = ("node", "domain"), 1_000_000
LEAST, MOST = 1e-6, 1e30  # of any fact
TEXTS = ("link", "network", "source")
OPTIONAL = ("domain", "power_w", "clock_mhz", "host_gb_per_s")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device.

    name:         of the kind, or of a variant of it. kind: whose speeds it has, as far as nothing of it differs.
    memory_bytes: that a program can allocate from.
    bandwidth:    of its memory, bytes per second.
    flops:        dense peak by precision (float64, float32, tf32, float16, bfloat16, float8, float4), per second.
    node:         devices of a node as sold. domain: devices joined by the fast link, where these are several nodes.
    link:         the fast link's name in links.toml; link_bytes_per_s: its peak, one way, of one device.
    network:      the network's name there; network_bytes_per_s: its peak, one way, per device, as is typical.
    host_bytes_per_s: peak to the host's memory, one way; 0 where it is not known.
    source:       where these facts are from.
    """

    name: str
    kind: str
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float] = field(hash=False)
    node: int
    domain: int
    link: str
    link_bytes_per_s: float
    network: str
    network_bytes_per_s: float
    host_bytes_per_s: float = 0.0
    source: str = ""

    def peak(self, precision: str) -> float:
        """FLOP/s at `precision`; those of float32 where it has no units for it."""
        return self.flops.get(precision, self.flops["float32"])


def find_device(text: str) -> Device:
    """The kind called `text`, in any case, with or without its maker, or a variant of it (`variants`).

    Raises `UserError` with the nearest names, and for a variant that there is not.
    """
    found = known_device(text)
    if found is None:
        raise UserError(f"the device {text!r}", "no such kind is known", _advice(text))
    return found


def known_device(text: str) -> Device | None:
    """The kind called `text`, or its variant; None where there is none. Raises `UserError` for no such variant."""
    kind, colon, variant = text.partition(":")
    known = _by_key().get(_key(kind))
    if known is None or not colon:
        return known
    name, facts = f"{known.name}:{''.join(variant.split())}", _facts()[known.name]
    return _device(name, {**facts, **variant_facts(known.name, facts, name.partition(":")[2])}, known.kind)


def device_with(kind: str, own: Mapping[str, Any]) -> Device:
    """The kind, with facts of its own in the words of devices.toml; these may also describe a kind that is not known.

    Raises `UserError`, naming the fact, for what is missing or no such fact.
    """
    known = known_device(kind)
    if known is None and not own:
        return find_device(kind)
    facts: dict[str, Any] = {**(_facts_of(known) if known else {}), **own}
    asked = f"the device {kind!r} with facts of its own"
    if missing := [name for name in NEEDED if name not in facts]:
        found = f"no such kind is known, and {', '.join(missing)} missing"
        raise UserError(asked, found, f"give them as evenly/hardware/devices.toml does; or {_advice(kind)}")
    if problems := list(_problems(own)):
        raise UserError(asked, "; ".join(problems), "see the head of evenly/hardware/devices.toml")
    return _device(known.name if known else kind, {"source": "its own", **facts}, known.kind if known else kind)


def device_names() -> list[str]:
    return list(_kinds())


def register_device(name: str, facts: Mapping[str, Any]) -> None:
    """Adds a kind of device, with facts in the words of devices.toml; `names` may be left out.

    Raises `UserError` for a name that exists, and for what is missing or no such fact.
    """
    asked = f"register the device {name!r}"
    if known_device(name) is not None and name not in _registered:
        raise UserError(asked, "such a kind is known already", "give its facts in a cluster file, or another name")
    device_with(name, {key: value for key, value in facts.items() if key != "names"})
    _registered[name] = {"names": [], "source": "registered", **facts}
    for cached in (_facts, _kinds, _by_key):
        cached.cache_clear()


_registered: dict[str, dict[str, Any]] = {}


@cache
def _facts() -> dict[str, dict[str, Any]]:
    found = tomllib.loads(FILE.read_text(encoding="utf-8"))
    # What is a variant `of` another kind has its facts, but for those that are its own.
    whole = {name: {**found.get(facts.get("of", ""), {}), **facts} for name, facts in found.items()}
    return {**whole, **_registered}


def _facts_of(device: Device) -> dict[str, Any]:
    kind, _, variant = device.name.partition(":")
    facts = _facts()[kind]
    return {**facts, **(variant_facts(kind, facts, variant) if variant else {})}


@cache
def _kinds() -> dict[str, Device]:
    return {name: _device(name, facts, facts.get("of", name)) for name, facts in _facts().items()}


@cache
def _by_key() -> dict[str, Device]:
    return {_key(word): _kinds()[name] for name, word in all_names()}


def all_names() -> list[tuple[str, str]]:
    return [(name, word) for name, facts in _facts().items() for word in (name, *facts["names"])]


def _key(text: str) -> str:
    """'NVIDIA A100-SXM4-80GB' -> 'a100sxm480gb'."""
    words = re.split(r"[\s_/-]+", text.strip().lower())
    return "".join(word for word in words if word not in MAKERS)


def _advice(text: str) -> str:
    near = get_close_matches(_key(text), list(_by_key()), n=3 * NEAREST, cutoff=0.5)
    kinds = list(dict.fromkeys(_by_key()[key].name for key in near))[:NEAREST]
    if kinds:
        return f"did you mean {' or '.join(kinds)}? All kinds: {', '.join(device_names())}"
    return f"take one of {', '.join(device_names())}"


def _problems(own: Mapping[str, Any]) -> Iterator[str]:
    for name, value in own.items():
        if name == "tflops":
            rates = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
            if "float32" not in rates or not all(_positive(rate) for rate in rates.values()):
                yield f"tflops is {value!r}, not positive numbers by precision, float32 among them"
        elif name not in (*NEEDED, *OPTIONAL, *TEXTS):
            yield f"{name} is no fact of a device"
        elif not (isinstance(value, str) if name in TEXTS else _positive(value, whole=name in COUNTS)):
            yield f"{name} is {value!r}"


def _positive(value: object, *, whole: bool = False) -> bool:
    if whole:
        return type(value) is int and 0 < value <= MOST_IN_A_DOMAIN
    return isinstance(value, int | float) and not isinstance(value, bool) and LEAST <= value < MOST


def _device(name: str, facts: Mapping[str, Any], kind: str) -> Device:
    return Device(
        name=name,
        kind=kind,
        memory_bytes=round(facts["memory_gib"] * 2**30),
        bandwidth=facts["memory_gb_per_s"] * 1e9,
        flops={precision: rate * 1e12 for precision, rate in facts["tflops"].items()},
        node=facts["node"],
        domain=facts.get("domain", facts["node"]),
        link=facts["link"],
        link_bytes_per_s=facts["link_gb_per_s"] * 1e9,
        network=facts.get("network", "rdma"),
        network_bytes_per_s=facts["network_gbit_per_s"] * 1e9 / 8,
        host_bytes_per_s=facts.get("host_gb_per_s", 0.0) * 1e9,
        source=facts["source"],
    )
