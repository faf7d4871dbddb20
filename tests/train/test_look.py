"""What the look before the first step makes of what it finds."""

from __future__ import annotations

import math
from typing import Any

import torch
from jobs import Points, classifier_job
from torch import nn

import evenly
from evenly.plan import parse_plan
from evenly.train.look import buffers_restored, differing_field, digest, facts, shapes_vary
from evenly.train.same_numbers import same


def test_the_first_field_that_differs_is_named_with_its_rank() -> None:
    mine, other = facts(classifier_job()), facts(classifier_job(clip_norm=0.5))
    assert differing_field([mine, dict(mine), mine]) is None
    problem = differing_field([mine, mine, other])
    assert problem is not None and problem.found == "clip_norm on rank 2 differs from rank 0's"


def test_a_cost_that_is_another_when_called_again_is_found_on_any_rank() -> None:
    calls: list[int] = []

    def cost(index: int) -> float:
        calls.append(index)
        return float(len(calls) % 7)

    steady, found = facts(classifier_job(cost=float)), facts(classifier_job(cost=cost))
    problem = differing_field([steady, found])
    assert differing_field([steady]) is None
    assert problem is not None and problem.asked.startswith("the job's cost")


def test_shapes_vary_where_a_cost_or_microbatches_say_so() -> None:
    two, alone = (parse_plan("ddp").fit(devices).complete("float32") for devices in (2, 1))
    lengths = [torch.zeros(1 + index % 2) for index in range(37)]
    ragged = classifier_job(data=lengths, collate=lambda samples: samples[0], microbatch=1)
    assert not shapes_vary(classifier_job(), two)
    assert shapes_vary(classifier_job(cost=float), two) and shapes_vary(classifier_job(cost=float), alone)
    assert shapes_vary(ragged, two)


def test_one_device_reads_each_sample_once_in_the_order_of_its_steps() -> None:
    """A dataset may draw from a generator of its own."""
    read: list[int] = []

    class Data(Points):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    with evenly.start(classifier_job(data=Data(37), eval_data=None, steps=2), plan="single") as run:
        expected = [index for batch in run.batches() for _ in [run.step(batch)] for index in indices_of(batch)]
    assert read == expected


def indices_of(batch: Any) -> list[int]:
    return [index for one in batch.share.microbatches for index in one]


def test_losses_are_compared_by_their_bits_or_up_to_the_rounding_of_a_gpu() -> None:
    assert same(1.0, 1.0, exact=True) and same(math.nan, math.nan, exact=True)
    assert not same(1.0, 1.0 + 1e-15, exact=True) and same(1.0, 1.0 + 1e-6, exact=False)
    assert not same(1.0, 1.001, exact=False) and not same(1.0, math.nan, exact=False)


def test_a_digest_sees_shapes_types_order_and_single_elements() -> None:
    nest: Any = {"x": torch.arange(6.0), "y": [torch.zeros(2)]}
    others = [
        {"x": torch.arange(6.0).view(2, 3), "y": [torch.zeros(2)]},
        {"x": torch.arange(6.0).double(), "y": [torch.zeros(2)]},
        {"x": torch.arange(6.0).flip(0), "y": [torch.zeros(2)]},
        {"x": torch.arange(6.0), "y": [torch.tensor([0.0, 1e-30])]},
    ]
    assert all(digest(other) != digest(nest) for other in others)
    assert digest({"x": torch.arange(6.0), "y": [torch.zeros(2)]}) == digest(nest)


def test_buffers_are_as_before() -> None:
    model = nn.BatchNorm1d(2)
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with buffers_restored([model]):
        model(torch.randn(4, 2))
        model.running_var = torch.zeros(2)
    for name, (buffer, value) in before.items():
        assert getattr(model, name) is buffer and buffer.equal(value)
