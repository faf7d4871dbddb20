"""Published measurements beside predictions: what counts, the figures, the document, and files that cannot be read."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.published.__main__ import BEGIN, END, docs_page, main
from benchmarks.published.accuracy import Accuracy, Pair, accuracy, quantile, ranks, spearman, within_sweeps
from benchmarks.published.compare import Predict, compare, document
from benchmarks.published.picture import draw
from benchmarks.published.rows import (
    COLUMNS,
    GIB,
    TRAINING,
    Incomplete,
    Predicted,
    Row,
    batch_that_follows,
    measured,
    read,
)
from benchmarks.published.tables import markdown, ranges, skipped_table
from evenly.errors import UserError

RUN = {
    "id": "a-1",
    "source": "a",
    "model": "m",
    "gpu": "H100-SXM-80",
    "gpus": "8",
    "seq_len": "1000",
    "global_batch_sequences": "16",
    "measured_iter_s": "2.0",
    "grade_speed": "A",
}


def row(**cells: str) -> Row:
    values = {**dict.fromkeys(COLUMNS, ""), **RUN, **cells}
    return Row(id=values["id"], source=values["source"], cells=values)


def predicting(step_s: float | None = 2.0, peak_gib: float | None = 50.0, limit_gib: float | None = 80.0) -> Predict:
    """A predictor that says the same of every row."""
    peak, limit = (gib and gib * GIB for gib in (peak_gib, limit_gib))

    def predict(cells: Mapping[str, str]) -> Predicted:
        return Predicted(step_s=step_s, peak_bytes=peak, limit_bytes=limit)

    return predict


def table(rows: Sequence[Mapping[str, str]], path: Path) -> Path:
    """A CSV file of these rows, with the columns of the first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


class TestFigures:
    def test_errors_by_hand(self) -> None:
        found = accuracy([Pair(1.1, 1.0), Pair(0.8, 1.0), Pair(3.0, 3.0)])  # errors 0.1, 0.2, 0
        assert found.rows == 3
        assert found.median == pytest.approx(0.1)
        assert found.p90 == pytest.approx(0.18)  # 0.8 of the way from 0.1 to 0.2
        assert found.bias == pytest.approx((1.1 * 0.8) ** (1 / 3) - 1)

    def test_twice_and_half_have_no_bias(self) -> None:
        assert accuracy([Pair(2.0, 1.0), Pair(1.0, 2.0)]).bias == pytest.approx(0.0)

    def test_no_rows_have_no_figures(self) -> None:
        assert accuracy([]) == Accuracy(rows=0, median=None, p90=None, bias=None)

    @pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
    def test_quantiles_of_one_to_four(self, share: float, value: float) -> None:
        assert quantile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(value)

    def test_ties_share_a_rank(self) -> None:
        assert ranks([10.0, 30.0, 20.0, 20.0]) == [1.0, 4.0, 2.5, 2.5]

    def test_rank_correlation_by_hand(self) -> None:
        pairs = [Pair(p, m) for p, m in [(1, 10), (2, 30), (3, 20), (4, 40)]]
        assert spearman(pairs) == pytest.approx(1 - 6 * 2 / (4 * 15))  # squared differences of ranks sum to 2
        assert spearman([Pair(-p.predicted, p.predicted) for p in pairs]) == pytest.approx(-1)

    def test_two_rows_and_equal_rows_have_no_order(self) -> None:
        assert spearman([Pair(1, 1), Pair(2, 2)]) is None
        assert spearman([Pair(1, 5), Pair(2, 5), Pair(3, 5)]) is None

    def test_sweeps_weigh_by_their_rows(self) -> None:
        up = [Pair(value, value) for value in range(1, 5)]
        down = [Pair(-value, value) for value in range(1, 4)]
        mean, sweeps = within_sweeps([up, down, up[:2]])
        assert mean == pytest.approx((4 * 1 - 3 * 1) / 7)
        assert sweeps == 2


