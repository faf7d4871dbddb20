"""An example as it is but for its evaluations, whose messages take longer than the steps that are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import evenly
from evenly.jobfile import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"


def job(example: str, **settings: object) -> evenly.Job:
    """`example`: its name; settings: those of its own job()."""
    found = load_job(EXAMPLES / f"{example}.py", settings)
    return replace(found, eval_data=None, eval_every=None, evaluate=None)
