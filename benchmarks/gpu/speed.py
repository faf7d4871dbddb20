"""Step times in bfloat16: of evenly and of a loop by hand, eager and compiled, one after the other in one process.

Beside them stand the time and the memory that are predicted of the device's data sheet.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import evenly
from benchmarks.gpu.models import Case, case_of
from evenly.data.loader import worker_count
from evenly.errors import UserError
from evenly.hardware.cluster import Cluster
from evenly.hardware.cluster_text import local_cluster
from evenly.hardware.devices import known_device
from evenly.launcher.environment import available_cores
from evenly.plan import parse_plan
from evenly.planner.job_source import JobSource
from evenly.planner.request import PlanRequest
from evenly.planner.search import search

MOST_STEPS, MOST_S, UNTIMED = 20, 4.0, 3
Step = Callable[[], object]


def gpt2(*, cpu: bool) -> Iterator[dict[str, Any]]:
    """GPT-2 of 124 M parameters."""
    return compare("gpt2", cpu=cpu, compiled=True)


def llama(*, cpu: bool) -> Iterator[dict[str, Any]]:
    """A Llama of 1.24 B parameters."""
    return compare("llama", cpu=cpu, compiled=True)


def resnet(*, cpu: bool) -> Iterator[dict[str, Any]]:
    """ResNet-50."""
    return compare("resnet", cpu=cpu, compiled=True)


def host(*, cpu: bool) -> Iterator[dict[str, Any]]:
    """Twelve tiny layers, whose products take no time: what the host does between them, and how often it waits."""
    found: dict[str, Any] = {}
    for found in compare("host", cpu=cpu, compiled=False):
        yield found
    if not cpu:
        yield found | {"waits": waits(case_of("host", cpu=cpu))}


def compare(name: str, *, cpu: bool, compiled: bool) -> Iterator[dict[str, Any]]:
    """Step times, as shares of the product rate and of the peak too where those are known.

    What is found by then is yielded after each contender: it is kept where the others take too long. before_s: what
    the counts and the prediction took; whole_s: what starting and compiling took as well.
    """
    began_s = time.perf_counter()
    case, device = case_of(name, cpu=cpu), "cpu" if cpu else "cuda:0"
    flops = flops_of_step(case, device)
    peak, products = peak_rate(device), product_rate(device)
    found: dict[str, Any] = {"flops": flops, "peak": peak, "product_rate": products, "contenders": {}}
    found["predicted"] = predicted(case, local_cluster(1))
    found["before_s"] = time.perf_counter() - began_s
    for contender, made in contenders(case, device, compiled=compiled).items():
        began_s = time.perf_counter()
        row = found["contenders"][contender] = measure(made, device)
        row["whole_s"] = time.perf_counter() - began_s
        if "step_s" in row:
            row["per_s"] = case.batch * case.units / row["step_s"]
            row["of_product_rate"] = flops / row["step_s"] / products
            row["mfu"] = None if peak is None else flops / row["step_s"] / peak
        if errors := [f"{one}: {row['error']}" for one, row in found["contenders"].items() if "error" in row]:
            found |= {"failed": True, "error": "\n".join(errors)}
        yield found
        release(device)


def predicted(case: Case, cluster: Cluster) -> dict[str, Any]:
    """Of a step of evenly on one device: the seconds, by what takes them, and the peak of memory."""
    only = parse_plan("data=1 recompute=none precision=bfloat16")
    source = JobSource(case.job(1))
    [found, *_] = search(PlanRequest(source=source, cluster=cluster, batch=case.batch, only=only)).plans
    return {"step_s": found.step_s, "peak_bytes": found.peak_bytes, "seconds": asdict(found.time)}


def contenders(case: Case, device: str, *, compiled: bool) -> dict[str, Callable[[ExitStack], Step]]:
    """By name, what makes a function that trains a step."""
    plan = "single precision=bfloat16"
    found: dict[str, Callable[[ExitStack], Step]] = {
        "torch": lambda _: by_hand(case, device, compiled=False),
        "evenly": lambda stack: by_evenly(case, plan, stack),
    }
    if case.chunked_loss is not None:
        chunked = replace(case, loss=case.chunked_loss)
        found["evenly linear_cross_entropy"] = lambda stack: by_evenly(chunked, plan, stack)
    if compiled:
        found["evenly compiled"] = lambda stack: by_evenly(case, f"{plan} compile=blocks", stack)
        found["torch compiled"] = lambda _: by_hand(case, device, compiled=True)
    return found


def by_evenly(case: Case, plan: str, stack: ExitStack) -> Step:
    run = stack.enter_context(evenly.start(case.job(UNTIMED + MOST_STEPS + 2), plan=plan))
    batches = run.batches()
    return lambda: run.step(next(batches))


def by_hand(case: Case, device: str, *, compiled: bool) -> Step:
    """A loop as it is written: microbatches, autocast, clipping, a fused AdamW, the loss read once a step."""
    model = case.model().to(device)
    called: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = _batches(case, device)

    def step() -> float:
        parts = [next(batches) for _ in range(case.batch // case.microbatch)]
        total = torch.zeros((), device=device)
        for part in parts:
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = case.loss(called, _moved(part, device))
            mean: torch.Tensor = loss.total / (float(loss.weight) * len(parts))
            mean.backward()
            total += mean.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


def _batches(case: Case, device: str) -> Iterator[Any]:
    workers = worker_count(cores=available_cores(), local_ranks=1, device=device)
    loader = DataLoader(
        case.data, case.microbatch, shuffle=True, drop_last=True, num_workers=workers, pin_memory=device != "cpu"
    )
    return iter(loader)


def _moved(batch: Any, device: str) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    return type(batch)(_moved(one, device) for one in batch)


def measure(make: Callable[[ExitStack], Step], device: str) -> dict[str, Any]:
    """The median of a step's seconds, the first's, and the peak of memory; why not, for what evenly refuses."""
    with ExitStack() as stack:
        try:
            step, times = make(stack), list[float]()
            began_s = time.perf_counter()
            while len(times) < UNTIMED + MOST_STEPS and (len(times) <= UNTIMED or sum(times[UNTIMED:]) < MOST_S):
                step()
                synchronize(device)
                times.append(time.perf_counter() - began_s)
                began_s = time.perf_counter()
        except UserError as problem:
            return {"refused": str(problem)}
        except Exception as problem:  # of one contender: the others are measured
            return {"error": f"{type(problem).__name__}: {str(problem)[-600:]}"}
    timed = times[UNTIMED:]
    peak = None if device == "cpu" else torch.cuda.max_memory_allocated()
    return {"step_s": statistics.median(timed), "steps": len(timed), "first_s": times[0], "peak_bytes": peak}


def release(device: str) -> None:
    """Frees what a contender has left."""
    torch.compiler.reset()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def flops_of_step(case: Case, device: str) -> float:
    """Of products and attention in forward and backward of a batch, counted in one of one sample."""
    model = case.model().to(device)
    batch = torch.utils.data.default_collate([case.data[0], case.data[1]])
    with FlopCounterMode(display=False) as counter, torch.autocast(torch.device(device).type, torch.bfloat16):
        case.loss(model, _moved(batch, device)).total.backward()
    del model
    release(device)
    return counter.get_total_flops() / 2 * case.batch


def peak_rate(device: str) -> float | None:
    """FLOP/s that its maker states for bfloat16; None for what is not known."""
    known = None if device == "cpu" else known_device(torch.cuda.get_device_name())
    return None if known is None else known.peak("bfloat16")


def product_rate(device: str) -> float:
    """FLOP/s of one large product in bfloat16, as it is measured."""
    n = 128 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    times: list[float] = []
    for _ in range(10):
        synchronize(device)
        began_s = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - began_s)
    return 2 * n**3 / statistics.median(times)


def waits(case: Case) -> int:
    """How often the host waits for the GPU in a step of evenly, as torch counts it."""
    with ExitStack() as stack:
        step = by_evenly(case, "single precision=bfloat16", stack)
        step()
        step()
        with warnings.catch_warnings(action="ignore"):  # it may not notice all places, and says so
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True, action="always") as caught:
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in caught)
