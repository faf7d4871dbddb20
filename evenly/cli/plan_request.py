"""What `evenly plan` is asked: its options, and the request that they are for the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenly.errors import UserError
from evenly.jobfile import read_with
from evenly.plan import parse_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evenly.hardware.cluster import Cluster
    from evenly.planner.request import CostSource, PlanRequest

WIDTH_OF_FILES = 100  # columns, where the output is read by no terminal
TOKENS_ASSUMED = 2**20  # of a step, where no batch is stated
LEAST_MEMORY = 2**20


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What is asked, as the command line has it; None for what is left open.

    target: a job file or a model. batch: samples. sequence: tokens of a sample. memory: of a device, as text.
    reserve: percent of it that plans are to leave free. step_s: seconds that a step may take. html: where pictures go.
    clusters: as text. prices: of a device for an hour, of each cluster or of all. tokens: of the whole run.
    """

    target: str
    only: str = "auto"
    clusters: Sequence[str] = ()
    prices: Sequence[float] = ()
    tokens: float | None = None
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


def option_name(name: str) -> str:
    named = {"batch": "global-batch", "step_s": "step-time", "clusters": "cluster", "prices": "price"}
    return f"--{named.get(name, name.replace('_', '-'))}"


def plan_request(options: PlanOptions, read: tuple[CostSource, int | None] | None = None) -> tuple[PlanRequest, bool]:
    """What is asked of the search, and whether its batch is an assumption. read: as `read_source` has returned it."""
    from evenly.planner.request import RESERVE, PlanRequest

    if options.step_s is not None and not 0 < options.step_s < math.inf:
        raise UserError(f"--step-time {options.step_s:g}", "no step takes so long", "give seconds: --step-time 2.5")
    only = read_with(Path(options.target), lambda: parse_plan(options.only))
    memory = None if options.memory is None else parse_memory(options.memory)
    cluster = _cluster(options)
    source, batch = read or read_source(options)
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


def is_job(options: PlanOptions) -> bool:
    return options.target.endswith(".py")


def _cluster(options: PlanOptions) -> Cluster:
    from evenly.hardware.cluster_text import parse_cluster

    if not options.clusters and not is_job(options):
        read_source(options)  # an unknown model is reported first
        raise UserError(
            f"evenly plan {options.target} without --cluster",
            "the devices are not stated, and those of this machine are hardly meant",
            "add --cluster 8xH100, 4x8xA100-80 (nodes x devices x kind), local or FILE.toml",
        )
    return read_with(Path(options.target), lambda: parse_cluster(*options.clusters or ("local",)))


def read_source(options: PlanOptions) -> tuple[CostSource, int | None]:
    return _job(options) if is_job(options) else (_known(options), options.batch)


def _job(options: PlanOptions) -> tuple[CostSource, int]:
    if stated := [name for name in ("batch", "sequence") if getattr(options, name)]:
        raise UserError(
            f"{' and '.join(map(option_name, stated))} for the job {options.target}",
            "a job states its batch and has its data, and a run trains with these",
            "leave it out, or change the job (with --set, where job() takes it as a setting)",
        )
    from evenly.jobfile import load_job, parse_settings
    from evenly.planner.job_source import JobSource
    from evenly.planner.microbatch import with_known_microbatch

    job = load_job(Path(options.target), parse_settings([*options.settings]))
    job, note = with_known_microbatch(job, parse_plan(options.only))
    return JobSource(job, note=note), job.global_batch


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
