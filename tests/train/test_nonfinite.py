"""Losses and gradients that are not finite: traced to module, operation, microbatch, sample and rank; or left out."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from nonfinite_job import BAD, job
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.checkpoint.folder import CheckpointFolder
from evenly.comm.connect import disconnect
from evenly.data.loader import Microbatch, microbatches_of_step
from evenly.engine.trace import (
    LED_TO,
    MADE_INFINITY,
    MADE_NAN,
    PARAMETER,
    RECEIVED,
    NonFiniteWatch,
    Origin,
    Site,
    cause_of,
    describe_origin,
)
from evenly.errors import CheckpointError, RunError, rank_of, step_of

PLANS = [
    ("single", 1, 0),
    ("ddp", 2, 1),
    ("zero3 recompute=full", 2, 1),
    ("zero2 precision=bfloat16", 2, 1),
    ("tensor=2", 2, 0),
    ("pipeline=2", 2, 1),
    ("data=2 pipeline=2", 4, 3),
]


def failing(kind: str, plan: str, **changes: Any) -> tuple[str, int | None, int | None]:
    """The error of a run, the rank that it arose on, and the step."""
    if "precision" in plan:
        changes["precision"] = "bfloat16"
    run = evenly.start(job(kind, **changes), plan=plan)
    try:
        for batch in run.batches():
            run.step(batch)
    except RunError as problem:
        return str(problem), rank_of(problem), step_of(problem)
    finally:
        run.close(failed=True)
        disconnect(run.world)
    return "", None, None


@pytest.mark.full_but("*-single-1-0", "*-ddp-2-1", "forward-zero3 *", "backward-tensor=2-*", "data-pipeline=2-*")
@pytest.mark.parametrize(("plan", "size", "rank"), PLANS)
@pytest.mark.parametrize("kind", ["forward", "backward", "data"])
def test_the_cause_is_traced_under_every_plan(kind: str, plan: str, size: int, rank: int, ranks: KeptRanks) -> None:
    found = ranks.run(failing, kind, plan, size=size)
    assert len(set(found)) == 1  # on all ranks alike
    text, cause, step = found[0]
    assert step == 3
    expected = {
        "forward": "sqrt in the forward of blocks.2.guarded (nonfinite_job.py:43) made nan of finite numbers, in ",
        "backward": "sqrt in the backward of blocks.2.guarded (nonfinite_job.py:44) made inf of finite numbers",
        "data": f"the batch (0) has nan, in microbatch 2 (samples {BAD}) ",
    }
    assert expected[kind] in text, text
    if kind == "data" and "pipeline" in plan:
        rank -= size // 2  # the first stage reads it
    assert cause == rank and f"on rank {rank}" in text
    if kind != "data":
        assert f"in microbatch 2 (samples {BAD}, 15) on rank" in text


def skipping(plan: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """(skipped, left_out) of every step, and the state at the end."""
    run = evenly.start(job("forward"), plan=plan, skip_nonfinite=2)
    reports = [run.step(batch) for batch in run.batches()]
    state = {name: run.composed.full_view(name, t.detach()).clone() for name, t in run.model.state_dict().items()}
    run.close()
    return [(one.skipped, one.left_out) for one in reports], {k: v for k, v in state.items() if not v.is_meta}


def plain_loop(steps: int = 6) -> dict[str, torch.Tensor]:
    """The same on one device, in a loop that leaves a batch out whose loss is not finite."""
    mine = job("forward")
    with evenly.start(mine, plan="single") as run:
        initial = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    model: Any = mine.model()
    model.double().load_state_dict(initial)
    optimizer: Any = mine.optimizer(model.parameters())
    schedule: Any = mine.schedule(optimizer)  # type: ignore[misc]
    _train_plainly(mine, model, optimizer, schedule, steps)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _train_plainly(mine: Any, model: Any, optimizer: Any, schedule: Any, steps: int) -> None:
    for step in range(steps):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.zero_grad()
        total, weight = 0.0, 0
        for indices in microbatches_of_step(mine, step):
            rows = [mine.data[index] for index in indices]
            batch = tuple(torch.stack(column).double() for column in zip(*rows, strict=True))
            loss = mine.loss(model, batch)
            loss.total.backward()
            total, weight = total + float(loss.total.detach()), weight + loss.weight
        if math.isfinite(total):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= weight
            optimizer.step()
        else:
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        schedule.step()


@pytest.mark.full_but("single", "ddp", "tensor=2")
@pytest.mark.parametrize("plan", ["single", "ddp", "zero3", "tensor=2", "pipeline=2"])
def test_a_batch_that_is_left_out_is_left_out_as_on_one_device(plan: str, ranks: KeptRanks) -> None:
    (expected,) = ranks.run(plain_loop, size=1)
    for rows, state in ranks.run(skipping, plan, size=1 if plan == "single" else 2):
        assert [row for row in rows if row[0]] == [("not finite", 1), ("not finite", 2)]
        assert rows[2] == ("not finite", 1) and rows[-1][1] == 2
        assert state
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def saved_and_resumed(folder: Path) -> None:
    with evenly.start(job(), plan="single", skip_nonfinite=1, out=folder, steps=3) as run:
        assert [run.step(batch).skipped for batch in run.batches()] == [None, None, "not finite"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("skipped") for row in rows] == [None, None, "not finite"] and rows[2]["left_out"] == 1
    run = evenly.start(job(), plan="single", skip_nonfinite=1, out=folder, steps=6, resume=True)
    assert run.left_out == 1
    with pytest.raises(RunError, match=r"blocks\.2\.guarded .* made nan of finite numbers"), run:
        for batch in run.batches():
            run.step(batch)


def test_the_count_is_saved_and_beyond_it_the_run_ends_with_the_cause(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(saved_and_resumed, tmp_path, size=1)


class Counting(nn.Module):
    """A buffer that one device may change by any rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        self.seen *= x.sum()
        return (x * self.weight).sum(-1)


