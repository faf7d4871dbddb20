"""Where a pipeline is cut: by cost, within a device's memory, or where the plan says."""

from __future__ import annotations

from typing import Any

import pytest

from evenly.engine.find_stages import counts_of
from evenly.errors import PlanError
from evenly.parallel.pipeline.stages import CallCost
from evenly.plan import parse_plan

MIB = 1 << 20


def call_costs(flops: list[float], weights: list[int] | None = None, kept: list[int] | None = None) -> list[CallCost]:
    weights, kept = weights or [0] * len(flops), kept or [0] * len(flops)
    return [
        CallCost((f"blocks.{n}", 0), frozenset(), cost, 0.0, weight, keep)
        for n, (cost, weight, keep) in enumerate(zip(flops, weights, kept, strict=True))
    ]


def counts(found: list[CallCost], plan: str, *, limit_bytes: int | None = None, microbatches: int = 8) -> Any:
    fitted = parse_plan(plan).fit(parse_plan(plan).devices or 4).complete("float32")
    return counts_of(found, fitted, device="cpu", microbatches=microbatches, limit_bytes=limit_bytes)


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    assert counts(call_costs([1.0] * 8), "data=1 pipeline=4") == (2, 2, 2, 2)
    assert counts(call_costs([1, 1, 1, 1, 1, 1, 1, 5]), "data=1 pipeline=2") == (6, 2)
    assert counts(call_costs([3, 1, 1, 1, 3, 3]), "data=1 pipeline=4") == (1, 3, 1, 1)


def test_moving_bytes_counts_where_little_is_computed() -> None:
    light = call_costs([1.0] * 4)
    heavy = [CallCost(("blocks.0", 0), frozenset(), 1.0, 100.0, 0, 0), *light[1:]]
    assert counts(heavy, "data=1 pipeline=2") == (1, 3)


def test_the_plan_says_where() -> None:
    assert counts(call_costs([1.0] * 8), "data=1 pipeline=4 split_points=1|2|7") == (1, 1, 5, 1)
    assert counts(call_costs([1.0] * 8), "data=1 pipeline=2 schedule=zbv split_points=1|2|7") == (1, 1, 5, 1)
    with pytest.raises(PlanError, match="to begin at block 9, and the model calls 8"):
        counts(call_costs([1.0] * 8), "data=1 pipeline=2 split_points=9")


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="it has 8 stages, and the model calls 7 blocks"):
        counts(call_costs([1.0] * 7), "data=1 pipeline=4 schedule=interleaved")


def test_activations_in_flight_count() -> None:
    """Under 1f1b the first of two stages holds 2 microbatches, under gpipe all 8."""
    chain = call_costs([1.0] * 4, kept=[MIB] * 4)
    assert counts(chain, "data=1 pipeline=2", limit_bytes=4 * MIB) == (2, 2)
    assert counts(chain, "data=1 pipeline=2", limit_bytes=3 * MIB) == (1, 3)
    with pytest.raises(PlanError, match="8 microbatches in flight"):
        counts(chain, "data=1 pipeline=2 schedule=gpipe", limit_bytes=8 * MIB)
    assert counts(chain, "data=1 pipeline=2 schedule=gpipe recompute=full", limit_bytes=8 * MIB) == (2, 2)


def test_weights_count_as_zero_cuts_them() -> None:
    """Weights, gradients and two numbers of the optimizer: 4 times; half of what zero=3 cuts over 2 ranks."""
    chain = call_costs([1, 1, 1, 3], weights=[MIB] * 4)
    assert counts(chain, "data=1 pipeline=2") == (3, 1)
    assert counts(chain, "data=1 pipeline=2", limit_bytes=12 * MIB) == (3, 1)
    assert counts(chain, "data=1 pipeline=2", limit_bytes=11 * MIB) == (2, 2)
    assert counts(chain, "data=2 pipeline=2 zero=3", limit_bytes=6 * MIB) == (3, 1)
    assert counts(chain, "data=2 pipeline=2 zero=1", limit_bytes=9 * MIB) == (3, 1)
    with pytest.raises(PlanError, match="fit into memory"):
        counts(chain, "data=1 pipeline=2", limit_bytes=7 * MIB)
