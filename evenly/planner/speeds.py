"""How fast devices are, as data, and how evenly computes on them; the seconds of an operation. No torch.

A device kind has the speeds that its large operations reach in training (`speeds.toml` says where they come from); a
library, how it computes, and what its host and its communication cost.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from evenly.hardware.cluster import Cluster
from evenly.hardware.devices import Device, find_device, known_device
from evenly.job import Precision
from evenly.model.parts import OpCost
from evenly.parallel.data.grouping import WHOLE_BYTES
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
    traffic:   share of a product's bytes that is not hidden by its multiplying. relayout: the same of a convolution,
               whose kernels on a CPU take tensors in an order of their own: they are copied, and the result is back.
    uneven:    by which it takes longer for every factor of 2 that its sizes lack to be multiples of 64.
    processors: multiprocessors that share the tiles of a product; 0 where that is not known.
    idle:      share of the time that those without a tile in the last round cost, less what libraries split further.
    small:     of a CPU, operations/s on one number where start_s and call_s are from; 0 elsewhere.
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
    relayout: float
    small: float = 0.0

    def seconds(self, work: OpCost, library: Library) -> float:
        """The seconds of one operation of `library`, as often as it is done."""
        if work.kind == "host":
            return work.times * self.call_s
        if work.kind == "matmul":
            smallest = min(work.rows, work.inner, work.columns) or 1024
            once = work.flops * (1 + self.narrow / smallest) / self.matmul[work.dtype]
            once *= self.misaligned(work, library) * self.waves(work)
            once += self.traffic * work.moved_bytes / self.bandwidth
        elif work.kind == "convolution":
            once = work.flops / self.matmul[work.dtype] + self.relayout * work.moved_bytes / self.bandwidth
        elif work.kind == "attention":
            # Without tensor cores, kernels of attention are slower as products are.
            share = min(1.0, self.matmul[work.dtype] / _half(self.matmul)) if work.dtype else 1.0
            flops = work.flops * (work.looked_at if library.skips_pairs else 1.0)
            once = flops / (share * self.attention[library.kernel])
        else:
            passes = library.run_passes if work.as_run else library.passes
            once = passes * work.moved_bytes / self.bandwidth
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
        for high, width, slower in TILES:
            rounds = math.ceil(math.ceil(work.rows / high) * math.ceil(work.columns / width) / self.processors)
            best = min(best, slower * rounds * self.processors * high * width / result)
        return 1 + self.idle * (best - 1)


@dataclass(frozen=True, kw_only=True)
class Library:
    """How a training library computes and communicates; the defaults are evenly's own.

    kernels:        of a block. kernel: of fused attention. skips_pairs: whether that computes no pairs of tokens that
                    it does not look at.
    passes:         bytes that its operations move for each that fused ones would. run_passes: the same for each that
                    operations have which are counted as they run.
    unaligned:      how many times as long a product takes whose sizes are no multiples of 8.
    host_s:         that the host takes to start a block's forward pass; half as much again for its backward pass.
    tensor_host_s:  more, where a tensor axis communicates within the block.
    tensor_s:       of each collective of the tensor axis besides its bytes. tensor_hidden: share hidden by products.
    data_hidden:    share of the data axis' collectives that the last backward pass hides.
    weights_wait:   whether the weights that zero=1 and 2 gather after the update are waited for; else as much of it is
                    hidden. reduces_each: whether zero=2 reduces the gradients of each microbatch, not their sum.
    split_backward: how many times as long the two halves of a backward pass take as the whole.
    message_s:      of each message of a pipeline.
    messages_overlap: whether a rank with several stages computes for one while messages of another are under way.
    messages_split: whether each rank of the tensor axis sends its part of an activation only.
    message_bytes_per_s: of all devices of a node together, where messages go through the host; 0 where they do not.
    gather:         "overlapped" or "serial": whether zero=3 communicates while it computes. gather_share: of the
                    network's rate that its collectives reach. gather_copy_bytes: moved per parameter, of flattening
                    and casting.
    whole_bytes:     of the last blocks whose weights zero=3 gathers for both passes at once.
    contention:     share of a collective's time by which computing besides it gets slower.
    reduces_whole:  whether every rank gets all reduced gradients though zero=1 cuts the update.
    weight_bytes, gradient_bytes: of a weight as gathered, and of a gradient as reduced.
    optimizer_bytes: moved per parameter by the update. sum_bytes: by adding a microbatch's gradient to the step's.
    step_sums:      numbers that all ranks add up in a step besides: its loss and weight, the gradient's norm.
    holdings:       what it keeps in memory.
    jitter:         by which a step gets longer with every doubling of nodes.
    """

    holdings: Holdings
    kernels: Kernels = field(default_factory=Kernels)
    kernel: str = "fa2"
    skips_pairs: bool = True
    passes: float = 1.3
    run_passes: float = 1.0
    unaligned: float = 2.5
    host_s: float = 0.0005
    tensor_host_s: float = 0.0
    tensor_s: float = 2e-5
    tensor_hidden: float = 0.0
    data_hidden: float = 0.7
    weights_wait: bool = False
    reduces_each: bool = False
    split_backward: float = 1.0
    message_s: float = 1e-4
    messages_overlap: bool = False
    messages_split: bool = False
    message_bytes_per_s: float = 0.0
    gather: Literal["overlapped", "serial"] = "overlapped"
    gather_share: float = 1.0
    gather_copy_bytes: float = 7.0
    whole_bytes: float = 0.0
    contention: float = 0.45
    reduces_whole: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: float = 2.0
    optimizer_bytes: float = 31.0
    sum_bytes: float = 0.0
    step_sums: int = 0
    jitter: float = 0.006


PASSES, REST = 1.734, 1.65e9  # of evenly: as fitted for torch's engines, which it uses; what a GPU's driver holds
# Bytes of a weight, of its gradient, of what that is added up in where bits are to agree, and of what AdamW keeps.
BYTES = {
    "float32": (4, 4, 8, 8),
    "bfloat16": (4, 4, 8, 8),
    "float16": (4, 4, 8, 8),
    "float64": (8, 8, 8, 16),
    "pure-bfloat16": (2, 2, 4, 4),
    "pure-float16": (2, 2, 4, 4),
}
CASTING = ("bfloat16", "float16")  # from float32 weights

# Of evenly on CPUs, as `comm.shared_memory` has them: a rank's places, if it touches them all, and who has such.
SHARED_BYTES, MOST_SHARING, SHARED_TYPES = 8 << 20, 8, ("float32", "float64")

ON_CPUS: Mapping[str, Any] = {
    "host_s": 0.0,
    # As measured: results need new pages, and what a kernel leaves out of short sequences does not show.
    "run_passes": PASSES,
    "skips_pairs": False,
    "data_hidden": 0.0,
    "contention": 1.0,
    "unaligned": 1.0,
    "split_backward": 1.2,
}


def shares_memory(precision: Precision, tensor: int) -> bool:
    """Whether so many CPU ranks of a tensor axis, all on one machine, sum in memory that they share."""
    return precision in SHARED_TYPES and 1 < tensor <= MOST_SHARING


@cache
def own_library(precision: Precision, *, bitwise: bool, on_cpu: bool, tensor: int = 1) -> Library:
    """evenly, as it is under a precision, and where bits are to agree.

    On a CPU no driver holds anything of a process's memory, and nothing is started ahead of what computes. What carries
    messages takes the core that computes. Products may have any sizes. tensor: ranks of the tensor axis that are on one
    machine, as CPUs share memory for their sums.
    """
    weight, gradient, sum_bytes, state = BYTES[precision]
    reduced = sum_bytes if bitwise else gradient
    holdings = Holdings(
        weights=weight,
        gradients=gradient + (sum_bytes if bitwise else 0),
        optimizer=state,
        gathered=weight,
        reduced=reduced,
        casts=2.0 if precision in CASTING else 0.0,
        rest=REST if not on_cpu else SHARED_BYTES if shares_memory(precision, tensor) else 0.0,
    )
    found = Library(
        holdings=holdings,
        passes=PASSES,
        weight_bytes=weight,
        gradient_bytes=reduced,
        weights_wait=True,
        reduces_each=True,
        whole_bytes=WHOLE_BYTES,
    )
    # On GPUs neither was measured.
    return replace(found, **ON_CPUS, sum_bytes=gradient + 2 * reduced, step_sums=2) if on_cpu else found


def speeds_of(cluster: Cluster, tables: Mapping[str, Any] | None = None) -> Speeds:
    """The speeds of the devices of `cluster`; measured ones come first. tables: in the place of speeds.toml's."""
    found = speeds_of_device(cluster.device, tables)
    measured = cluster.rates
    # Of the largest products: smaller ones stay in caches.
    matmul = {**found.matmul, **{dtype: of[max(of)] for dtype, of in measured.matmul.items() if of}}
    faster = _half(matmul) / _half(found.matmul)
    slower = found.small / measured.small if found.small and measured.small else 1.0
    attention = {kernel: rate * faster for kernel, rate in found.attention.items()}
    return replace(
        found,
        matmul=matmul,
        attention=attention,
        bandwidth=measured.memory or found.bandwidth,
        start_s=found.start_s * slower,
        call_s=found.call_s * slower,
    )


