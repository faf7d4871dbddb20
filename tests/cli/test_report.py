"""`evenly report`: a run's folder in words and pictures, and folders that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import evenly

PLAN = {"job": "<b>", "plan": "data=2 zero=3", "world": 2, "steps": 4, "parameters": 1234}
MEMORY = [{"parameters": 3 << 20, "activations": 1 << 20}, {"parameters": 2 << 20, "gradients": 0}]


def record(step: int, **more: object) -> dict[str, object]:
    row = {"step": step, "loss": 5.0 - step, "step_s": 0.25, "samples_per_s": 40.0, "memory_bytes": [100 << 20, 7]}
    return {**row, **more}


def write(folder: Path, *records: object) -> None:
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_a_report_tells_the_course_and_the_memory_of_every_device(tmp_path: Path) -> None:
    again = record(2, loss=2.5)  # done again after resuming
    write(
        tmp_path,
        record(1, skipped="not finite"),
        record(2, memory=MEMORY),
        again,
        {"step": 2, "eval_loss": None},
        record(3, skipped="overflow"),
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # the run is being written
    done = evenly("report", tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        "4.0000 -> 2.0000",
        "3 of 4",
        "1,234",
        "not finite",
        "largest / mean 1.333",
        "1 (float16 overflowed)",
        "1 (not finite)",
    ):
        assert text in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;" in page and "<b>" not in page.split("<script")[0] and page.count("<figure class=chart") >= 5
    document = json.loads(evenly("report", tmp_path, "--json", folder=tmp_path).stdout)
    assert [step["loss"] for step in document["steps"]] == [4.0, 2.5, 2.0] and document["memory"] == MEMORY


def test_a_run_that_has_done_nothing_yet_has_a_report(tmp_path: Path) -> None:
    write(tmp_path)
    done = evenly("report", tmp_path, folder=tmp_path)
    assert done.returncode == 0 and "0 of 4" in done.stdout


@pytest.mark.parametrize(
    ("plan", "metrics", "message"),
    [
        (None, "", "it has no plan.json"),
        ("{}", None, "it has no metrics.jsonl"),
        ("[1]", "", "no JSON object"),
        ("{", "", "not a run's"),
        ("{}", "[{}]\n[{}\n{]}\n", "not a run's"),
        ("{}", "{'step': 1}", "not a run's"),
        ("{}", '{"step": [], "eval_loss": 1.0}', "not a run's"),
    ],
)
def test_a_folder_that_holds_no_run_is_refused(
    plan: str | None, metrics: str | None, message: str, tmp_path: Path
) -> None:
    for name, text in (("plan.json", plan), ("metrics.jsonl", metrics)):
        if text is not None:
            (tmp_path / name).write_text(text)
    done = evenly("report", tmp_path, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_records_of_another_form_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, record(1, loss="high"), record(2, memory_bytes=[]), record(3, memory={"a": 1}), {"step": 4})
    done = evenly("report", tmp_path, "--json", folder=tmp_path)
    document = json.loads(done.stdout)
    assert [step["step"] for step in document["steps"]] == [3] and document["memory"] == []
    (tmp_path / "plan.json").write_text('{"parameters": "many", "job": [1]}')
    assert "many" in evenly("report", tmp_path, folder=tmp_path).stdout


PREDICTED = {
    "step_s": 0.2,
    "samples_per_s": 50.0,
    "time_s": {"matmul": 0.05, "bubble": 0.15, "tensor": 0.0},
    "memory_bytes": [
        {"parameters": 2 << 20, "gathered": 2 << 20, "optimizer": 8 << 20, "context": 1 << 20, "peak": 13 << 20},
        {"parameters": 1 << 20, "buffers": 3 << 20, "peak": 4 << 20},
    ],
}


def test_what_was_predicted_is_told_beside_what_was_measured(tmp_path: Path) -> None:
    devices = [{"parameters": 5 << 20}, {"sums": 1 << 20, "gradients": 1 << 20}, {}, {"temporaries": 2 << 20}]
    write(tmp_path, record(1), record(2, memory=devices))
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "world": 4, "predicted": PREDICTED}))
    done = evenly("report", tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    for line in (
        "seconds per step 0.2 0.25 1.250",
        "samples per second 50.0 40.0 0.800",
        "largest peak of a rank, MiB 12 100 8.333",
        "0 predicted 4.00 0.00 8.00 0.00 0.00 12.00",
        "measured 5.00 0.00 0.00 0.00 0.00 5.00",
        "measured 0.00 2.00 0.00 0.00 0.00 2.00",
        "1 predicted 4.00 0.00 8.00 0.00 0.00 12.00",  # the first of two ranks of the pipeline has two devices
        "2 predicted 1.00 0.00 0.00 0.00 3.00 4.00",
        "measured 0.00 0.00 0.00 0.00 2.00 2.00",
    ):
        assert line.split() in lines, line
    assert lines.index(["bubble", "0.15"]) + 1 == lines.index(["matmul", "0.05"]) and ["tensor", "0"] not in lines
    page = (tmp_path / "report.html").read_text()
    assert "<td>predicted</td><td>4.00</td>" in page and "<td>50.0</td><td>40.0</td><td>0.800</td>" in page
    assert "device 0, predicted" in page
    document = json.loads(evenly("report", tmp_path, "--json", folder=tmp_path).stdout)
    assert document["plan"]["predicted"] == PREDICTED


def test_a_prediction_stands_alone_where_nothing_is_measured(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "predicted": PREDICTED}))
    done = evenly("report", tmp_path, folder=tmp_path)
    assert ["seconds", "per", "step", "0.2"] in [line.split() for line in done.stdout.splitlines()]
    assert "MiB: predicted" not in done.stdout


@pytest.mark.parametrize(
    "changes", [{"step_s": "fast"}, {"time_s": [1]}, {"memory_bytes": []}, {"memory_bytes": [{"peak": None}]}]
)
def test_a_prediction_of_another_form_is_left_out(changes: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path, record(1, memory=MEMORY))
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "predicted": {**PREDICTED, **changes}}))
    done = evenly("report", tmp_path, folder=tmp_path)
    assert done.returncode == 0 and "predicted" not in done.stdout


def test_a_pipeline_is_drawn_and_written_as_a_trace(tmp_path: Path) -> None:
    plan = {"job": "j", "plan": "pipeline=2 schedule=1f1b", "world": 2, "steps": 1, "parameters": 1}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    spans = {0: [("forward", 0.0, 1.0), ("recv_backward", 1.0, 4.0), ("backward", 4.0, 6.0)],
             1: [("recv_forward", 0.0, 1.0), ("forward", 1.0, 2.0), ("backward", 2.0, 4.0)]}  # fmt: skip
    (tmp_path / "timeline").mkdir()
    for rank, rows in spans.items():
        place = {"step": 1, "rank": rank, "position": rank, "stage": rank, "microbatch": 0}
        text = "".join(json.dumps({**place, "kind": k, "begin_s": b, "end_s": e}) + "\n" for k, b, e in rows)
        (tmp_path / "timeline" / f"rank{rank}.jsonl").write_text(text)
    done = evenly("report", tmp_path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pipeline 1f1b: 2 stages, 1 microbatch;" in done.stdout and done.stdout.count("50.0%") == 6
    assert "timeline.json" in done.stderr
    assert len(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]) == 8
    assert (tmp_path / "report.html").read_text().count("&quot;F0.0&quot;") == 2
    document = json.loads(evenly("report", tmp_path, "--json", folder=tmp_path).stdout)
    assert document["pipeline"]["ranks"][1] == {
        "rank": 1, "stages": [1], "busy_s": 3.0, "bubble": 0.5, "simulated_bubble": 0.5, "ideal_bubble": 0.5
    }  # fmt: skip
    (tmp_path / "timeline" / "rank1.jsonl").unlink()
    done = evenly("report", tmp_path, folder=tmp_path)
    assert done.returncode == 0 and "no step was recorded whole" in done.stderr and "busy" not in done.stdout


def test_several_runs_are_compared(tmp_path: Path) -> None:
    for name, plan, factor in (("a", "data=2 zero=3", 1.0), ("<i>", "data=2", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, *(record(step, step_s=0.25 * factor, lr=0.1) for step in range(1, 5)))
        document = {**PLAN, "plan": plan, "settings": {"layers": 4 * factor}}
        (folder / "plan.json").write_text(json.dumps(document))
    done = evenly("report", tmp_path / "a", tmp_path / "<i>", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["plan:", "zero", "3", "-"] in rows and ["--set", "layers", "4.0", "8.0"] in rows
    assert ["a", "step", "250", "ms", "500", "ms"] in rows and not any(row[:1] == ["world"] for row in rows)
    page = (tmp_path / "comparison.html").read_text()
    assert "&lt;i&gt;" in page and "<i>" not in page and "loss, smoothed" in page
    found = json.loads(evenly("report", tmp_path / "a", tmp_path / "<i>", "--json", folder=tmp_path).stdout)
    assert found["runs"]["a"]["losses"][0] == [1, 4.0] and found["runs"]["<i>"]["settings"]["plan: data"] == "2"
