"""Where the time of a step goes, as text: by block of the model, by function of Python, by operation of torch.

Each of the three watches steps of its own, and makes what it watches dearer: small functions are counted too high.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

ROWS = 30
BLOCKS = ("Block", "GPT2Block")  # their classes
ROOTS = ("site-packages", Path(__file__).resolve().parents[2].name, "lib")  # paths are shown from there on


def profile(step: Callable[[], object], count: int) -> str:
    """Of `count` steps."""
    return "\n".join([*_blocks(step, count), *_functions(step, count), *_operations(step, count)])


def _blocks(step: Callable[[], object], count: int) -> list[str]:
    began: list[float] = []
    spans: list[float] = []

    def begin(module: nn.Module, _: Any) -> None:
        if type(module).__name__ in BLOCKS:
            began.append(process_time())

    def end(module: nn.Module, _: Any, __: Any) -> None:
        if type(module).__name__ in BLOCKS:
            spans.append(process_time() - began.pop())

    every = nn.modules.module
    handles = [every.register_module_forward_pre_hook(begin), every.register_module_forward_hook(end)]
    for _ in range(count):
        step()
    for handle in handles:
        handle.remove()
    median = statistics.median(spans) * 1e6 if spans else 0.0
    return [f"forwards of blocks: {len(spans) / count:g} a step, {median:.0f} us each in the median"]


def _functions(step: Callable[[], object], count: int) -> list[str]:
    profiler = cProfile.Profile(process_time)  # others on the machine do not count
    profiler.enable()
    for _ in range(count):
        step()
    profiler.disable()
    found: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    rows = sorted(found.items(), key=lambda one: one[1][2], reverse=True)[:ROWS]
    lines = ["", "by function: calls a step, us a step in it alone, us a step with what it calls"]
    for (file, line, name), (_, calls, alone, whole, _) in rows:
        where = f"  {_shown(file)}:{line}" if line else ""
        lines.append(f"{calls / count:8.0f} {alone / count * 1e6:8.0f} {whole / count * 1e6:8.0f}  {name}{where}")
    return lines


def _shown(file: str) -> str:
    """The path without what is only this machine's."""
    parts = Path(file).parts
    begin = max((number + 1 for number, part in enumerate(parts) if part in ROOTS), default=0)
    return "/".join(parts[begin:] if begin else parts[-2:])


def _operations(step: Callable[[], object], count: int) -> list[str]:
    with profiled(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(count):
            step()
    rows = sorted(watched.key_averages(), key=lambda one: one.self_cpu_time_total, reverse=True)[:ROWS]
    lines = ["", "by operation: calls a step, us a step in it alone"]
    lines += [f"{one.count / count:8.0f} {one.self_cpu_time_total / count:8.0f}  {one.key}" for one in rows]
    return lines
