"""`evenly plan`: which plans fit, how fast they are, and why; without GPU and without starting processes."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING

from evenly.errors import EvenlyError, UserError
from evenly.jobfile import read_with
from evenly.launcher.frozen import importing
from evenly.observe.progress import busy_line
from evenly.plan import parse_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenly.hardware.cluster import Cluster
    from evenly.planner.prediction import Prediction
    from evenly.planner.request import CostSource, PlanRequest, PlanResult

WIDTH_OF_FILES = 100  # columns, where the output is read by no terminal
TOKENS_ASSUMED = 2**20  # of a step, where no batch is stated
LEAST_MEMORY = 2**20
SOON_S = 1.0  # after which a search says what it does


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is asked, as the command line has it; None for what is left open.

    target: a job file or a model. batch: samples. sequence: tokens of a sample. memory: of a device, as text.
    reserve: percent of it that plans are to leave free. step_s: seconds that a step may take. html: where pictures go.
    """

    target: str
    only: str = "auto"
    cluster: str | None = None
    batch: int | None = None
    sequence: int | None = None
    memory: str | None = None
    reserve: float | None = None
    max_devices: int | None = None
    step_s: float | None = None
    top: int | None = None
    html: Path | None = None
    settings: Sequence[str] = ()
    explain: bool = False
    json_only: bool = False


def plan(options: PlanOptions) -> int:
    """Plans; returns the exit code. Raises `EvenlyError` (exit code 1) where no plan does."""
    if options.explain:
        return _explain(options)
    is_job = _is_job(options)
    line = busy_line(f"loading {options.target}", after_s=0.0 if is_job else SOON_S)
    with redirect_stdout(sys.stderr), line as show:  # what a job prints is no part of the result
        from evenly.planner.search import search

        with importing() if is_job else nullcontext():
            request, assumed = _plan_request(options)
            request = replace(request, watch=show)
            request = _reading(request) if is_job else request
        result = search(request)
    _show(request, result, options, assumed=assumed)
    if (refusal := _refusal(request, result)) is not None:
        raise refusal
    return 0


def _reading(request: PlanRequest) -> PlanRequest:
    """A job's request, whose `watch` is shown how its model is read too."""
    from evenly.planner.auto import reading

    return reading(request)


def _explain(options: PlanOptions) -> int:
    from evenly.cli.explain import explain

    ignored = ("cluster", "batch", "sequence", "memory", "reserve", "max_devices", "step_s", "top", "html")
    if stated := [
        field.name for field in fields(PlanOptions) if field.name in ignored and getattr(options, field.name)
    ]:
        raise UserError(
            "evenly plan --explain",
            f"it tells what --only makes of a model; {', '.join(map(_option, stated))} is for predictions",
            "leave out either",
        )
    return explain(Path(options.target), options.only, [*options.settings], json_only=options.json_only)


def _option(name: str) -> str:
    named = {"batch": "global-batch", "step_s": "step-time"}
    return f"--{named.get(name, name.replace('_', '-'))}"


# --- the request --------------------------------------------------------------------------------------


def _plan_request(options: PlanOptions) -> tuple[PlanRequest, bool]:
    """What is asked of the search, and whether its batch is an assumption."""
    from evenly.planner.request import RESERVE, PlanRequest

    if options.step_s is not None and not 0 < options.step_s < math.inf:
        raise UserError(f"--step-time {options.step_s:g}", "no step takes so long", "give seconds: --step-time 2.5")
    only = read_with(Path(options.target), lambda: parse_plan(options.only))
    memory = None if options.memory is None else parse_memory(options.memory)
    cluster = _cluster(options)
    source, batch = _source(options)
    if only.ranks and only.ranks > cluster.size:
        raise UserError(
            f"--only {options.only!r} on {cluster}",
            f"such a plan takes {only.ranks} devices, and there are {cluster.size}",
            "name a larger --cluster, or smaller sizes",
        )
    devices = only.ranks or min(cluster.size, options.max_devices or cluster.size)
    request = PlanRequest(
        source=source,
        cluster=cluster,
        batch=batch or assumed_batch(source.sequence, devices),
        only=only,
        memory_bytes=memory,
        reserve=RESERVE if options.reserve is None else options.reserve / 100,
        max_devices=options.max_devices,
        step_s=options.step_s,
        top=options.top or 5,
    )
    return request, batch is None


