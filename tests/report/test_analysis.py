"""What a run's records say, as figures: shares, waits, slow steps and their causes, growth, state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import MIB, NOON, event, plan, record, write_full_run, write_run

from evenly.report import analysis, events
from evenly.report.run import RunSummary, read_run

STARTED, ENDED = event("started", 0, 0), event("ended", 40, 30)


def run_of(tmp_path: Path, records: Any, **more: Any) -> RunSummary:
    return read_run(write_run(tmp_path, records, **more))


def test_smoothing_keeps_a_constant_and_follows_a_step() -> None:
    assert analysis.smoothed([2.0] * 500) == pytest.approx([2.0] * 500)
    found = analysis.smoothed([0.0] * 300 + [1.0] * 300)
    assert found[299] == 0 and 0.5 < (found[310] or 0) < 0.9 and (found[-1] or 0) > 0.99
    assert analysis.smoothed([1.0, None, 3.0])[1] is None


def test_shares_add_up(tmp_path: Path) -> None:
    run = run_of(tmp_path, [record(step, step_s=9.0 if step == 1 else 0.2) for step in range(1, 11)])
    shares = analysis.shares_of(run)
    assert shares is not None  # of 0.2 s: 0.125 in the mean, 0.025 for rank 1, of rank 0's 0.07 s 0.02 for messages
    assert (shares.computing, shares.waiting, shares.communication, shares.rest) == pytest.approx(
        (0.625, 0.125, 0.1, 0.15)
    )


def test_shares_are_not_guessed(tmp_path: Path) -> None:
    assert analysis.shares_of(run_of(tmp_path, [record(step, busy_s=None) for step in range(1, 9)])) is None
    assert analysis.waits_of(run_of(tmp_path, [record(step, busy_s=["?"]) for step in range(1, 9)])) == []


def test_who_waits_for_whom(tmp_path: Path) -> None:
    busy = [[0.1, 0.2, 0.15], [0.1, 0.2, 0.15], [0.1, 0.1, 0.15]]
    run = run_of(tmp_path, [record(step, busy_s=busy[step % 3]) for step in range(2, 11)])
    first, second, third = analysis.waits_of(run)
    assert first.waits_s == pytest.approx((0.1 + 0.1 + 0.05) / 3) and first.waited_for == 1
    assert first.of_that == pytest.approx(0.8) and first.busy_s == pytest.approx(0.1)
    assert (second.waited_for, second.of_that) == (2, 1.0) and third.waited_for == 1
    alone = run_of(tmp_path, [record(step, busy_s=[0.1]) for step in range(1, 9)])
    assert analysis.waits_of(alone) == []


@pytest.mark.parametrize(
    ("more", "rank", "why"),
    [
        ({"busy_s": [0.1, 0.75]}, 1, "rank 1 computed for 750 ms, 150 ms in other steps"),
        ({"busy_s": [0.7, 0.75]}, None, "all ranks computed for longer"),
        ({"waited_s": 0.8}, None, "ranks waited for messages"),
        ({}, None, "ranks did not compute"),
        ({"busy_s": None}, None, "not known"),
        ({"memory": [{"a": 1}]}, None, "the memory of tensors was counted"),
    ],
)
def test_a_slow_step_is_named_with_its_cause(more: dict[str, Any], rank: int | None, why: str, tmp_path: Path) -> None:
    slow = record(20, step_s=0.9, **more)
    run = run_of(tmp_path, [slow if step == 20 else record(step) for step in range(1, 41)])
    times = analysis.step_times(run)
    assert times is not None and (times.median_s, times.low_s, times.high_s) == (0.2, 0.2, 0.2)
    (found,) = times.slowest
    assert (found.step, found.rank, found.ratio) == (20, rank, pytest.approx(4.5)) and why in found.why


def test_the_first_step_of_each_start_is_no_riddle(tmp_path: Path) -> None:
    records = [record(step, step_s=3.0 if step in (1, 21) else 0.2) for step in range(1, 41)]
    run = run_of(tmp_path, records, events=[STARTED, event("started", 20, 9)])
    times = analysis.step_times(run)
    assert times is not None and [(one.step, one.why) for one in times.slowest] == [
        (1, "the first after a start"),
        (21, "the first after a start"),
    ]


def test_memory_that_still_grows(tmp_path: Path) -> None:
    sizes = [[500 * MIB, (500 + (step if step > 20 else 0)) * MIB] for step in range(41)]
    run = run_of(tmp_path, [record(step, memory_bytes=sizes[step]) for step in range(1, 41)])
    steady, growing = analysis.growth_of(run)
    assert not analysis.grows(steady) and analysis.grows(growing)
    assert (growing.peak_bytes, growing.rose_bytes) == (540 * MIB, 19 * MIB)
    again = run_of(
        tmp_path, [record(step, memory_bytes=sizes[step]) for step in range(1, 41)], events=[event("started", 39, 0)]
    )
    assert not any(map(analysis.grows, analysis.growth_of(again)))  # one step since the last start


@pytest.mark.parametrize(
    ("happened", "steps", "state"),
    [
        ([STARTED, ENDED], 40, "ended"),
        ([STARTED, event("ended", 10, 30)], 10, "stopped"),
        ([STARTED, event("saved", 9, 2), event("failed", 10, 30)], 10, "failed"),
        ([STARTED, event("failed", 5, 3), event("started", 5, 4)], 10, "running"),
        ([], 40, "ended"),
    ],
)
def test_the_state_of_a_run(happened: list[Any], steps: int, state: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, [record(step) for step in range(1, steps + 1)], events=happened)
    assert analysis.state_of(run, run.changed_s + 5) == state
    if state == "running":
        assert analysis.state_of(run, run.changed_s + 500) == "silent"


def test_time_left_and_time_in_all(tmp_path: Path) -> None:
    happened = [STARTED, event("failed", 20, 6), event("started", 20, 100), event("ended", 30, 110)]
    run = run_of(tmp_path, [record(step) for step in range(1, 31)], events=happened)
    assert analysis.left_s(run) == pytest.approx(2.0)
    assert analysis.total_s(run) == pytest.approx(16.0)  # the files may have been copied since
    going = RunSummary(run.plan, run.steps, (), (), events=run.events[:-1], changed_s=NOON + 120)
    assert analysis.total_s(going) == pytest.approx(26.0)
    bare = RunSummary(run.plan, run.steps, (), ())
    assert analysis.total_s(bare) == pytest.approx(6.0)


def test_tokens_where_the_weight_counts_them(tmp_path: Path) -> None:
    speed = analysis.speed_of(run_of(tmp_path, [record(step) for step in range(1, 9)]))
    assert speed is not None and (speed.samples_per_s, speed.tokens_per_s) == (40.0, 320.0)
    speed = analysis.speed_of(run_of(tmp_path, [record(step, weight=8.0) for step in range(1, 9)]))
    assert speed is not None and speed.tokens_per_s is None


def test_steps_that_are_done_again_replace_those_after_them_too(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 11)]
    records[5:5] = [{"step": 5, "eval_loss": 3.0}]
    run = run_of(tmp_path, [*records, {"step": 10, "eval_loss": 2.0}, record(8, loss=0.5)])
    assert [row["step"] for row in run.steps] == [*range(1, 9)] and run.steps[-1]["loss"] == 0.5
    assert [row["step"] for row in run.evaluations] == [5]


def test_what_befell_a_run_in_words(tmp_path: Path) -> None:
    folder = write_full_run(tmp_path)
    (folder / "events" / "rank1.jsonl").write_text('{"time": 1700000006.5, "event": "failed", "step": 20}\nno event\n')
    run = read_run(folder)
    rows = events.rows(run.events, run.slow, folder)
    assert [what for _, _, what in rows] == [
        "started on 2 ranks",
        "ranks 0-1 failed",
        "went on on 2 ranks",
        "ended",
        "slow: rank 1: 1.5 x as long as the others, since step 30 (2.1 GHz)",
    ]
    assert rows[0][0] == "2023-11-14 22:13:20 UTC" and rows[1][1] == "20"


def test_records_of_another_kind_do_no_harm(tmp_path: Path) -> None:
    odd = [record(1, lr=True, grad_norm="x", weight=None), record(2, step_s=float("nan")), {"step": 3, "loss": 1.0}]
    run = run_of(
        tmp_path, [*odd, {**record(4), "step": True}, {**record(5), "step": -1}], of_plan=plan(steps="many", world=None)
    )
    assert [row["step"] for row in run.steps] == [1]
    assert analysis.left_s(run) is None and analysis.numbers_of(run.steps, "lr") == [None]


def test_communication_is_the_mean_of_the_steps_that_recorded_it(tmp_path: Path) -> None:
    def of_step(data: float, pipeline: float) -> dict[str, Any]:
        waits = {"data": (data, 0.1), "pipeline": (pipeline, 0.0)}
        return {axis: {"under_way_s": seconds, "waited_s": waited} for axis, (seconds, waited) in waits.items()}

    records = [record(1), record(2, communication=of_step(0.3, 0.1)), record(3, communication=of_step(0.5, 0.3))]
    data, pipeline = found = analysis.communication_of(run_of(tmp_path, records))
    assert (data.axis, data.under_way_s, data.waited_s) == ("data", pytest.approx(0.4), pytest.approx(0.1))
    assert data.hidden == pytest.approx(0.75) and pipeline.hidden == 1.0
    assert analysis.hidden_of(found) == pytest.approx(1 - 0.1 / 0.6)


@pytest.mark.parametrize(
    "value", [None, [], {"data": 3}, {"data": {"under_way_s": "1"}}, {"data": {"under_way_s": 1.0, "waited_s": -1.0}}]
)
def test_communication_is_not_guessed(value: Any, tmp_path: Path) -> None:
    found = analysis.communication_of(run_of(tmp_path, [record(2, communication=value)]))
    assert found == [] and analysis.hidden_of(found) is None


def test_no_more_is_waited_for_than_was_under_way(tmp_path: Path) -> None:
    strange = {"data": {"under_way_s": 1.0, "waited_s": 2.0}, "tensor": {"under_way_s": 0.0, "waited_s": 0.0}}
    found = analysis.communication_of(run_of(tmp_path, [record(2, communication=strange)]))
    assert [one.hidden for one in found] == [0.0, 0.0]
