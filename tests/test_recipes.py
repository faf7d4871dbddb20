"""Three recipes of docs/design/extending.md, followed from outside the package: a schedule, a sink, a kind of
device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_pipeline import PIPELINE_JOBS
from kept_ranks import KeptRanks

import evenly
from evenly.errors import UserError
from evenly.hardware import devices
from evenly.hardware.cluster_text import parse_cluster
from evenly.observe.sinks import Stream
from evenly.plan import orders, parse_plan
from evenly.plan.orders import Step, register_schedule
from evenly.plan.schedule import SCHEDULES, ScheduleRules
from evenly.planner.known import find_shape
from evenly.planner.request import PlanRequest
from evenly.planner.search import search
from evenly.planner.shapes import ShapeSource

# ---------------------------------------------------------------------------------------------- a schedule


def one_more_ahead(rank: int, ranks: int, _: int, microbatches: int) -> list[Step]:
    """1f1b with one more forward pass ahead on every rank."""
    ahead = min(ranks - rank, microbatches)
    pairs: list[Step] = [("forward", 0), ("backward", 0)]
    turns = [step for _ in range(microbatches - ahead) for step in reversed(pairs)]
    return [("forward", 0)] * ahead + turns + [("backward", 0)] * ahead


def with_schedule() -> None:
    if "1f1b-eager" not in SCHEDULES:
        register_schedule("1f1b-eager", ScheduleRules(stages=1, steady=True), one_more_ahead)


@pytest.fixture
def eager() -> Iterator[None]:
    with_schedule()
    yield
    del SCHEDULES["1f1b-eager"], orders.RULES["1f1b-eager"]


def trained(plan: str) -> dict[str, torch.Tensor]:
    """The parameters of this rank after the job's steps."""
    with_schedule()
    with evenly.start(PIPELINE_JOBS["chain"](), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        own = ((name, parameter) for name, parameter in run.model.named_parameters() if not parameter.is_meta)
        return {name: parameter.detach().clone() for name, parameter in own}


@pytest.mark.usefixtures("eager")
def test_a_schedule(ranks: KeptRanks) -> None:
    plan = parse_plan("pipeline=2 schedule=1f1b-eager").fit(2).complete("float64")
    assert "schedule=1f1b-eager" in str(plan) and plan.pipeline.stages == 2
    assert [str(action) for action in orders.compute_orders("1f1b-eager", 2, 1, 3)[1]][:3] == ["F1.0", "B1.0", "F1.1"]
    (expected,) = ranks.run(trained, "single", size=1)
    found = ranks.run(trained, "pipeline=2 schedule=1f1b-eager")
    assert {name for rank in found for name in rank} == {*expected}
    for rank in found:
        for name, tensor in rank.items():
            assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-10), name
    with pytest.raises(ValueError, match="already"):
        register_schedule("1f1b", ScheduleRules(stages=1), one_more_ahead)


# -------------------------------------------------------------------------------------------------- a sink


class Noted:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[tuple[Stream, dict[str, Any]]] = []
        self.closed = 0

    def write(self, stream: Stream, record: Mapping[str, Any]) -> None:
        self.records.append((stream, {**record}))

    def close(self) -> None:
        self.closed += 1


def test_a_sink(tmp_path: Path) -> None:
    noted = Noted()
    with evenly.start(PIPELINE_JOBS["chain"](), plan="single", out=tmp_path / "run", sinks=[noted]) as run:
        for batch in run.batches():
            run.step(batch)
    metrics = [record for stream, record in noted.records if stream == "metrics"]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics == written and [record["step"] for record in metrics if "loss" in record] == [
        *range(1, run.steps + 1)
    ]
    events = [record["event"] for stream, record in noted.records if stream == "events"]
    assert events[0] == "started" and events[-1] == "ended" and noted.closed == 1


def test_a_sink_of_a_run_without_a_folder() -> None:
    noted = Noted()
    with evenly.start(PIPELINE_JOBS["chain"](), plan="single", sinks=[noted]) as run:
        run.step(next(run.batches()))
    assert [stream for stream, _ in noted.records].count("metrics") == 1 and noted.closed == 1


# ---------------------------------------------------------------------------------------- a kind of device

FACTS = {
    "memory_gib": 100,
    "memory_gb_per_s": 4000,
    "tflops": {"float32": 100, "bfloat16": 1000},
    "node": 4,
    "link": "nvlink4",
    "link_gb_per_s": 450,
    "network_gbit_per_s": 400,
}


@pytest.fixture
def kind() -> Iterator[str]:
    devices.register_device("Z1", {**FACTS, "names": ["Zeta One"]})
    yield "Z1"
    del devices._registered["Z1"]
    for cached in (devices._facts, devices._kinds, devices._by_key):
        cached.cache_clear()


def test_a_kind_of_device(kind: str) -> None:
    assert devices.find_device("zeta-one").name == kind
    cluster = parse_cluster("2xZ1")
    shape = find_shape("gpt2")
    source = ShapeSource(shape)
    best = search(PlanRequest(source=source, cluster=cluster, batch=8)).plans[0]
    assert best.limit_bytes == pytest.approx(100 * 2**30, rel=0.2) and best.plan.ranks == 2
    with pytest.raises(UserError, match="known already"):
        devices.register_device("zeta one", FACTS)
    with pytest.raises(UserError, match="tflops missing"):
        devices.register_device("Z2", {key: value for key, value in FACTS.items() if key != "tflops"})


def test_what_was_registered_is_gone() -> None:
    assert devices.known_device("Z1") is None and devices.known_device("H100") is not None


# ------------------------------------------------------------------------- what a job file registers, on every road

REGISTERING = f"""
import torch
from torch import nn
import evenly
from evenly.hardware.devices import register_device
from evenly.plan.orders import register_schedule
from evenly.plan.schedule import ScheduleRules

def all_forward(rank, ranks, stages_per_rank, microbatches):
    return [("forward", 0)] * microbatches + [("backward", 0)] * microbatches

register_schedule("all-forward", ScheduleRules(stages=1), all_forward)
register_device("Z2", {FACTS})

def loss(model, x):
    return evenly.Loss(model(x).square().sum(), len(x))

def job():
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]
    return evenly.Job(model=lambda: nn.Sequential(*blocks), loss=loss, data=torch.randn(24, 6),
                      optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                      global_batch=12, microbatch=3, steps=2)
"""


def test_commands_know_what_a_job_file_registers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REGISTERING)
    plan = "pipeline=2 schedule=all-forward"
    for command in (
        ("verify", "own.py", "--plans", plan, "--steps", 1),
        ("run", "own.py", "--plan", plan, "--devices", 2, "--steps", 1),
        ("plan", "own.py", "--cluster", "2xZ2", "--only", plan),
    ):
        arguments = [sys.executable, "-m", "evenly", *map(str, command)]
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
