"""The plan of a run that leaves it open: the search's best for the job, on the devices at hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from evenly.errors import PlanError, UserError
from evenly.hardware.cluster import Cluster
from evenly.hardware.cluster_file import read_cluster
from evenly.hardware.cluster_text import kind_here, local_cluster
from evenly.job import Job
from evenly.launcher.environment import ProcessInfo
from evenly.observe.progress import busy_line
from evenly.plan import Plan, PlanSpec
from evenly.planner.job_source import JobSource
from evenly.planner.prediction import CAUSES_OF_MEMORY, CAUSES_OF_TIME, Prediction
from evenly.planner.request import PlanRequest
from evenly.planner.search import search


def cluster_of(place: ProcessInfo, file: Path | None = None) -> Cluster:
    """The devices of a run's ranks, all nodes like this one; as measured where there is a `file`.

    Raises `UserError` for a file of other devices, or of fewer nodes: a run may do with fewer than were measured.
    """
    if file is not None:
        return _measured(file, place)
    here = local_cluster(place.local_size)
    return Cluster(place.nodes, here.devices, here.kind, own=here.own)


def _measured(file: Path, place: ProcessInfo) -> Cluster:
    found, here = read_cluster(file), kind_here()
    if (found.kind, found.devices) != (here, place.local_size) or found.nodes < place.nodes:
        raise UserError(
            f"plan by {file}",
            f"it is of {found.nodes} x {found.devices} x {found.kind}, and these are "
            f"{place.nodes} x {place.local_size} x {here}",
            "measure these, by `evenly bench device --save` and `evenly bench comm --save`",
        )
    return replace(found, nodes=place.nodes)


def reading(request: PlanRequest) -> PlanRequest:
    """A job's request, whose `watch` is shown too how its model is run on fake tensors."""
    source, show, runs = request.source, request.watch, count(1)
    assert isinstance(source, JobSource) and show is not None
    show(f"reading {source.name}")

    def watch(plan: Plan) -> None:
        show(f"reading {source.name} on fake tensors, run {next(runs)}: as {plan}")

    return replace(request, source=replace(source, watch=watch))


def choose_plan(job: Job, only: PlanSpec, place: ProcessInfo, cluster: Path | None = None) -> Prediction:
    """The best plan for `job` on all ranks of `place` that states what `only` does; `job` has its microbatch.

    cluster: a file of what was measured. Raises `PlanError` where none fits into the devices' memory, with the smallest
    change with which one would.
    """
    request = PlanRequest(
        source=JobSource(job),
        cluster=cluster_of(place, cluster),
        batch=job.global_batch,
        only=only,
        max_devices=place.size,
        takes_all=True,
    )
    with busy_line(f"reading {request.source.name}") as show:
        result = search(reading(replace(request, watch=show)))
    if not result.plans:
        assert result.nearest is not None  # a plan was looked at
        raise PlanError(
            f"--plan auto for {request.source.name} on {request.cluster}",
            f"no plan fits: the smallest, {result.nearest.plan}, takes {result.nearest.peak_bytes / 2**30:.2f} GiB of "
            f"{result.nearest.limit_bytes / 2**30:.2f}",
            result.change,
        )
    return result.plans[0]


def as_recorded(found: Prediction) -> dict[str, Any]:
    memory = [
        {cause: getattr(rank, cause) for cause in CAUSES_OF_MEMORY} | {"peak": rank.peak} for rank in found.memory
    ]
    return {
        "step_s": found.step_s,
        "samples_per_s": found.samples_per_s,
        "memory_bytes": memory,
        "time_s": {cause: getattr(found.time, cause) for cause in CAUSES_OF_TIME},
        "why": found.why,
    }
