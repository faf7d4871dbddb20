"""More ranks on the data axis than a batch has microbatches: cut finer where nothing depends on it, else said."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import full_state, leave
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.data.loader import idle_ranks
from evenly.hardware.cluster_text import parse_cluster
from evenly.launcher.environment import find_here
from evenly.plan import parse_plan
from evenly.planner.job_source import JobSource
from evenly.planner.microbatch import with_known_microbatch
from evenly.planner.request import PlanRequest
from evenly.planner.search import search
from evenly.report.run import course_rows, read_run
from evenly.train.options import RunOptions
from evenly.train.resolve_run import decide

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def squares(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(batch), batch.sum(1, keepdim=True))


def pairs(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    z = F.normalize(net(batch), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def job(width: int = 1, **changes: Any) -> evenly.Job:
    given: dict[str, Any] = {"model": partial(nn.Linear, 8, width), "loss": squares, "data": x, "precision": "float64"}
    given |= {"optimizer": partial(torch.optim.SGD, lr=0.01), "global_batch": 64, "steps": 2, "shuffle": False}
    return evenly.Job(**{**given, **changes})


def contrastive(**changes: Any) -> evenly.Job:
    return job(4, loss=pairs, microbatch=64, **changes)


@pytest.mark.parametrize(
    ("one", "ranks", "idle"),
    [
        (job(), 8, 0),
        (job(), 10, 2),
        (contrastive(), 8, 7),
        (job(cost=lambda index: 8, microbatch_cost=256), 4, 2),
        (job(data=lambda: iter(x)), 9, 1),
    ],
)
def test_ranks_without_a_microbatch_are_counted(one: evenly.Job, ranks: int, idle: int) -> None:
    assert idle_ranks(one, ranks) == idle and idle_ranks(one, 1) == 0


def test_a_batch_is_cut_finer_where_no_number_depends_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    place = replace(find_here(), size=10, local_size=10)
    assert decide(job(), RunOptions(), place).microbatch == 7
    assert "microbatch=7, so that each of 10 ranks has one: no number depends on it" in capsys.readouterr().err
    for one, text in ((job(), "exact=bitwise precision=float32"), (job(4, loss=pairs), "ddp"), (contrastive(), "ddp")):
        assert decide(one, RunOptions(parse_plan(text)), place).microbatch in (None, 64)
    assert decide(job(), RunOptions(), find_here()).microbatch is None
    assert capsys.readouterr().err == ""


def planned(one: evenly.Job, only: str, cluster: str = "1x8xcpu", **changes: Any) -> list[dict[str, int]]:
    known, _ = with_known_microbatch(one, parse_plan(only))
    asked = PlanRequest(source=JobSource(known), cluster=parse_cluster(cluster), batch=64, **changes)
    return [found.plan.axes for found in search(replace(asked, only=parse_plan(only))).plans]


def test_a_search_counts_ranks_with_work_alone() -> None:
    assert planned(contrastive(), "tensor=1") == [{"data": 1}]
    assert planned(job(microbatch=32), "zero=0 tensor=1") == [{"data": 2}]
    assert planned(contrastive(), "ddp data=8 tensor=1") == [{"data": 8}]  # as it was asked
    assert planned(contrastive(), "zero=0 tensor=1", takes_all=True) == [{"data": 8}]  # of a run that has them


def trained(plan: str, folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with evenly.start(contrastive(), plan=plan, out=folder) as run:
            for batch in run.batches():
                run.step(batch)
            state = {name: value.clone() for name, value in full_state(run).items()}
    leave()
    return [str(one.message) for one in caught if "nothing to compute" in str(one.message)], state


def check(found: list[Any], folder: Path, idle: int) -> None:
    [said], _ = found[0]
    assert f"{idle} of the {idle + 1} ranks on the data axis have nothing to compute: a batch has 1 microbatch;" in said
    assert all(texts == [] for texts, _ in found[1:])
    rows = dict(course_rows(read_run(folder)))
    assert rows["idle ranks"] == f"{idle} on the data axis: a batch has fewer microbatches"
    assert json.loads((folder / "plan.json").read_text())["idle_ranks"] == idle


def test_idle_ranks_are_said_at_the_start_and_in_the_report(ranks: KeptRanks, tmp_path: Path) -> None:
    check(ranks.run(trained, "ddp", tmp_path / "run"), tmp_path / "run", 1)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3", "data=2 tensor=2", "data=2 pipeline=1", "data=3"])
def test_idle_ranks_do_not_change_numbers(ranks: KeptRanks, tmp_path: Path, plan: str) -> None:
    [(texts, expected)] = ranks.run(trained, "single", tmp_path / "one", size=1)
    size = parse_plan(plan).ranks or 2
    found = ranks.run(trained, plan, tmp_path / "run", size=size)
    check(found, tmp_path / "run", (parse_plan(plan).fit(size).data or 1) - 1)
    assert texts == []
    for _, state in found:
        assert all(torch.allclose(value, expected[name], rtol=1e-9) for name, value in state.items())