def _half(matmul: Mapping[str, float]) -> float:
    """FLOP/s in the faster type of 16 bits."""
    return max(matmul["bfloat16"], matmul["float16"])


def speeds_of_device(device: Device, tables: Mapping[str, Any] | None = None) -> Speeds:
    """The speeds of a kind of device: as fitted, or by the shares that similar kinds reach.

    What differs from its kind is as much slower or faster as its peak says.
    """
    tables = tables or shipped()
    fitted = next((facts for facts in tables["devices"].values() if device.kind in facts["kinds"]), {})
    operations = {name: fitted.get(name, value) for name, value in tables["operations"].items()}
    bandwidth = device.bandwidth * operations.pop("bandwidth_share")
    half = device.flops.get("bfloat16") or device.flops.get("float16") or device.flops["float32"]
    attention = {kernel: half * share for kernel, share in tables["shares"]["attention"].items()}
    kind = known_device(device.kind) or device
    against = half / max(kind.peak("bfloat16"), kind.peak("float16"))
    attention |= {kernel: against * tera * 1e12 for kernel, tera in fitted.get("attention", {}).items()}
    rates, shares = fitted.get("matmul", {}), tables["shares"]["matmul"]
    return Speeds(
        matmul={dtype: _product_rate(device, kind, dtype, rates, shares) for dtype in UNITS},
        attention=attention,
        bandwidth=bandwidth,
        processors=fitted.get("processors", 0),
        relayout=fitted.get("relayout", operations["traffic"]),
        small=fitted.get("small", 0.0),
        **operations,
    )


@cache
def host_bandwidth() -> float:
    """Bytes/s of one thread of a host, which is what a rank's process has."""
    return speeds_of_device(find_device("cpu")).bandwidth


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


def _product_rate(
    device: Device, kind: Device, dtype: str, fitted: Mapping[str, float], shares: Mapping[str, float]
) -> float:
    """As fitted to its kind of this type, or of the one that it is done in; else the share of the peak of others."""
    unit = next((unit for unit in UNITS[dtype] if unit in device.flops), UNITS[dtype][-1])
    done_in = dtype if unit == UNITS[dtype][0] else unit
    for name in (done_in, *AS_FAST.get(done_in, ())):
        if name in fitted:
            return fitted[name] * 1e12 * device.peak(unit) / kind.peak(unit)
    return device.flops.get(unit, device.flops["float32"] * SLOW_FLOAT64) * shares[done_in]


@cache
def shipped() -> Mapping[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
