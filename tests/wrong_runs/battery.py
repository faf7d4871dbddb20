"""One case under one plan on this rank: equal to the plain loop, or refused before the first update."""

from __future__ import annotations

import torch
from cases import case
from plain import plain_steps

import evenly
from evenly.errors import EvenlyError

STEPS = 3


def outcome(name: str, plan: str) -> tuple[str, str]:
    """(equal | refused | late | error | different, why)."""
    expected = plain_steps(case(name), STEPS)
    mine = case(name)
    tolerance = 1e-9 if mine.job.precision == "float64" else 1e-5
    steps, worst = 0, 0.0
    try:
        run = evenly.start(mine.job, plan=plan)
    except EvenlyError as problem:
        leave()
        return "refused", str(problem)
    try:
        for batch in run.batches():
            run.step(batch)
            if mine.after is not None:
                mine.after(run.model)
            for key, full in full_parameters(run).items():
                worst = max(worst, float((full - expected[steps][key]).abs().max()))
            steps += 1
    except EvenlyError as problem:  # raised, since other ranks may be waiting for this one
        raise AssertionError(f"{'REFUSED' if steps == 0 else 'LATE'}: {problem}") from None
    run.close()
    leave()
    return ("equal" if worst < tolerance else "different"), f"{worst:.2e} after {steps} steps"


def full_parameters(run: evenly.Run) -> dict[str, torch.Tensor]:
    """Of the parameters that this rank has."""
    pipeline = run.composed.pipeline
    return {
        name: run.composed.full_view(name, tensor.detach())
        for name, tensor in run.model.named_parameters()
        if pipeline is None or name not in pipeline.placeholders
    }


def leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def outcomes(names: list[str], plan: str) -> dict[str, tuple[str, str]]:
    return {name: outcome(name, plan) for name in names}
