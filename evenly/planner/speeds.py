"""How fast devices and libraries are, as data: what `speeds.toml` holds, and the seconds of an operation. No torch.

A device kind has the speeds that its large operations reach in training; a library, how it computes, and what its host
and its communication cost. Where both come from stands in `speeds.toml`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from evenly.hardware.cluster import Cluster
from evenly.hardware.devices import Device
from evenly.model.parts import OpCost
from evenly.planner.footprint import Holdings
from evenly.planner.transformer import Kernels

# Rows and columns of a result that one multiprocessor computes, and how much slower it is with smaller ones.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.1), (64, 64, 1.4))
FILE = Path(__file__).with_name("speeds.toml")


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of one device kind.

    matmul:    by what is multiplied, FLOP/s of large products. attention: by kernel, FLOP/s of its forward pass.
    bandwidth: bytes/s that operations without products reach.
    start_s:   of an operation, from the end of the one before it. call_s: of a call from Python besides.
    narrow:    a product whose smallest size is n takes (1 + narrow / n) times as long.
    traffic:   share of a product's bytes that is not hidden by its multiplying.
    uneven:    by which it takes longer for every factor of 2 that its sizes lack to be multiples of 64.
    processors: multiprocessors that share the tiles of a product; 0 where that is not known.
    idle:      share of the time that those without a tile in the last round cost, less what libraries split further.
    """

    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    bandwidth: float
    start_s: float
    call_s: float
    narrow: float
    traffic: float
    uneven: float
    processors: int
    idle: float

    def seconds(self, work: OpCost, library: Library) -> float:
        """The seconds of one operation of `library`, as often as it is done."""
        if work.kind == "host":
            return work.times * self.call_s
        if work.kind == "matmul":
            smallest = min(work.rows, work.inner, work.columns) or 1024
            once = work.flops * (1 + self.narrow / smallest) / self.matmul[work.dtype]
            once *= self.misaligned(work, library) * self.waves(work)
            once += self.traffic * work.moved_bytes / self.bandwidth
        elif work.kind == "attention":
            # Without tensor cores, kernels of attention are slower as products are.
            half = max(self.matmul["bfloat16"], self.matmul["float16"])
            share = min(1.0, self.matmul[work.dtype] / half) if work.dtype else 1.0
            once = work.flops / (share * self.attention[library.kernel])
        else:
            once = library.passes * work.moved_bytes / self.bandwidth
        return work.times * (once + self.start_s)

    def misaligned(self, work: OpCost, library: Library) -> float:
        """How many times as long a product takes whose sizes tensor cores do not like: best are multiples of 64.

        What counts are widths, the lengths of rows in memory, and not how many tokens there are.
        """
        widths = work.rows | work.columns if work.of_weights else work.inner | work.columns
        widths |= 64
        power = widths & -widths  # the lowest bit that is set: the largest power of 2 in all
        return library.unaligned if power < 8 else 1 + self.uneven * (7 - power.bit_length())

    def waves(self, work: OpCost) -> float:
        """How many times as long a product takes because its last tiles do not occupy all multiprocessors."""
        result = work.rows * work.columns
        if not self.processors or not result or work.flops > 3.0 * result * work.inner:
            return 1.0  # many products at once fill each other's gaps
        best = math.inf
        for high, wide, slower in TILES:
            rounds = math.ceil(math.ceil(work.rows / high) * math.ceil(work.columns / wide) / self.processors)
            best = min(best, slower * rounds * self.processors * high * wide / result)
        return 1 + self.idle * (best - 1)


@dataclass(frozen=True, kw_only=True)
class Library:
    """How a training library computes and communicates.

    kernels:        of a block. kernel: of fused attention. passes: bytes that its operations move for each that fused
                    ones would. unaligned: how many times as long a product takes whose sizes are no multiples of 8.
    host_s:         that the host takes to start a block's forward pass; half as much again for its backward pass.
    tensor_host_s:  more, where a tensor axis communicates within the block.
    splits_sequence: whether its tensor axis shares the tokens too, in every plan.
    tensor_s:       of each collective of the tensor axis besides its bytes. tensor_hidden: share hidden by products.
    data_hidden:    share of the data axis' collectives that the last backward pass hides.
    message_s:      of each message of a pipeline.
    messages_split: whether each rank of the tensor axis sends its part of an activation only.
    message_bytes_per_s: of all devices of a node together, where messages go through the host; 0 where they do not.
    gather:         "overlapped" or "serial": whether zero=3 communicates while it computes. gather_share: of the
                    network's rate that its collectives reach. gather_copy_bytes: moved per parameter, of flattening
                    and casting.
    contention:     share of a collective's time by which computing besides it gets slower.
    reduces_whole:  whether every rank gets all reduced gradients though zero=1 cuts the update.
    weight_bytes, gradient_bytes: of a weight as gathered, and of a gradient as reduced.
    optimizer_bytes: moved per parameter by the update.
    holdings:       what it keeps in memory.
    jitter:         by which a step gets longer with every doubling of nodes.
    """

    kernels: Kernels
    kernel: str
    passes: float
    unaligned: float
    host_s: float
    tensor_host_s: float
    splits_sequence: bool
    tensor_s: float
    tensor_hidden: float
    data_hidden: float
    message_s: float
    messages_split: bool
    message_bytes_per_s: float
    gather: Literal["overlapped", "serial"]
    gather_share: float
    gather_copy_bytes: float
    contention: float
    reduces_whole: bool
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    jitter: float
    holdings: Holdings


