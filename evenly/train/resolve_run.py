"""Decides the plan and the microbatch of a run, before anything is built.

Rank 0 decides, since only one rank may read files and search among plans; the others receive its decision.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.manifest import Unsound
from evenly.checkpoint.plain import decode
from evenly.comm.collectives import decided_by_first
from evenly.comm.connect import connect, disconnect, join, lay_out
from evenly.comm.world import World
from evenly.data.alone import looking
from evenly.data.loader import idle_ranks
from evenly.engine.assemble import roots_of
from evenly.errors import PlanError, UserError
from evenly.job import Job
from evenly.launcher.allocator import hand_back_freed_memory
from evenly.launcher.environment import ProcessInfo
from evenly.observe.attempts import note_start
from evenly.observe.run_folder import RunFolder
from evenly.parallel.core.places import all_restored
from evenly.plan import Exact, Plan, PlanSpec, parse_plan, with_microbatch
from evenly.train.options import RunOptions


@dataclass(frozen=True)
class ResolvedRun:
    """How a job is run; the same on all ranks.

    plan:       fitted and resolved.
    microbatch: samples per forward; None for the job's own.
    predicted:  the planner's prediction, as in `plan.json` and `evenly report`; None unless the plan was searched.
    out:        the run's folder; None without one.
    """

    plan: Plan
    microbatch: int | Literal["auto"] | None = None
    predicted: Mapping[str, Any] | None = None
    out: Path | None = None

    def apply_to(self, job: Job) -> Job:
        """`job` with its microbatch."""
        return job if self.microbatch is None else replace(job, microbatch=self.microbatch)


@dataclass(frozen=True)
class PreviousRun:
    """Defaults that a resumed run takes from the one before; all None for a new run.

    microbatch: samples per forward. exact: how gradients are summed over ranks.
    """

    microbatch: int | None = None
    exact: Exact | None = None


def connect_and_resolve(job: Job, options: RunOptions, place: ProcessInfo) -> tuple[ResolvedRun, World]:
    """Connects the ranks of `place`, and decides; an error of rank 0 is raised on all."""
    if place.size == 1:
        decision = _decide_and_note(job, options, place)
        return decision, connect(place, axes=decision.plan.axes, even_alone=decision.plan.data.zero_stage > 0)
    world = join(place)
    try:
        decision = decided_by_first(lambda: _decide_and_note(job, options, place), world.group("files"))
    except UserError:  # the ranks may go on to something else
        disconnect(world)
        raise
    return decision, lay_out(world, decision.plan.axes)


def _decide_and_note(job: Job, options: RunOptions, place: ProcessInfo) -> ResolvedRun:
    """As `decide`; the run's folder then says under which plan it was started, whatever comes of it."""
    decision = decide(job, options, place)
    if options.out is not None:
        new = not options.resume and not options.no_room
        note_start(RunFolder(options.out), str(decision.plan), new=new)
    return replace(decision, out=options.out)


def decide(job: Job, options: RunOptions, place: ProcessInfo) -> ResolvedRun:
    """How `job` runs on the ranks of `place`; called on one rank, before a model is built anywhere."""
    recorded = recorded_in(options.out, options.save_to) if options.resume and options.out else PreviousRun()
    roots = [("model", job.model), ("optimizer", job.optimizer), *roots_of(job)]
    runs = options.search or options.no_room
    with looking(), all_restored(roots if runs else []):  # what the planner runs is no training
        return _decide(job, options, place, recorded)


