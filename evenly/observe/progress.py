"""Progress output of a run: a progress bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

PLAIN_INTERVAL_S = 2.0


class Watcher(Protocol):
    """Shows the progress of a run; reports are those of `evenly.train`."""

    def on_step(self, report: Any) -> None: ...
    def on_text(self, text: str) -> None: ...
    def close(self) -> None: ...


class NoProgress:
    """The watcher of every rank but the first."""

    def on_step(self, report: Any) -> None:
        pass

    def on_text(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class PlainLines:
    """A line for the first step, the last, and every two seconds between."""

    def __init__(self, *, steps: int, unit: str) -> None:
        self._steps, self._unit, self._printed_at = steps, unit, 0.0

    def on_step(self, report: Any) -> None:
        now = time.monotonic()
        due = report.step in (1, self._steps) or now - self._printed_at >= PLAIN_INTERVAL_S
        if due or report.skipped == "not finite":
            self._printed_at = now
            self.on_text(f"step {report.step}/{self._steps}  {describe_step(report, self._unit)}")
        if report.memory is not None:
            self.on_text(describe_memory(report.memory))

    def on_text(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class ProgressBar:
    """A progress bar by rich."""

    def __init__(self, *, steps: int, done: int, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._unit = unit
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, text="")
        self._progress.start()

    def on_step(self, report: Any) -> None:
        self._progress.update(self._task, completed=report.step, text=describe_step(report, self._unit))
        if report.skipped == "not finite":
            self.on_text(f"step {report.step}  {describe_step(report, self._unit)}")
        if report.memory is not None:
            self.on_text(describe_memory(report.memory))

    def on_text(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def make_watcher(*, main: bool, steps: int, done: int, unit: str) -> Watcher:
    """The watcher for this rank: a bar if its stderr is a terminal, lines if not, nothing on other ranks."""
    if not main:
        return NoProgress()
    return ProgressBar(steps=steps, done=done, unit=unit) if sys.stderr.isatty() else PlainLines(steps=steps, unit=unit)


def describe_step(report: Any, unit: str) -> str:
    """Loss, rate in `unit` (samples or tokens) and memory per rank of a step report, on one line."""
    rate = report.tokens_per_s if unit == "tokens" else report.samples_per_s
    largest, least = max(report.memory_bytes), min(report.memory_bytes)
    memory = _mib(largest) if len(report.memory_bytes) == 1 else f"{_mib(least)}-{_mib(largest)}"
    skipped = {
        "overflow": "  (overflow: skipped)",
        "not finite": f"  (not finite: left out, {report.left_out} so far)",
    }.get(report.skipped, "")
    return f"loss {report.loss:.4f}  {rate:,.0f} {unit}/s  {memory} MiB/rank{skipped}"


def describe_memory(memory: Sequence[Mapping[Any, int]]) -> str:
    """Peak memory of tensors on the fullest device, by category, on one line."""
    totals = [sum(device.values()) for device in memory]
    fullest = totals.index(max(totals))
    parts = sorted(memory[fullest].items(), key=lambda item: -item[1])
    text = " + ".join(f"{category} {_short(size)}" for category, size in parts if size)
    where = "" if len(memory) == 1 else f" on the fullest device, {fullest}; {imbalance(memory):.2f} x the mean"
    return f"tensors at the peak: {text} = {_short(totals[fullest])} MiB{where}"


def imbalance(memory: Sequence[Mapping[Any, int]]) -> float:
    """Bytes of the fullest device over the mean."""
    totals = [sum(device.values()) for device in memory]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def _short(count_bytes: int) -> str:
    return _mib(count_bytes) if count_bytes >= 100 * 2**20 else f"{count_bytes / 2**20:.2g}"


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:,.0f}"
