"""Trainers of trl: one that compares pairs is equal under other plans, one that generates its samples is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl_job import job
from verified import verified

from evenly.errors import UserError

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


def test_preferences_are_equal_under_other_plans(tmp_path: Path) -> None:
    plans = ["ddp", "zero3"]
    found = verified(Path(__file__).with_name("trl_job.py"), plans, tmp_path, steps=3)
    assert found == [(plan, "equal", "") for plan in plans]


def test_a_trainer_that_generates_its_samples_is_refused() -> None:
    with pytest.raises(UserError, match="GRPOTrainer has a _prepare_inputs of its own"):
        job("grpo")
