"""One case under one plan on this rank: equal to the plain loop, or refused before the first update."""

from __future__ import annotations

import os
from typing import Any

import torch
from cases import WIDTH, Net, Points, adamw, by_chance, case, job
from plain import plain_steps
from torch import nn

import evenly
from evenly.data.loader import microbatches_of_step
from evenly.errors import EvenlyError, UserError

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
        # The other stage waits for this one, where one alone has what is refused.
        if "pipeline" in plan and (name == "retyped" or not isinstance(problem, UserError)):
            raise AssertionError(f"REFUSED: {problem}") from None
        leave()
        return "refused", str(problem)
    try:
        for batch in run.batches():
            run.step(batch)
            if mine.after is not None:
                mine.after(run.model)
            if mine.loop is not None:
                mine.loop(run.model, run.optimizer)
            for key, full in full_state(run).items():
                worst = max(worst, float((full - expected[steps][key]).abs().max()))
            steps += 1
    except EvenlyError as problem:  # raised, since other ranks may be waiting for this one
        raise AssertionError(f"{'REFUSED' if steps == 0 else 'LATE'}: {problem}") from None
    run.close()
    leave()
    return ("equal" if worst < tolerance else "different"), f"{worst:.2e} after {steps} steps"


def full_state(run: evenly.Run) -> dict[str, torch.Tensor]:
    """Of the parameters and buffers that this rank has."""
    pipeline = run.composed.pipeline
    return {
        name: run.composed.full_view(name, tensor.detach())
        for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers())
        if pipeline is None or name not in pipeline.placeholders
    }


def leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def outcomes(names: list[str], plan: str) -> dict[str, tuple[str, str]]:
    return {name: outcome(name, plan) for name in names}


class Reordered(Net):
    """Parameters in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self._modules["head"] = self._modules.pop("head")
        self._modules["enter"] = self._modules.pop("enter")


def disagreeing(name: str, rank: int) -> evenly.Job:
    """The job of a rank, of which that of rank 1 is another."""
    if rank == 0:
        return job()
    changes: dict[str, Any] = {
        "length": {"data": Points(15)},
        "clip_norm": {"clip_norm": 1.0},
        "shuffle": {"shuffle": False},
        "global_batch": {"global_batch": 6},
        "schedule": {"schedule": by_chance},
        "optimizer": {"optimizer": adamw},
        "lr": {"optimizer": lambda ps: torch.optim.SGD(ps, lr=0.06, momentum=0.9)},
        "samples": {"data": Shifted()},
        "order": {"model": Reordered},
    }
    return job(**changes[name])


class Shifted(Points):
    def __init__(self) -> None:
        super().__init__()
        self.x = self.x + 1e-6


def steps_of_ranks(names: list[str]) -> dict[str, str]:
    """What starting a job ends in, of which rank 1 has another."""
    found: dict[str, str] = {}
    for name in names:
        try:
            evenly.start(disagreeing(name, int(os.environ["RANK"])), plan="ddp").close()
            found[name] = "nothing"
        except EvenlyError as problem:
            found[name] = str(problem)
        leave()
    return found


class ByMicrobatch(Net):
    """The first microbatch of step 1 calls one block more than the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.blocks if abs(float(x[0, 0]) - FIRST[0]) < 1e-6 else self.blocks[1:]
        x = self.enter(x)
        for block in used:
            x = block(x)
        return self.head(x)


FIRST = [0.0]


def chosen_by_microbatch(plan: str) -> str:
    """What starting a job ends in whose first microbatch calls a block that its last does not."""
    mine = job(ByMicrobatch)
    FIRST[0] = float(mine.data[microbatches_of_step(mine, 0)[0][0]][0][0])
    try:
        evenly.start(mine, plan=plan).close()
        return "nothing"
    except EvenlyError as problem:
        return str(problem)
    finally:
        leave()
