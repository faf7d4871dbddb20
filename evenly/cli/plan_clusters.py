"""`evenly plan` with several clusters, or with prices: which of them is fastest, and which costs least."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from evenly.cli.plan_request import WIDTH_OF_FILES, PlanOptions, assumed_batch, is_job, plan_request, read_source
from evenly.errors import EvenlyError, UserError
from evenly.launcher.frozen import importing
from evenly.observe.progress import busy_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenly.planner.request import CostSource, PlanRequest
    from evenly.report.prices import Offer

MOST_OF_A_BATCH = 8  # times the batch that is assumed of one cluster
FEW = 8  # plans of each cluster on the page


def compare_clusters(options: PlanOptions) -> int:
    """Plans for each cluster; returns the exit code. Raises `EvenlyError` (exit code 1) where no cluster has a plan."""
    prices = _prices(options)
    with redirect_stdout(sys.stderr), busy_line(f"loading {options.target}") as show:
        with importing() if is_job(options) else nullcontext():
            source, batch = read_source(options)
            requests = _requests(options, source, batch)
        offers = [
            _offer(replace(request, watch=show), price, _steps(options, source, request))
            for request, price in zip(requests, prices, strict=True)
        ]
    _show(options, source.name, offers, requests[0].batch, assumed=batch is None)
    if not any(one.plans for one in offers):
        found = "; ".join(f"{one.cluster}: {one.refused}" for one in offers)
        asked = f"plan {source.name} on {', '.join(one.cluster for one in offers)}"
        raise EvenlyError(asked, found, "add devices, or take some with more memory")
    return 0


def _prices(options: PlanOptions) -> Sequence[float | None]:
    count = max(1, len(options.clusters))
    if bad := [price for price in options.prices if not 0 < price < math.inf]:
        raise UserError(f"--price {bad[0]:g}", "it is no price", "give what a device costs for an hour: --price 2.5")
    if len(options.prices) not in (0, 1, count):
        raise UserError(
            f"{len(options.prices)} times --price for {count} cluster{'s' * (count != 1)}",
            "each cluster has one price, in the order in which they are given",
            "give as many as there are clusters, or one for all",
        )
    return [*options.prices] * (count if len(options.prices) == 1 else 1) or [None] * count


def _requests(options: PlanOptions, source: CostSource, batch: int | None) -> list[PlanRequest]:
    alone = [replace(options, clusters=(one,)) for one in options.clusters] or [options]
    found = [plan_request(one, (source, batch))[0] for one in alone]
    if batch is not None:
        return found
    devices = math.lcm(*(request.cluster.size for request in found))
    common = assumed_batch(source.sequence, devices)
    if common > MOST_OF_A_BATCH * max(request.batch for request in found):
        raise UserError(
            f"{len(found)} clusters without --global-batch",
            f"what all their numbers of devices divide is a batch of {common:,} samples",
            "state the batch: --global-batch N",
        )
    return [replace(request, batch=common) for request in found]


def _steps(options: PlanOptions, source: CostSource, request: PlanRequest) -> float | None:
    """Steps of the whole run, where they follow from what is stated."""
    if options.tokens is None:
        return _steps_of_job(source) if source.is_run else None
    if source.sequence is None or not 0 < options.tokens < math.inf:
        what = "a job states its steps" if source.is_run else "its samples are no sequences"
        raise UserError(
            f"--tokens {options.tokens:g}",
            what if source.sequence is None else "no run has as many",
            "leave it out" if source.sequence is None else "give the tokens of the run: --tokens 1e12",
        )
    return math.ceil(options.tokens / (request.batch * source.sequence))


def _steps_of_job(source: CostSource) -> float:
    from evenly.planner.job_source import JobSource

    assert isinstance(source, JobSource)
    return float(source.job.steps)


def _offer(request: PlanRequest, price: float | None, steps: float | None) -> Offer:
    from evenly.planner.search import search
    from evenly.report.prices import Offer

    of = Offer(cluster=str(request.cluster), devices=request.cluster.size, price=price, steps=steps)
    try:
        found = search(replace(request, top=FEW))
    except UserError as problem:
        return replace(of, refused=problem.found)
    if not found.plans:
        return replace(of, refused=f"nothing fits: {found.change}")
    best, limit_s = found.plans[0], request.step_s
    if limit_s is not None and best.step_s > limit_s:
        return replace(of, refused=f"its steps take {best.step_s:.3g} s at least")
    return replace(of, plans=[*found.plans, *found.fuller])


def _show(options: PlanOptions, model: str, offers: Sequence[Offer], batch: int, *, assumed: bool) -> None:
    from evenly.report.prices import heads, offers_as_json, page, rows, title

    if options.json_only:
        print(json.dumps(offers_as_json(model, offers, batch, assumed=assumed)))
    else:
        from evenly.cli.tables import print_table

        named = title(model, offers, batch, assumed=assumed)
        print_table(named, heads(offers), rows(offers), width_of_files=WIDTH_OF_FILES, wrapping=("plan",))
    if options.html is not None:
        from evenly.cli.pages import write_page

        write_page(options.html, page(model, offers, batch, assumed=assumed))