def _decide(job: Job, options: RunOptions, place: ProcessInfo, recorded: PreviousRun) -> ResolvedRun:
    if options.no_room:
        return _decide_on_less(job, options, place, recorded)
    plan = options.plan or PlanSpec(zero=None if options.search else 0)  # the default: all ranks share each batch
    plan = replace(plan, exact=plan.exact or recorded.exact)
    if options.search:
        from evenly.planner.auto import as_recorded, choose_plan  # takes half as long to import as all else of a run
        from evenly.planner.microbatch import with_known_microbatch

        asked = job if recorded.microbatch is None else with_microbatch(job, PlanSpec(), recorded=recorded.microbatch)
        asked, why = with_known_microbatch(asked, plan)
        why = why if recorded.microbatch is None else f"microbatch={recorded.microbatch}, as the run had it"
        found = choose_plan(asked, plan, place, options.cluster)
        if not options.quiet:
            print(f"evenly: plan {found.plan}; {why}", file=sys.stderr, flush=True)
        microbatch = with_microbatch(job, found.plan, recorded=recorded.microbatch).microbatch
        return ResolvedRun(found.plan, microbatch, as_recorded(found))
    plan = fit_here(plan, place, options.devices).complete(job.precision)
    asked = with_microbatch(job, plan, recorded=recorded.microbatch)
    if asked.microbatch is None and idle_ranks(asked, plan.data.size):
        from evenly.planner.microbatch import with_known_microbatch

        if with_known_microbatch(asked, PlanSpec(exact=plan.exact))[0].microbatch is None:
            plan = replace(plan, microbatch=(finer := -(-job.global_batch // plan.data.size)))  # which restarts keep
            if not options.quiet:
                text = f"microbatch={finer}, so that each of {plan.data.size} ranks has one: no number depends on it"
                print(f"evenly: {text}", file=sys.stderr, flush=True)
            return ResolvedRun(plan, finer)
    return ResolvedRun(plan, asked.microbatch)


def _decide_on_less(job: Job, options: RunOptions, place: ProcessInfo, recorded: PreviousRun) -> ResolvedRun:
    """A plan that needs less memory than those that had no room; microbatches stay. Says so."""
    from evenly.planner.auto import as_recorded, cluster_of  # takes half as long to import as all else of a run
    from evenly.planner.leaner import leaner_plan

    hand_back_freed_memory()  # what the planner needs is not to be kept in this rank
    failed, refused = ([parse_plan(text) for text in texts] for texts in (options.no_room, options.refused))
    asked = with_microbatch(job, failed[0], recorded=recorded.microbatch)
    spec, found = leaner_plan(asked, failed, refused, cluster_of(place, options.cluster), step=options.long_step)
    plan = spec.complete(job.precision)
    predicted = "" if found is None else f", predicted to take {found.peak_bytes / 2**20:,.0f} MiB"
    print(f"evenly: going on under {plan}{predicted}", file=sys.stderr, flush=True)
    microbatch = with_microbatch(job, plan, recorded=recorded.microbatch).microbatch
    return ResolvedRun(plan, microbatch, None if found is None else as_recorded(found))


def recorded_in(out: Path, second: Path | None = None) -> PreviousRun:
    """The defaults from the newest checkpoint in the two folders that can be read; none where there is none.

    Raises `PlanError` for a plan that this version does not know.
    """
    folders = [CheckpointFolder(folder) for folder in (out, second) if folder is not None]
    try:
        manifests = filter(None, (folder.newest_readable() for folder in folders))
        manifest = max(manifests, key=lambda one: one.step, default=None)
        values = {} if manifest is None else decode(manifest.values)
        return PreviousRun(values["rules"]["microbatch"], parse_plan(values["plan"]).exact)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, Unsound):
        return PreviousRun()


def fit_here(plan: PlanSpec, place: ProcessInfo, devices: int | None = None) -> PlanSpec:
    """`plan` fitted to the ranks of `place`; where it has replicas, to the `devices` of this one process."""
    if plan.replicas is None:
        return plan.fit(place.size)
    if place.size > 1:
        raise PlanError(
            f"plan {plan} in {place.size} ranks",
            "replicas share one process",
            "start one process, or use evenly run, or the plan ddp",
        )
    return plan.fit(devices or plan.devices or torch.cuda.device_count() or 1)
