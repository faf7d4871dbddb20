"""Progress output of a run: one line that updates on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

PLAIN_INTERVAL_S = 2.0
RECENT_STEPS = 20
WIDEST_BAR, NARROWEST_BAR = 24, 6
NOTEBOOK_INTERVAL_S = 0.1


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


@contextmanager
def busy_line(text: str, *, after_s: float = 0.0) -> Generator[Callable[[str], object]]:
    """Within, the last line of a terminal says what is being done; where stderr is none, nothing does.

    Yields what shows another text. after_s: before that no line is there, so that what takes less has none.
    """
    due, lines = time.monotonic() + after_s, list[Any]()

    def show(text: str) -> None:
        if lines:
            lines[0].update(text)
        elif sys.stderr.isatty() and time.monotonic() >= due:
            from rich.console import Console  # a tenth of a second

            lines.append(Console(file=sys.stderr).status(text))
            lines[0].start()

    try:
        show(text)
        yield show
    finally:
        for line in lines:
            line.stop()


class PlainLines:
    """A line for the first step, the last, and every two seconds between."""

    def __init__(self, *, steps: int, unit: str) -> None:
        self._steps, self._printed_at = steps, 0.0
        self._pace = Pace(steps, unit)

    def on_step(self, report: Any) -> None:
        now = time.monotonic()
        self._pace.add(report, now)
        due = report.step in (1, self._steps) or now - self._printed_at >= PLAIN_INTERVAL_S
        if due or report.skipped == "not finite":
            self._printed_at = now
            parts = step_parts(report, self._pace)
            self.on_text("  ".join([f"step {report.step}/{self._steps}", *parts]) + why_skipped(report))

    def on_text(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class StatusLine:
    """A line at the bottom of a terminal, which is gone when the run has ended; what is printed goes above it."""

    def __init__(self, *, steps: int, done: int, unit: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._steps, self._step = steps, done
        self._pace = Pace(steps, unit)
        self._parts: list[str] = []
        self._console = Console(stderr=True)
        # What goes to stdout is no part of this terminal where that is a file.
        self._live = Live(self, console=self._console, transient=True, redirect_stdout=sys.stdout.isatty())
        self._live.start()

    def on_step(self, report: Any) -> None:
        self._pace.add(report, time.monotonic())
        self._step, self._parts = report.step, step_parts(report, self._pace)
        if report.skipped == "not finite":
            self.on_text(f"step {report.step}/{self._steps}  {self._parts[0]}{why_skipped(report)}")

    def on_text(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        before, bar, after = fitted_line(self._step, self._steps, self._parts, options.max_width)
        filled = round(len(bar) * self._step / self._steps)
        yield Text.assemble(
            before, (bar[:filled], "green"), (bar[filled:], "bright_black"), after, no_wrap=True, overflow="ellipsis"
        )


class NotebookLine:
    """One line of a notebook's cell, written over at most ten times a second; texts are lines of their own."""

    def __init__(self, *, steps: int, unit: str) -> None:
        self._steps, self._written_at, self._line = steps, 0.0, ""
        self._pace = Pace(steps, unit)

    def on_step(self, report: Any) -> None:
        now = time.monotonic()
        self._pace.add(report, now)
        line = "  ".join([f"step {report.step}/{self._steps}", *step_parts(report, self._pace)]) + why_skipped(report)
        if now - self._written_at >= NOTEBOOK_INTERVAL_S or report.step in (1, self._steps):
            self._written_at = now
            self._write(line)
        if report.skipped == "not finite":
            self.on_text(line)

    def on_text(self, text: str) -> None:
        line, self._line = self._line, ""
        print(f"\r{text.ljust(len(line))}", flush=True)
        if line:
            self._write(line)

    def close(self) -> None:
        if self._line:
            print(flush=True)

    def _write(self, line: str) -> None:
        print(f"\r{line.ljust(len(self._line))}", end="", flush=True)
        self._line = line


def make_watcher(*, main: bool, steps: int, done: int, unit: str, notebook: bool = False) -> Watcher:
    """The watcher for this rank: a status line if its stderr is a terminal, else lines; nothing on other ranks."""
    if not main:
        return NoProgress()
    if notebook:
        return NotebookLine(steps=steps, unit=unit)
    return StatusLine(steps=steps, done=done, unit=unit) if sys.stderr.isatty() else PlainLines(steps=steps, unit=unit)


class Pace:
    """How fast a run is, over its last steps, and how long it still takes at the pace since the first step that was
    added; to that evaluations and saving count.
    """

    def __init__(self, steps: int, unit: str) -> None:
        self._steps, self._unit = steps, unit
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)

    def add(self, report: Any, now_s: float) -> None:
        self._last = report.step, now_s
        self._first = self._first or self._last
        self._recent.append((report.weight if self._unit == "tokens" else report.samples, report.step_s))

    def rate(self) -> str:
        """Samples or tokens per second."""
        amounts, seconds = zip(*self._recent, strict=True)
        return f"{sum(amounts) / sum(seconds):,.0f} {self._unit}/s"

    def left_s(self) -> float | None:
        """None before the second step: the first takes longer than others."""
        if self._first is None or self._first[0] == self._last[0]:
            return None
        pace_s = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return pace_s * (self._steps - self._last[0])


def step_parts(report: Any, pace: Pace) -> list[str]:
    """Loss, metrics, time left, rate and memory per rank: from what matters most to what least."""
    largest, least = max(report.memory_bytes), min(report.memory_bytes)
    memory = _mib(largest) if _mib(least) == _mib(largest) else f"{_mib(least)}-{_mib(largest)}"
    left_s = pace.left_s()
    left = [] if left_s is None else [f"{duration(left_s)} left"]
    return [_figures(report), *left, pace.rate(), f"{memory} MiB/rank"]


def why_skipped(report: Any) -> str:
    """Why the step had no update, '' where it had one."""
    return {
        "overflow": "  (overflow: skipped)",
        "not finite": f"  (not finite: left out, {report.left_out} so far)",
    }.get(report.skipped, "")


def describe_evaluation(evaluation: Any) -> list[str]:
    """Loss and metrics of an evaluation, on one line for each of its sets."""
    averaged = " (averaged weights)" if evaluation.averaged else ""
    return [
        f"evaluation{' of ' * bool(name)}{name}{':' * bool(name)} {_figures(found)}{averaged}"
        for name, found in evaluation.by_name.items()
    ]


def _figures(report: Any) -> str:
    """Loss and metrics; of the phases of a job their losses and metrics."""
    found = [("loss", report.loss), *report.metrics.items()]
    return "  ".join(f"{name} {value:.4f}" for name, value in found if not name.endswith(("/grad_norm", "/lr")))


def fitted_line(step: int, steps: int, parts: list[str], width: int) -> tuple[str, str, str]:
    """What stands before a bar, the bar and what stands behind it: as many `parts` as `width` has room for."""
    before = f"step {step}/{steps}"
    shown = [*parts]
    while shown and len("  ".join([before, *shown])) > width:
        shown.pop()
    after = "".join(f"  {part}" for part in shown)
    room = min(WIDEST_BAR, width - len(before) - len(after) - 2)
    return (f"{before}  ", "━" * room, after) if room >= NARROWEST_BAR else (before, "", after)


def duration(seconds: float) -> str:
    """`0:07`, `12:30`, `5:02:30`, from two days on `3 d 4 h`."""
    whole = max(0, round(seconds))
    if whole >= 48 * 3600:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:,.0f}"
