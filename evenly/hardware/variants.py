"""Variants of a kind of device: `H100:memory=96GB,bandwidth=2.4TB/s,power=500W` as facts of devices.toml. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from evenly.errors import UserError

SIZES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {
    f"{letter}{ending}": 2**power
    for letter, power in zip("kmgt", (10, 20, 30, 40), strict=True)
    for ending in ("", "ib")
}
RATES = {"gb/s": 1.0, "tb/s": 1e3}  # GB/s
# What may be stated, with its units.
UNITS: Mapping[str, Mapping[str, float]] = {
    "memory": {unit: size / 2**30 for unit, size in SIZES.items() if size >= 2**20},
    "bandwidth": RATES,
    "power": {"w": 1.0},
    "clock": {"mhz": 1.0, "ghz": 1e3},
}
ACCEPTED = "write KIND:memory=96GB,bandwidth=2.4TB/s,power=500W,clock=1.4GHz, or some of these"
# The power that a chip draws beyond idling grows with its clock times the square of its voltage, and the voltage with
# the clock (Rabaey, Digital Integrated Circuits, section 5.5).
POWER_EXPONENT = 1 / 3


def variant_facts(kind: str, facts: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The facts in which a variant differs from its kind, which has `facts`. Raises `UserError` for no such text.

    memory: what a program can allocate. power: a limit, under which the clock falls. clock: that it is held at; both
    change what it computes in a second.
    """
    asked = f"the device {kind}:{text}"
    stated = dict(_stated(asked, text))
    found: dict[str, Any] = {}
    if "memory" in stated:
        found["memory_gib"] = stated["memory"]
    if "bandwidth" in stated:
        found["memory_gb_per_s"] = stated["bandwidth"]
    slower = 1.0
    for name, fact, exponent in (("power", "power_w", POWER_EXPONENT), ("clock", "clock_mhz", 1.0)):
        if name in stated:
            if fact not in facts:
                raise UserError(asked, f"the {name} of other {kind} is not known", "state its tflops in a cluster file")
            slower = min(slower, (stated[name] / facts[fact]) ** exponent)
    if slower != 1.0:
        found["tflops"] = {precision: rate * slower for precision, rate in facts["tflops"].items()}
    return found


def size_bytes(text: str) -> float | None:
    """'80GB', '40GiB', '40G' or a number of bytes -> bytes; GB is 10^9, GiB and G are 2^30; None for anything else."""
    return _quantity(text, SIZES)


def _stated(asked: str, text: str) -> Iterator[tuple[str, float]]:
    for word in text.split(","):
        name, _, value = (part.strip().lower() for part in word.partition("="))
        if name not in UNITS:
            raise UserError(asked, f"{word.strip()!r} is nothing that a variant states", ACCEPTED)
        amount = _quantity(value, UNITS[name])
        if not amount:
            units = ", ".join(unit for unit in UNITS[name] if unit)
            raise UserError(asked, f"{name} is {value!r}, not a number with one of the units {units}", ACCEPTED)
        yield name, amount


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z/]*)\s*", text, re.IGNORECASE)
    unit = units.get(match[2].lower()) if match else None
    return None if match is None or unit is None else float(match[1]) * unit
