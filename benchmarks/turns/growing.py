"""Trains the tower whose blocks grow (pipeline/uneven.py) under `pipeline=2`; started and timed by turns.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "peers"))
sys.path.append(str(Path(__file__).parents[1] / "pipeline"))

import workloads
from recorder import Recorder
from tower import SAMPLES, WIDTH, bind, tower_job

import evenly

workloads.WORKLOADS["growing"] = None  # the recorder asks only whether there is one
rec = Recorder()
bind()
job = tower_job(8, steps=rec.steps, inners=[WIDTH * n for n in range(1, 9)], samples=SAMPLES // 2)
with evenly.start(job, plan="pipeline=2") as run:
    for batch in run.batches():
        run.step(batch)
        rec.step()
rec.finish()
