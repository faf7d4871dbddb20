"""Whether plans may choose the microbatch of a job: only where a run shows that no number depends on it.

The first batch is cut in several ways, and each is run in float64: state and what code keeps must stay as they are, no
generator may be drawn from, and totals, weights, metrics and gradients must add up to the same numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from evenly.data.generators import drawn_past_torch, last_seed, seed, undisturbed, undisturbed_past_torch
from evenly.data.loader import Loader, holding_first, share_of_step
from evenly.data.nest import tensors_in
from evenly.engine.assemble import roots_of
from evenly.engine.build import build_model
from evenly.engine.precision import place_batch
from evenly.engine.step_totals import as_loss
from evenly.job import Job
from evenly.parallel.core.places import all_restored, places
from evenly.plan import PlanSpec
from evenly.planner.job_profile import JobProfiler

TOLERANCE = 1e-9  # relative, in float64
MOST_WORK = 2**33  # parameters x numbers in the batch: some seconds


def with_known_microbatch(job: Job, only: PlanSpec) -> tuple[Job, str]:
    """Return `job` with its own microbatch, or with none where plans that state `only` may choose one; and why."""
    if job.microbatch_cost or (job.microbatch and job.microbatch != "auto"):
        return job, "the job states its microbatches"
    job, is_asked = replace(job, microbatch=None), job.microbatch == "auto"
    if only.microbatch:
        return job, "the plan states its microbatch"
    if is_asked:
        return job, 'the job leaves its microbatch to the plan (microbatch="auto"), and its numbers follow it'
    if only.exact != "bitwise" and _is_independent(job):
        return job, "the plan chooses the microbatch, which none of the job's numbers depends on"
    size = job.samples_per_microbatch
    return replace(job, microbatch=size), (
        f"microbatch={size}, an eighth of the batch, as the job states none and its numbers may depend on it "
        '(microbatch="auto" leaves it to the plan)'
    )


def _is_independent(job: Job) -> bool:
    """Return whether a run shows that numbers do not depend on the microbatch; one that fails shows nothing."""
    job = holding_first(job)
    roots = [*roots_of(job), ("data", job.data), ("collate", job.collate)]
    try:
        with undisturbed(), undisturbed_past_torch(), all_restored(roots):
            profiler = JobProfiler(job)
            numbers = sum(tensor.numel() for one in profiler.microbatches for tensor in tensors_in(one.batch))
            if numbers * sum(p.numel() for p in profiler.model("float64").parameters()) > MOST_WORK:
                return False
            model = build_model(job, precision="float64", device=None)
            sizes = (job.global_batch, None, 1, job.global_batch)  # the first again: what code keeps may show
            first, *others = [_numbers_of(replace(job, microbatch=size), model, roots) for size in sizes]
    except Exception:  # whatever the job's code raises; a run meets it again
        return False
    return all(_agree(first, found) for found in others)


def _numbers_of(job: Job, model: nn.Module, roots: list[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the sums over the first batch, by name. Raises `ValueError` for code that draws, or keeps anything."""
    roots = [("model", model), *roots]
    state, kept = {name: one.clone() for name, one in model.state_dict().items()}, places(roots)
    sums: dict[str, torch.Tensor] = {}
    model.zero_grad()
    for microbatch in Loader(job).read(iter([share_of_step(job, 0, rank=0, ranks=1)])):
        _refuse_drawn()  # by reading
        for phase, one in job.by_phase.items():
            seed(microbatch.number)
            batch = place_batch(microbatch.copied().batch, "float64", "cpu")
            loss = as_loss(one.loss(model, batch), microbatch.samples)
            loss.total.backward()
            _refuse_drawn()
            for name, pair in {"": (loss.total, loss.added_weight), **loss.metrics}.items():
                value = torch.stack([torch.as_tensor(number).detach().double() for number in pair])
                sums[f"{phase}/{name}"] = sums.get(f"{phase}/{name}", torch.zeros(2)) + value
    unlike = any(not torch.equal(state[name], one) for name, one in model.state_dict().items())
    if unlike or any(place.differs(kept.get(name)) for name, place in places(roots).items()):
        raise ValueError("the job keeps something")
    return sums | {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _refuse_drawn() -> None:
    """Raise `ValueError` where a generator has been drawn from since it was seeded."""
    fresh = torch.Generator().manual_seed(last_seed())
    if drawn_past_torch() or not torch.equal(fresh.get_state(), torch.default_generator.get_state()):
        raise ValueError("the job draws")


def _agree(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether they are the same up to the rounding of sums."""
    if one.keys() != other.keys():
        return False
    norm = max((float(tensor.norm()) for name, tensor in one.items() if name.startswith("gradient")), default=0.0)
    scales = {name: norm if name.startswith("gradient") else float(tensor.norm()) for name, tensor in one.items()}
    return all(float((one[name] - other[name]).norm()) <= TOLERANCE * scales[name] for name in one)
