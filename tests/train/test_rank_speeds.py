"""Speeds of ranks, as shares are dealt by them."""

from __future__ import annotations

import pytest
from kept_ranks import KeptRanks
from nonfinite_job import job

import evenly
from evenly.train import rank_speeds
from evenly.train.rank_speeds import rounded


def test_small_differences_are_none() -> None:
    assert rounded([100.0, 97.0]) == [1.0, 1.0]
    assert rounded([50.0, 100.0, 1.0]) == [0.5, 1.0, 0.125]


def decided() -> tuple[str, list[int]]:
    """The plan that is recorded, and what this rank runs of a step, where the second has a third of the speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_speeds, "_products_per_s", lambda _: 3.0 - 2.0 * _rank())
        with evenly.start(job("clean", steps=1), plan="ddp speeds=measured") as run:
            owned = []
            for batch in run.batches():
                owned += batch.share.own
                run.step(batch)
            return str(run.plan), owned


def _rank() -> int:
    import os

    return int(os.environ["RANK"])


def test_measured_speeds_are_decided_once_and_shares_follow(ranks: KeptRanks) -> None:
    (plan, first), (same, second) = ranks.run(decided, size=2)
    assert plan == same and "speeds=1.0|0.375" in plan
    assert (len(first), len(second)) == (3, 1)
