"""Whether a job's loss is a sum over samples, so that how they are put into microbatches does not change it."""

from __future__ import annotations

from evenly.data.generators import seeded
from evenly.data.stream import stream_key
from evenly.job import Job
from evenly.verify.reference import build_model
from evenly.verify.reference_data import batches, collated
from evenly.verify.reference_forward import run_forward


def loss_not_additive(job: Job) -> str:
    """A warning if the job's loss, or that of one of its phases, is not a sum over samples, else ''.

    Without dropout, total and weight of the first microbatch must be the sums of those of its two halves; of a loss
    that draws random numbers nothing is said. Raises what the job raises.
    """
    notes = [_not_additive(one, f" of phase {name}" * bool(name)) for name, one in job.by_phase.items()]
    return next(filter(None, notes), "")


def _not_additive(job: Job, of_phase: str) -> str:
    microbatch = next(batches(job))[0]
    with seeded(key := stream_key(job.seed, "data", 0, 0)):
        samples = microbatch()
    if len(samples) < 2:
        return ""
    model = build_model(job).eval()
    found: list[tuple[float, float]] = []
    parts = (samples, samples[: len(samples) // 2], samples[len(samples) // 2 :], samples)
    for number, part in enumerate(parts):
        with seeded(key):
            batch = collated(job, part)
        loss = run_forward(job, model, batch, stream_key(job.seed, "microbatch", 0, number // 3), len(part))
        found.append((float(loss.total.detach().double()), float(loss.added_weight)))
    if found[0] != found.pop():  # other random numbers, another loss
        return ""
    tolerance = 1e-6 if job.precision == "float64" else 1e-3
    for what, whole, *halves in zip(("total", "weight"), *found, strict=True):
        if abs(whole - sum(halves)) > tolerance * max(abs(whole), *map(abs, halves)):
            both = " + ".join(f"{half:.4g}" for half in halves)
            return (
                f"the loss{of_phase} of {len(samples)} samples has the {what} {whole:.4g}, that of its halves {both}: "
                "is it a mean where a sum is wanted, or does a sample's loss depend on the others?"
            )
    return ""