class TestWhatCounts:
    def test_a_step_as_measured(self) -> None:
        assert measured(row(measured_iter_s="2.5", measured_tokens_per_s_per_gpu="1.0")).step_s == 2.5

    def test_a_step_from_the_throughput(self) -> None:
        found = measured(row(measured_iter_s="", measured_tokens_per_s_per_gpu="500.0", gpus="8.0"))
        assert found.step_s == pytest.approx(16 * 1000 / (500 * 8))

    @pytest.mark.parametrize("column", ["gpus", "seq_len", "global_batch_sequences"])
    def test_a_throughput_alone_is_not_enough(self, column: str) -> None:
        found = measured(row(measured_iter_s="", measured_tokens_per_s_per_gpu="500", **{column: ""}))
        assert found.reasons == (f"step time: {column} is not stated",)

    @pytest.mark.parametrize(
        ("grade", "said"), [("C", "grade C (guessed)"), ("X", "grade X (guessed)"), ("", "no grade")]
    )
    def test_weak_grades_are_named(self, grade: str, said: str) -> None:
        found = measured(row(grade_speed=grade, grade_why="guessed"))
        assert not found.counts
        assert found.reasons[0].startswith(f"step time: {said}")

    def test_a_weak_time_leaves_the_memory(self) -> None:
        found = measured(row(grade_speed="C", grade_memory="b", measured_peak_mem_gib="40"))
        assert (found.step_s, found.peak_bytes, found.peak_grade) == (None, 40 * GIB, "B")
        assert found.counts and len(found.reasons) == 1

    def test_out_of_memory_is_a_value(self) -> None:
        found = measured(row(measured_peak_mem_gib="oom", grade_memory="B", measured_iter_s="", grade_speed=""))
        assert found.ran_out and found.counts and found.peak_bytes is None and not found.reasons

    @pytest.mark.parametrize("cell", ["fast", "-1", "0", "nan", "inf", "1,5"])
    def test_cells_that_are_no_number(self, cell: str) -> None:
        assert measured(row(measured_iter_s=cell)).reasons == (
            f"step time: measured_iter_s is no positive number: {cell!r}",
        )

    def test_a_grade_without_its_measurement(self) -> None:
        found = measured(row(measured_iter_s="", grade_memory="A"))
        assert [reason.partition(":")[0] for reason in found.reasons] == ["step time", "memory"]

    def test_a_row_of_nothing(self) -> None:
        assert measured(row(measured_iter_s="", grade_speed="")).reasons == ("nothing measured",)


