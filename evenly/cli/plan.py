"""`evenly plan`: which plans fit, how fast they are, and why; without GPU and without starting processes."""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING

from evenly.cli.plan_request import WIDTH_OF_FILES, PlanOptions, is_job, option_name, plan_request
from evenly.errors import EvenlyError, UserError
from evenly.launcher.frozen import importing
from evenly.observe.progress import busy_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from evenly.planner.prediction import Prediction
    from evenly.planner.request import CostSource, PlanRequest, PlanResult

SOON_S = 1.0  # after which a search says what it does


def plan(options: PlanOptions) -> int:
    """Plans; returns the exit code. Raises `EvenlyError` (exit code 1) where no plan does."""
    if options.explain:
        return _explain(options)
    if len(options.clusters) > 1 or options.prices:
        from evenly.cli.plan_clusters import compare_clusters

        return compare_clusters(options)
    if options.tokens is not None:
        raise UserError("--tokens without --price", "it is what a run's cost is of", "add --price, or leave it out")
    of_job = is_job(options)
    line = busy_line(f"loading {options.target}", after_s=0.0 if of_job else SOON_S)
    with redirect_stdout(sys.stderr), line as show, ExitStack() as around:  # what a job prints is no part of the result
        from evenly.planner.search import search

        with importing() if of_job else nullcontext():
            if of_job:
                from evenly.data.alone import looking

                around.enter_context(looking())
            request, assumed = plan_request(options)
            request = replace(request, watch=show)
            request = _reading(request) if of_job else request
        result = search(request)
    _show(request, result, options, assumed=assumed)
    if (refusal := _refusal(request, result)) is not None:
        raise refusal
    return 0


def _reading(request: PlanRequest) -> PlanRequest:
    from evenly.planner.auto import reading

    return reading(request)


def _explain(options: PlanOptions) -> int:
    from evenly.cli.explain import explain

    ignored = ("clusters", "prices", "tokens", "batch", "sequence", "memory", "reserve", "max_devices", "step_s", "top")
    if stated := [
        field.name for field in fields(PlanOptions) if field.name in ignored and getattr(options, field.name)
    ]:
        raise UserError(
            "evenly plan --explain",
            f"it says what --only makes of a model; {', '.join(map(option_name, stated))} is for predictions",
            "leave out either",
        )
    job, settings = Path(options.target), [*options.settings]
    return explain(job, options.only, settings, json_only=options.json_only, html=options.html)


# --- the result ----------------------------------------------------------------------------------------


def _show(request: PlanRequest, result: PlanResult, options: PlanOptions, *, assumed: bool) -> None:
    from evenly.report.plans import document

    plans = [*result.plans, *result.fuller] or [one for one in (result.nearest,) if one is not None]
    if options.json_only:
        model, cluster = request.source.name, str(request.cluster)
        plans = plans[: len(plans) - len(result.fuller)]
        found = document(model, cluster, plans, fuller=result.fuller, assumed=assumed, change=result.change)
        print(json.dumps(found))
    elif plans:
        _print(request, plans, assumed=assumed)
    if options.html is not None and plans:
        _draw(options.html, request, plans, assumed=assumed)


def _devices(request: PlanRequest, plans: Sequence[Prediction]) -> str:
    """What the plans run on; not always all of the cluster."""
    used = plans[0].plan.devices
    whole = str(request.cluster)
    return whole if used in (None, request.cluster.size) else f"{used} device{'s' * (used != 1)} of {whole}"


def _print(request: PlanRequest, plans: Sequence[Prediction], *, assumed: bool) -> None:
    from evenly.cli.tables import print_table
    from evenly.report.plans import heads, plan_rows, reasons, title

    named = title(request.source.name, _devices(request, plans), plans, assumed=assumed)
    print_table(named, heads(plans), plan_rows(plans), width_of_files=WIDTH_OF_FILES, wrapping=("plan", "most of it"))
    width = get_terminal_size().columns if sys.stdout.isatty() else WIDTH_OF_FILES
    device, notes = request.cluster.device, [getattr(request.source, "note", "")]
    if plans[0].plan.precision.endswith("bfloat16") and {"float16", "bfloat16"} & {*device.flops} == {"float16"}:
        notes.append(f"a {device.name} has no bfloat16 and computes it as float32; precision=float16 is faster")
    for line in [*reasons(plans), *filter(None, notes)]:
        print(fill(line, width, subsequent_indent="     ", break_long_words=False, break_on_hyphens=False))


def _draw(path: Path, request: PlanRequest, plans: Sequence[Prediction], *, assumed: bool) -> None:
    from evenly.cli.pages import write_page
    from evenly.planner.around import grid_of
    from evenly.report.planpage import page, preview

    with redirect_stdout(sys.stderr), busy_line("looking at other numbers of devices and batches") as show:
        request = replace(request, watch=show)
        grid = grid_of(request, plans[0].plan.devices, source_of=_with_batch(request.source))
    timeline = preview(request, plans[0].plan)
    write_page(path, page(request.source.name, _devices(request, plans), grid, timeline, assumed=assumed))


def _with_batch(source: CostSource) -> Callable[[int], CostSource]:
    if not source.is_run:
        return lambda batch: source
    from evenly.planner.job_source import JobSource

    assert isinstance(source, JobSource)
    job = source.job
    return lambda batch: JobSource(replace(job, global_batch=batch))


def _refusal(request: PlanRequest, result: PlanResult) -> EvenlyError | None:
    """The error (exit code 1, as of a plan that differs in `evenly verify`) where no plan does; else None."""
    from evenly.report.comm import time_in_words
    from evenly.report.plans import shortage

    asked = f"plan {request.source.name} on {request.cluster}"
    if not result.plans:
        found = f"nothing fits; {shortage(result.nearest)}" if result.nearest else "no plan can run it"
        return EvenlyError(asked, found, result.change)
    best, limit_s = result.plans[0], request.step_s
    if limit_s is None or best.step_s <= limit_s:
        return None
    return EvenlyError(
        f"{asked} with steps of at most {time_in_words(limit_s)}",
        f"nothing is that fast; the fastest plan takes {time_in_words(best.step_s)} on {best.plan.devices} devices",
        f"allow --step-time {_at_least(best.step_s)}, take more or faster devices, or a smaller batch",
    )


def _at_least(seconds: float) -> str:
    """Rounds up to three digits."""
    digit = 10 ** (math.floor(math.log10(seconds)) - 2)
    return f"{math.ceil(seconds / digit) * digit:.3g}"
