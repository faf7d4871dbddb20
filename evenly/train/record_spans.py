"""What a rank did in a step that is recorded: its passes, its operations with other ranks, and without a pipeline also
the rest of the step: the samples that it waited for, and the update.

A pipeline's sends and receives are passes too, as its schedule has them: a send ends where it has begun.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from evenly.comm.collectives import gather_values
from evenly.observe.timings import Communication, Timing, UnderWay, communication, mean_by_axis, messages
from evenly.plan.schedule import ActionSpan

if TYPE_CHECKING:
    from evenly.train.run import Run

MOST_OPERATIONS = 256  # of a step of a rank that are recorded: the newest


class NamedSpan(NamedTuple):
    """When a rank did what is no pass, in seconds of the machine's clock.

    kind: "loading" (from the end of the step before to the first pass) or "update" (from the last pass to the end of
    the step).
    """

    kind: str
    name: str
    begin_s: float
    end_s: float


class OperationSpan(NamedTuple):
    """When an operation between ranks was under way, likewise; of its end the rank waited for `waited_s`."""

    kind: str
    name: str
    axis: str
    begin_s: float
    end_s: float
    waited_s: float


def record_spans(run: Run, step: int, passes: Sequence[Any], *, began_s: float) -> dict[str, dict[str, float]]:
    """Records `passes` of this rank in `step`, which ends here; began_s: on the clock of `time.perf_counter`.

    Returns what came of communication, as `StepReport.communication` has it. All ranks call it.
    """
    clock = time.time() - time.perf_counter()
    timed = [] if run.world.recorder is None else run.world.recorder.timed()
    found = [(timing, one) for timing in timed if (one := timing.under_way()) is not None]
    operations = [_span(timing, one, clock) for timing, one in found[-MOST_OPERATIONS:]]
    pipeline = run.composed.pipeline
    if pipeline is not None:
        run.recorder.spans(step, pipeline.group.position, [*passes, *operations])
    elif passes:
        begin_s, end_s = clock + began_s, time.time()
        first_s, last_s = passes[0].begin_s, passes[-1].end_s
        rest = [NamedSpan("loading", "", min(begin_s, first_s), first_s), NamedSpan("update", "", last_s, end_s)]
        run.recorder.spans(step, 0, [*passes, *rest, *operations])
    return _communication(run, passes, found)


def _span(timing: Timing, one: UnderWay, clock: float) -> OperationSpan:
    name = f"{timing.operation} ({timing.label})" if timing.label else timing.operation
    waited_s = one.end_s - one.waited_from_s
    return OperationSpan("operation", name, timing.axis, clock + one.begin_s, clock + one.end_s, waited_s)


def _communication(
    run: Run, passes: Sequence[ActionSpan], found: Sequence[tuple[Timing, UnderWay]]
) -> dict[str, dict[str, float]]:
    by_axis: dict[str, list[UnderWay]] = {}
    for timing, one in found:
        if timing.operation not in ("send", "recv"):  # what they are of a pipeline is known from its passes
            by_axis.setdefault(timing.axis, []).append(one)
    mine: dict[str, Communication] = {axis: communication(of_axis) for axis, of_axis in by_axis.items()}
    if (pipeline := run.composed.pipeline) is not None:
        sent = [one for one in passes if one.kind.startswith("send")]
        of_all = [one for of_rank in gather_values(sent, pipeline.group) for one in of_rank]
        if run.world.recorder is not None:  # else nobody knows when messages were there
            mine["pipeline"] = communication(messages(passes, of_all))
    return mean_by_axis(gather_values(mine, run.world.group("world")))
