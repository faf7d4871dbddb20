"""The jobs on which pipelines are tried: each trains, weighs its microbatches unevenly and has its eight blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from jobs_pipeline import LAYERS, MARKER, PIPELINE_JOBS
from torch import nn

import evenly
from evenly.data.loader import microbatches_of_step
from evenly.model.blocks import find_blocks
from evenly.verify.reference import reference_steps

BLOCKS = {"shared": 1, "alternating": 2, "towers": 9, "lstm": 3, "gru": 3}  # of the others, LAYERS
BLOCKS |= dict.fromkeys(("lstm_layers", "gru_layers", "packed"), LAYERS // 2)


@pytest.mark.parametrize("name", PIPELINE_JOBS)
def test_trains_on_one_device(name: str) -> None:
    job = PIPELINE_JOBS[name](precision="float64")
    first, second = reference_steps(job, 2)
    losses = [first.loss, second.loss, first.eval_loss or 0.0, second.eval_loss or 0.0]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert job.clip_norm is not None and first.grad_norm > job.clip_norm
    still = {key for key, before in first.tensors.items() if torch.equal(before, second.tensors[key])}
    # Blocks and parameters of "branches" that never change; experts that no token of the second step went to.
    may = {"branches": ("never", "blocks.5."), "experts": (".experts.", ".level")}.get(name, ())
    assert all(any(part in key for part in may) for key in still)


@pytest.mark.parametrize("name", PIPELINE_JOBS)
def test_has_its_blocks_and_dropout(name: str) -> None:
    torch.manual_seed(0)
    job = PIPELINE_JOBS[name]()
    model = job.model()
    assert len(find_blocks(model)) == BLOCKS.get(name, LAYERS)
    batch = _batches(job, step=0)[0]
    losses = [float(_loss(job, model, batch).total.detach()) for _ in range(2)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", PIPELINE_JOBS)
def test_microbatches_of_a_step_weigh_unevenly(name: str) -> None:
    job = PIPELINE_JOBS[name]()
    model = job.model()
    assert len({float(_loss(job, model, batch).weight) for batch in _batches(job, step=0)}) > 1


def test_steps_of_the_ragged_job_have_several_shapes_and_numbers_of_microbatches() -> None:
    job = PIPELINE_JOBS["ragged"]()
    steps = [_batches(job, step) for step in range(job.steps)]
    assert len({len(batches) for batches in steps}) > 1
    assert all(len({batch["inputs"].shape for batch in batches}) > 2 for batches in steps)


def test_only_some_microbatches_have_a_marker() -> None:
    job = PIPELINE_JOBS["branches"]()
    marked = [bool((batch["inputs"] == MARKER).any()) for step in range(2) for batch in _batches(job, step)]
    assert {*marked} == {True, False}


def _batches(job: evenly.Job, step: int) -> list[Any]:
    collate: Any = job.collate or torch.utils.data.default_collate
    return [collate([job.data[i] for i in indices]) for indices in microbatches_of_step(job, step)]


def _loss(job: evenly.Job, model: nn.Module, batch: Any) -> evenly.Loss:
    loss = job.loss(model, batch)
    assert isinstance(loss, evenly.Loss)
    return loss