def _is_job(options: PlanOptions) -> bool:
    return options.target.endswith(".py")


def _cluster(options: PlanOptions) -> Cluster:
    from evenly.hardware.cluster_text import parse_cluster

    if options.cluster is None and not _is_job(options):
        _source(options)  # an unknown model is reported first
        raise UserError(
            f"evenly plan {options.target} without --cluster",
            "the devices are not stated, and those of this machine are hardly meant",
            "add --cluster 8xH100, 4x8xA100-80 (nodes x devices x kind), local or FILE.toml",
        )
    return read_with(Path(options.target), lambda: parse_cluster(options.cluster or "local"))


def _source(options: PlanOptions) -> tuple[CostSource, int | None]:
    """What is planned for, and its global batch where that is stated."""
    return _job(options) if _is_job(options) else (_known(options), options.batch)


def _job(options: PlanOptions) -> tuple[CostSource, int]:
    """The job of a file, with its batch."""
    if stated := [name for name in ("batch", "sequence") if getattr(options, name)]:
        raise UserError(
            f"{' and '.join(map(_option, stated))} for the job {options.target}",
            "a job states its batch and has its data, and a run trains with these",
            "leave it out, or change the job (with --set, where job() takes it as a setting)",
        )
    from evenly.jobfile import load_job, parse_settings
    from evenly.planner.job_source import JobSource

    job = load_job(Path(options.target), parse_settings([*options.settings]))
    return JobSource(job), job.global_batch


def _known(options: PlanOptions) -> CostSource:
    from evenly.planner.known import find_shape
    from evenly.planner.shapes import ShapeSource

    asked = f"plan for {options.target}"
    if Path(f"{options.target}.py").is_file():
        raise UserError(asked, "it is no model, but a job file of that name is here", f"name {options.target}.py")
    shape = find_shape(options.target)
    if options.settings:
        raise UserError(
            f"{asked} --set {options.settings[0]}",
            "--set passes settings to job(), and this is a model",
            f"describe the model instead, for example {shape.name}:layers=4",
        )
    if parse_plan(options.only).tensor_exclude is not None:
        raise UserError(
            f"{asked} --only {options.only!r}",
            "tensor_exclude names parameters, and a model's shape has none",
            "leave it out",
        )
    if options.sequence is not None:
        shape = replace(shape, sequence=options.sequence)
        if problems := [*shape.problems()]:
            raise UserError(f"{asked} --sequence {options.sequence}", "; ".join(problems), "give fewer tokens")
    return ShapeSource(shape)


def assumed_batch(sequence: int | None, devices: int) -> int:
    """Samples of about a million tokens, as many for every device; 1024 samples where these are no sequences.

    Large models are trained with that (GPT-3 with 0.5 to 3.2 million tokens: Brown et al. 2020, table 2.1).
    """
    samples = max(1, TOKENS_ASSUMED // (sequence or 1024))
    return devices * max(1, -(-samples // devices))


def parse_memory(text: str) -> float:
    """'80GB', '40GiB', '40G' or a number of bytes -> bytes; GB is 10^9, GiB and G are 2^30. Raises `UserError`."""
    from evenly.hardware.variants import size_bytes

    size = size_bytes(text)
    if size is None:
        raise UserError(f"--memory {text!r}", "it is no size", "give bytes, or a number with a unit: 80GB, 40GiB")
    if size < LEAST_MEMORY:
        raise UserError(f"--memory {text!r}", f"{size:.0f} bytes hold no model", f"add a unit: {text.strip()}GiB")
    return size


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
    for line in reasons(plans):
        print(fill(line, width, subsequent_indent="     ", break_long_words=False, break_on_hyphens=False))


def _draw(path: Path, request: PlanRequest, plans: Sequence[Prediction], *, assumed: bool) -> None:
    from evenly.report.planpage import page, preview

    timeline = preview(request, plans[0].plan)
    text = page(request.source.name, _devices(request, plans), plans, timeline, assumed=assumed)
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as problem:
        raise UserError(f"write {path}", str(problem), "name a file that can be written") from None
    print(f"pictures in {path}", file=sys.stderr)


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