class TestCompared:
    def test_the_document(self) -> None:
        rows = [
            row(id="a-1", measured_iter_s="2", measured_peak_mem_gib="40", grade_memory="A"),
            row(id="a-2", measured_iter_s="1", measured_peak_mem_gib="100", grade_memory="B"),
            row(id="b-1", source="b", grade_speed="C", measured_peak_mem_gib="OOM", grade_memory="A"),
        ]
        found = document(compare(rows, predicting(2.0, 50.0)))
        assert found["overall"]["time"] == {
            "rows": 2,
            "median": 0.5,
            "p90": pytest.approx(0.9),
            "bias": pytest.approx(math.sqrt(2) - 1),
        }
        assert found["sources"]["a"]["memory"] == {"rows": 1, "median": 0.25, "p90": 0.25, "bias": pytest.approx(0.25)}
        assert found["overall"]["memory_b"]["median"] == 0.5
        assert found["sources"]["b"]["time"]["rows"] == 0
        assert found["overall"]["fits"] == {
            "rows": 3,
            "agree": pytest.approx(2 / 3),
            "ran_but_refused": [],
            "ran_out_but_accepted": ["b-1"],
        }
        assert found["skipped"] == [{"id": "b-1", "reason": "step time: grade C"}]
        json.dumps(found, allow_nan=False)

    def test_a_run_that_is_predicted_not_to_fit(self) -> None:
        found = document(compare([row()], predicting(peak_gib=90.0)))
        assert found["overall"]["fits"]["ran_but_refused"] == ["a-1"]

    def test_the_order_is_of_throughput_per_device(self) -> None:
        rows = [
            row(id=str(batch), global_batch_sequences=str(batch), measured_iter_s=str(step))
            for batch, step in [(8, 1.0), (16, 1.5), (32, 2.0)]
        ]
        found = document(compare(rows, lambda cells: Predicted(step_s=2.0, peak_bytes=None, limit_bytes=None)))
        assert found["sources"]["a"]["rank_correlation_in_sweeps"] == pytest.approx(1.0)
        assert found["sources"]["a"]["rank_correlation"] == pytest.approx(1.0)
        assert found["sources"]["a"]["sweeps"] == 1

    def test_more_devices_are_no_better_order(self) -> None:
        rows = [
            row(gpus=str(2**n), measured_iter_s=str(2.0 ** (1 - n / 2))) for n in range(4)
        ]  # slower and slower each
        found = document(compare(rows, lambda cells: Predicted(step_s=1.0, peak_bytes=None, limit_bytes=None)))
        assert found["sources"]["a"]["rank_correlation"] == pytest.approx(1.0)

    def test_other_models_are_other_sweeps(self) -> None:
        rows = [row(model=model, measured_iter_s=step) for model in "xy" for step in ("1", "2")]
        assert document(compare(rows, predicting()))["sources"]["a"]["sweeps"] == 0

    @pytest.mark.parametrize(
        ("problem", "reason", "code"),
        [
            (Incomplete("microbatch is not stated"), "microbatch is not stated", 0),
            (UserError("GPU Z100 is unknown.", "near it: H100"), "GPU Z100 is unknown. near it: H100", 0),
            (KeyError("heads"), "fault: KeyError: 'heads'", 1),
        ],
    )
    def test_rows_that_cannot_be_predicted(
        self, problem: Exception, reason: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def predict(cells: Mapping[str, str]) -> Predicted:
            if cells["id"] == "bad":
                raise problem
            return predicting()(cells)

        path = table([{**RUN, "id": "bad"}, {**RUN, "id": "good"}], tmp_path / "runs.csv")
        assert main(["--csv", str(path), "--json"], predict) == code
        found = json.loads(capsys.readouterr().out)
        assert found["overall"]["time"]["rows"] == 1
        assert [each["id"] for each in found["skipped"]] == ["bad"]
        assert found["skipped"][0]["reason"].startswith(reason)

    @pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
    def test_predictions_that_are_no_numbers_are_faults(self, value: float) -> None:
        compared = compare([row()], predicting(step_s=value))
        assert compared[0].fault and "step_s" in compared[0].reasons[0]

    def test_what_was_measured_but_not_predicted_is_said(self) -> None:
        found = document(compare([row(measured_peak_mem_gib="1", grade_memory="A")], predicting(None, None)))
        assert [each["reason"] for each in found["skipped"]] == ["step time: none predicted", "memory: none predicted"]


class TestFiles:
    def test_the_published_file(self) -> None:
        rows = read(TRAINING)
        assert len({each.id for each in rows}) == len(rows) == 834
        counted = [measured(each) for each in rows]
        assert sum(each.ran_out for each in counted) == 8
        assert all(each.counts or each.reasons for each in counted)

    def test_columns_may_be_missing(self, tmp_path: Path) -> None:
        path = table([{"gpu": "H100", "measured_peak_mem_gib": "40.0"}], tmp_path / "own.csv")
        (only,) = read(path)
        assert (only.id, only.source, only.cells["microbatch"]) == ("row 2", "unnamed", "")
        assert measured(only).peak_grade == "A"  # ungraded: somebody's own

    def test_short_and_empty_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "short.csv"
        path.write_text("\ufeffid, measured_iter_s ,grade_speed,notes\na, 1.5 ,A\n\n,,,\nb,2\n", encoding="utf-8")
        rows = read(path)
        assert [each.id for each in rows] == ["a", "b"]
        assert [measured(each).step_s for each in rows] == [1.5, None]

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (b"", "no column"),
            (b"model,speed\nx,1\n", "no column"),
            (b"id,measured_iter_s\na,1,2\n", "row 2 has 3 cells for 2 columns"),
            (b"id,measured_iter_s,id\na,1,2\n", "stand twice: id"),
            (b'id,measured_iter_s\n"a,1\n', "unexpected end"),
            (b"id,measured_iter_s\n\xff\xfe,1\n", "utf-8"),
        ],
    )
    def test_broken_files_are_refused(
        self, text: bytes, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "broken.csv"
        path.write_bytes(text)
        assert main(["--csv", str(path)], predicting()) == 2
        said = capsys.readouterr()
        assert found in said.err and str(path) in said.err and not said.out

    def test_a_missing_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--csv", str(tmp_path / "none.csv")], predicting()) == 2
        assert "No such file" in capsys.readouterr().err


class TestShown:
    def test_tables(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = table([{**RUN, "id": "a-1"}, {**RUN, "id": "a-2", "grade_speed": "C"}], tmp_path / "runs.csv")
        assert main(["--csv", str(path), "--rows"], predicting(2.2)) == 0
        out = capsys.readouterr().out
        assert "| a-1 |" in out and "+10.0 %" in out
        assert "step time: grade C" in out and "|predicted / measured - 1|" in out

    def test_the_picture_is_well_formed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        runs = [{**RUN, "source": "a<b", "measured_peak_mem_gib": "40"}, {**RUN, "measured_iter_s": "20"}]
        drawn = tmp_path / "drawn.svg"
        assert main(["--csv", str(table(runs, tmp_path / "runs.csv")), "--plot", str(drawn)], predicting()) == 0
        dots = ElementTree.parse(drawn).getroot().findall("{http://www.w3.org/2000/svg}circle")
        assert len(dots) == 3  # two step times and, without a grade column, one peak of memory

    def test_a_picture_of_nothing(self) -> None:
        ElementTree.fromstring(draw(document([], rows=True)))

    def test_docs_keep_what_stands_around_the_figures(self) -> None:
        page = f"# Accuracy\n{BEGIN}\nold\n{END}\nafter\n"
        once = docs_page(page, document(compare([row()], predicting()), rows=True))
        assert once.startswith(f"# Accuracy\n{BEGIN}\n") and once.endswith(f"{END}\nafter\n") and "old" not in once
        assert docs_page(once, document(compare([row()], predicting()), rows=True)) == once
        with pytest.raises(UserError, match="marks"):
            docs_page("# Accuracy\n", document([], rows=True))

    def test_the_docs_page_has_the_marks(self) -> None:
        docs_page((TRAINING.parents[2] / "docs" / "accuracy.md").read_text(), document([], rows=True))

    def test_bars_in_cells_do_not_end_them(self) -> None:
        assert markdown([("a", "b"), ("x|y", "1")]).splitlines()[2] == "| x\\|y | 1 |"


@pytest.mark.parametrize(
    ("cells", "batch"),
    [
        ({"notes": "micro_num 4 (so dp*2*4)"}, "64"),
        ({"notes": "GAS 3."}, "48"),
        ({"notes": "gradient accumulation of 2"}, "32"),
        ({"measured_iter_s": "2.0", "measured_tokens_per_s_per_gpu": "1030", "seq_len": "1024", "gpus": "8"}, "16"),
        ({"measured_iter_s": "2.0", "measured_tokens_per_s_per_gpu": "1230", "seq_len": "1024", "gpus": "8"}, ""),
        ({"notes": "micro_num 4", "microbatch": ""}, ""),
        ({"notes": "micro_num 4", "dp": "many"}, ""),
        ({}, ""),
    ],
    ids=repr,
)
def test_a_batch_that_follows_from_other_cells(cells: dict[str, str], batch: str) -> None:
    assert batch_that_follows({**dict.fromkeys(COLUMNS, ""), "dp": "8.0", "microbatch": "2", **cells}) == batch


def test_a_stated_batch_stays_and_a_missing_one_follows(tmp_path: Path) -> None:
    stated = {**RUN, "global_batch_sequences": "7", "notes": "micro_num 4", "dp": "2", "microbatch": "1"}
    path = table([stated, {**stated, "global_batch_sequences": ""}], tmp_path / "runs.csv")
    assert [each.cells["global_batch_sequences"] for each in read(path)] == ["7", "8"]


def test_rows_that_do_not_count_are_named_by_reason() -> None:
    ids = ["a-001", "a-002", "a-003", "b-009", "b-010", "b-012", "c"]
    assert ranges(ids) == ["a-001 to 003", "b-009 to 010", "b-012", "c"]
    table = skipped_table({"skipped": [{"id": each, "reason": "no use" if each != "c" else "worse"} for each in ids]})
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()]
    assert lines[2:] == [["no use", "6", "a-001 to 003, b-009 to 010, b-012"], ["worse", "1", "c"]]
