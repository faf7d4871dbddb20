"""What a rank did in a step that is recorded: its passes, and without a pipeline also the rest of the step.

That rest are the samples that it waited for, its operations with other ranks, and the update. A pipeline's sends and
receives are passes of their own, as its schedule has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from evenly.train.run import Run


class NamedSpan(NamedTuple):
    """When a rank did what is no pass, in seconds of the machine's clock.

    kind: "loading" (from the end of the step before to the first pass), "operation" (from its beginning until its
    result was waited for) or "update" (from the last pass to the end of the step). name: of an operation.
    """

    kind: str
    name: str
    begin_s: float
    end_s: float


def record_spans(run: Run, step: int, passes: Sequence[Any], *, began_s: float) -> None:
    """Records `passes` of this rank in `step`, which ends here; began_s: on the clock of `time.perf_counter`."""
    pipeline = run.composed.pipeline
    if pipeline is not None:
        run.recorder.spans(step, pipeline.group.position, passes)
    elif passes:
        begin_s, end_s = time.time() - time.perf_counter() + began_s, time.time()
        first_s, last_s = passes[0].begin_s, passes[-1].end_s
        rest = [NamedSpan("loading", "", min(begin_s, first_s), first_s), NamedSpan("update", "", last_s, end_s)]
        run.recorder.spans(step, 0, [*passes, *rest, *_operations(run, first_s)])


def _operations(run: Run, since_s: float) -> Iterator[NamedSpan]:
    """Those that have ended of the newest ones, as many as are kept."""
    recorder = run.world.recorder
    for entry in recorder.entries_since(since_s) if recorder is not None else ():
        if entry.left_s is not None:
            about = f" ({entry.call.label})" if entry.call.label else ""
            yield NamedSpan("operation", f"{entry.call.operation}{about}", entry.entered_s, entry.left_s)
