"""What a device reaches: FLOP/s of square matmuls by precision, bytes/s of its memory, and how fast a CPU starts
operations. Imports torch when called.

A CPU is measured with one thread, as a rank runs. A rate is that of a *window*, in which one operation follows another
for a tenth of a second: a host that lends its cores in turns, to other ranks or by a control group, does so in shorter
periods. The median of some windows counts, after a warm operation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from evenly.hardware.cluster import Rates

if TYPE_CHECKING:
    import torch

PRECISIONS = {"cpu": ("float32", "float64", "bfloat16"), "cuda": ("float32", "tf32", "float16", "bfloat16")}
SIZES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
COPIED_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
WINDOW_S, WINDOWS = 0.1, 5
LONGEST_S = 1.0  # of an operation: a size that would take longer is left out


def slowest(rates: Sequence[Rates]) -> Rates:
    first = rates[0]
    memories = [one.memory for one in rates if one.memory is not None]
    small = [one.small for one in rates if one.small is not None]
    matmul = {
        precision: {
            n: min(one.matmul[precision][n] for one in rates) for n in by_size if _all_have(rates, precision, n)
        }
        for precision, by_size in first.matmul.items()
    }
    return Rates(matmul=matmul, memory=min(memories, default=None), small=min(small, default=None))


def _all_have(rates: Sequence[Rates], precision: str, n: int) -> bool:
    return all(n in one.matmul.get(precision, {}) for one in rates)


def probe(kind: str, local: int = 0) -> Rates:
    """The rates of a device of this machine, by its number; `kind` is "cpu" or "cuda". Takes some seconds."""
    if kind == "cuda":
        import torch

        torch.cuda.set_device(local)
    with _as_a_rank_runs():
        matmul = {precision: _matmul_rates(kind, precision) for precision in PRECISIONS[kind]}
        return Rates(matmul=matmul, memory=_copy_rate(kind), small=_small_rate() if kind == "cpu" else None)


def _matmul_rates(kind: str, precision: str) -> dict[int, float]:
    """FLOP/s by n, from small to large; a size follows only where the one before says that it takes no longer than a
    second.
    """
    rates: dict[int, float] = {}
    for n in SIZES[kind]:
        flops = 2 * n**3
        if rates and flops / rates[max(rates)] > LONGEST_S:
            break
        rates[n] = flops / _matmul_s(kind, precision, n)
    return rates


def _matmul_s(kind: str, precision: str, n: int) -> float:
    import torch

    dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
    left, right = (torch.randn(n, n, device=kind).to(dtype) for _ in range(2))
    out = torch.empty(n, n, device=kind, dtype=dtype)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return seconds_each(lambda: torch.mm(left, right, out=out), kind)


def _copy_rate(kind: str) -> float:
    import torch

    source = torch.zeros(COPIED_BYTES[kind] // 4, device=kind)
    target: torch.Tensor = torch.ones_like(source)
    return 2 * COPIED_BYTES[kind] / seconds_each(lambda: target.copy_(source), kind)


def _small_rate() -> float:
    import torch

    number = torch.zeros(1)
    return 1 / seconds_each(lambda: number.add_(1.0), "cpu")


def seconds_each(act: Callable[[], object], kind: str) -> float:
    _finished(act, kind)
    return statistics.median(_window_s(act, kind) for _ in range(WINDOWS))


def _window_s(act: Callable[[], object], kind: str) -> float:
    count, took_s, began_s = 0, 0.0, time.perf_counter()
    while took_s < WINDOW_S:
        _finished(act, kind)
        count += 1
        took_s = time.perf_counter() - began_s
    return took_s / count


def _finished(act: Callable[[], object], kind: str) -> None:
    act()
    if kind == "cuda":
        import torch

        torch.cuda.synchronize()


@contextmanager
def _as_a_rank_runs() -> Generator[None]:
    """One thread, and afterwards the settings that were there."""
    import torch

    threads, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = tf32