def library_named(name: str) -> Library:
    """The library called `name` in speeds.toml, `evenly` among them."""
    facts = dict(_tables()["libraries"]["any"]) | _tables()["libraries"][name]
    kernels, holdings = Kernels(**facts.pop("kernels", {})), Holdings(**facts.pop("holdings"))
    facts.pop("source", None)
    return Library(kernels=kernels, holdings=holdings, **facts)


def speeds_of(cluster: Cluster) -> Speeds:
    """The speeds of the devices of `cluster`; measured ones come first."""
    found = speeds_of_device(cluster.device)
    measured = cluster.rates
    matmul = {dtype: max(by_size.values()) for dtype, by_size in measured.matmul.items() if by_size}
    return replace(found, matmul={**found.matmul, **matmul}, bandwidth=measured.memory or found.bandwidth)


@cache
def _by_device() -> dict[str, str]:
    return {kind: name for name, facts in _tables()["devices"].items() for kind in facts["kinds"]}


def speeds_of_device(device: Device) -> Speeds:
    """The speeds of a kind of device: as fitted, or by the shares that similar kinds reach."""
    operations = {name: _facts(device).get(name, value) for name, value in _tables()["operations"].items()}
    return Speeds(
        matmul=_matmul(device),
        attention=_attention(device),
        bandwidth=device.bandwidth * operations["bandwidth_share"],
        **{name: operations[name] for name in ("start_s", "call_s", "narrow", "traffic", "uneven", "idle")},
        processors=_facts(device).get("processors", 0),
    )


def _facts(device: Device) -> dict[str, Any]:
    name = _by_device().get(device.name)
    return _tables()["devices"][name] if name else {}


# What is multiplied in each type: where a device has no units for it, it is done in the next one that it has.
UNITS = {
    "float64": ("float64",),
    "float32": ("float32",),
    "float16": ("float16", "bfloat16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float8": ("float8", "bfloat16", "float16", "float32"),
    "mxfp8": ("float8", "bfloat16", "float16", "float32"),
    "nvfp4": ("float4", "float8", "bfloat16", "float16", "float32"),
}
AS_FAST = {"float16": ("bfloat16",)}
SLOW_FLOAT64 = 1 / 32  # of float32, where the data sheet says nothing


def _matmul(device: Device) -> dict[str, float]:
    fitted = _facts(device).get("matmul", {})
    return {dtype: _product_rate(device, dtype, fitted) for dtype in UNITS}


def _product_rate(device: Device, dtype: str, fitted: Mapping[str, float]) -> float:
    """As fitted of this type, or of the one that it is done in; else the share of the peak that others reach."""
    unit = next((unit for unit in UNITS[dtype] if unit in device.flops), UNITS[dtype][-1])
    done_in = dtype if unit == UNITS[dtype][0] else unit
    for name in (done_in, *AS_FAST.get(done_in, ())):
        if name in fitted:
            return fitted[name] * 1e12
    peak = device.flops.get(unit, device.flops["float32"] * SLOW_FLOAT64)
    return peak * _tables()["shares"]["matmul"][done_in]


def _attention(device: Device) -> dict[str, float]:
    shares, fitted = _tables()["shares"]["attention"], _facts(device).get("attention", {})
    half = device.flops.get("bfloat16") or device.flops.get("float16") or device.flops["float32"]
    return {kernel: half * share for kernel, share in shares.items()} | {
        kernel: tera * 1e12 for kernel, tera in fitted.items()
    }


def use(tables: dict[str, Any]) -> None:
    """Takes these tables for those of speeds.toml from now on: for fitting them."""
    _replaced.clear()
    _replaced.update(tables)


_replaced: dict[str, Any] = {}


def _tables() -> dict[str, Any]:
    return _replaced or _read()


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