def test_one_device_puts_back_buffers_of_no_known_rule() -> None:
    with evenly.start(job("data", model=Counting), plan="single", skip_nonfinite=1, steps=3) as run:
        for batch in run.batches():
            before = run.model.seen.clone()
            report = run.step(batch)
            assert torch.equal(before, run.model.seen) == (report.skipped is not None)
        assert report.skipped == "not finite" and run.model.seen.isfinite()


class Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum(-1) + torch.sqrt((self.weight * 0).sum())  # its gradient is never finite


def test_float16_skips_until_its_scale_is_at_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenly.engine.updater.SMALLEST_SCALE", 2.0**11)
    run = evenly.start(job("clean", model=Overflowing, precision="float16"), plan="single")
    with run, pytest.raises(RunError, match="sqrt in the backward of the model"):
        for batch in run.batches():
            assert run.step(batch).skipped == "overflow"
    assert run.steps_done == 2  # at 2**13, 2**12


def test_what_does_not_come_again_is_said() -> None:
    calls = []

    def once(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return model(*batch[:2]).sum() * (math.nan if len(calls) == 2 else 1)

    with evenly.start(job("clean", loss=once), plan="single") as run:
        with pytest.raises(RunError, match="repeated, the step had finite losses"):
            run.step(next(run.batches()))
        run.stopped = True


def test_a_parameter_that_an_update_has_ruined_is_named() -> None:
    with evenly.start(job("clean", loss=lambda m, b: evenly.Loss(m(*b[:2]).sum(), len(b[0]))), plan="single") as run:
        batches = run.batches()
        run.step(next(batches))
        with torch.no_grad():
            run.model.blocks[1].up.bias[2] = math.inf
        with pytest.raises(RunError, match=r"parameter blocks\.1\.up\.bias is inf before the step"):
            run.step(next(batches))


def watched(model: nn.Module, x: torch.Tensor) -> list[Origin]:
    with NonFiniteWatch([model]) as watch:
        watch.begin(Microbatch(4, len(x), x))
        loss = model(x).sum()
        watch.end(loss)
        loss.backward()
    return watch.origins


class Masked(nn.Module):
    """Infinities that are meant, some of which make NaN: where all of a row is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax((self.gain * x).masked_fill(x < 0, -torch.inf), -1) * x


def test_an_infinity_that_is_meant_is_no_cause_and_one_that_is_not_is() -> None:
    assert all(found.sureness > LED_TO for found in watched(Masked(), torch.tensor([[1.0, -1.0, 2.0]])))
    (found,) = [one for one in watched(Masked(), -torch.ones(1, 3)) if one.sureness == LED_TO]
    text = describe_origin(found, [7], 1)
    assert text.startswith("masked_fill in the forward of the model (test_nonfinite.py:")
    assert "made inf of finite numbers, of which nan came in _softmax in the forward" in text
    assert text.endswith("in microbatch 4 (samples 7) on rank 1")


def test_the_first_cause_of_all_ranks_is_the_one_of_the_earliest_microbatch_and_made_there() -> None:
    def found(sureness: int, microbatch: int | None, backward: bool = False) -> Origin:
        return Origin(sureness, Site("m", "", microbatch), "op", "nan", backward)

    assert cause_of([[], []], []) is None
    ranks = [[found(LED_TO, 3)], [found(LED_TO, 1, True), found(MADE_NAN, 0)]]
    assert cause_of(ranks, [3]) == (1, ranks[1][0])
    stages = [[found(MADE_NAN, 2), found(MADE_INFINITY, 0)], [found(RECEIVED, 2)]]
    assert cause_of(stages, [2]) == (0, stages[0][0])  # the last stage has only received it
    assert cause_of([[found(LED_TO, 0)], [found(PARAMETER, None)]], [0]) == (1, found(PARAMETER, None))


@pytest.mark.full_but("single-1", "zero3-2")
@pytest.mark.parametrize(("plan", "size"), [("single", 1), ("zero3", 2), ("tensor=2", 2)])
def test_an_update_that_makes_parameters_infinite_is_no_checkpoint(
    plan: str, size: int, ranks: KeptRanks, tmp_path: Path
) -> None:
    for words in ranks.run(spoiled_by_its_last_update, plan, tmp_path, size=size):
        assert re.search(r"step 4 .*parameter [\w.]+ is no finite number any more", words, re.DOTALL), words
    assert CheckpointFolder(tmp_path).steps() == [2]


def spoiled_by_its_last_update(plan: str, out: Path) -> str:
    rates = [1e-2, 1e-2, 1e-2, math.inf, 0.0]
    one = job(
        "clean", steps=4, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rates[done]),
    )  # fmt: skip
    run = evenly.start(one, plan=plan, out=out)
    try:
        for batch in run.batches():
            run.step(batch)
            if run.steps_done % 2 == 0:
                run.save()
        run.close()
    except CheckpointError as error:
        run.close(failed=True)
        disconnect(run.world)
        return str(error)
    return "nothing raised"
