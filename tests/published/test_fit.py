"""The fit finds numbers again, leaves alone what no run says anything about, and writes what reads back."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.published.cases import Cells, library_of
from benchmarks.published.fit import PLAN, PRIORS, Fit, _coordinate, _value, folds_of, measured_seconds, written
from benchmarks.published.libraries import FILE as LIBRARIES
from benchmarks.published.rows import TRAINING, measured, read
from evenly.planner.speeds import FILE

PRODUCTS, PASSES = ("devices", "A100", "matmul", "bfloat16"), ("libraries", "llm-foundry", "passes")


def rows() -> list[Cells]:
    found = [row.cells for row in read(TRAINING) if row.source == "mpt-llmfoundry" and "A100-40" in row.cells["gpu"]]
    assert len(found) > 10
    return found[:24]


def test_the_written_tables_read_back_to_four_digits() -> None:
    tables = tomllib.loads(PRIORS.read_text())
    tables["operations"]["start_s"] = 4.56789e-6
    again = tomllib.loads(written(tables))
    assert again["operations"].pop("start_s") == 4.568e-6
    del tables["operations"]["start_s"]
    assert again == tables
    assert {type(value) for value in again["operations"].values()} == {float}


def test_what_is_shipped_has_the_numbers_of_the_priors() -> None:
    speeds, libraries, priors = (tomllib.loads(path.read_text()) for path in (FILE, LIBRARIES, PRIORS))
    shipped = {**speeds, **libraries}
    assert [*_paths(shipped)] == [*_paths(priors)]
    for name, library in priors["libraries"].items():
        assert shipped["libraries"][name].get("holdings") == library.get("holdings")
        assert shipped["libraries"][name].get("kernels") == library.get("kernels")


def _paths(table: object, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(table, dict):
        for name, value in table.items():
            yield from _paths(value, (*before, name))
    else:
        yield before


def test_a_number_that_was_changed_is_found_again(capsys: pytest.CaptureFixture[str]) -> None:
    fit = Fit(rows())
    truth = fit.priors.copy()
    numbers = {path: place for place, path in enumerate(fit.paths)}
    truth[numbers[PRODUCTS]] += np.log(0.85)
    fit.measured = fit.predict(truth)
    before = np.abs(fit.predict(fit.priors) / fit.measured - 1)
    found = fit.run()
    after = np.abs(fit.predict(found) / fit.measured - 1)
    assert np.median(before) > 0.05 and np.median(after) < 0.01
    # Where a prior pulls back, others that do the same help.
    assert -0.2 < found[numbers[PRODUCTS]] - fit.priors[numbers[PRODUCTS]] < -0.06
    for path, place in numbers.items():
        if path[1] in ("H100", "nemo", "GB200"):
            assert found[place] == pytest.approx(fit.priors[place])
    assert "median error" in capsys.readouterr().out


def test_what_fits_already_stays(capsys: pytest.CaptureFixture[str]) -> None:
    fit = Fit(rows())
    fit.measured = fit.predict(fit.priors)
    assert fit.run() == pytest.approx(fit.priors)
    capsys.readouterr()


def test_only_rows_of_a_library_or_device_feel_its_numbers() -> None:
    fit = Fit(rows())
    base = fit.predict(fit.priors)
    for place, path in enumerate(fit.paths):
        moved = fit.priors.copy()
        moved[place] += 0.1
        felt = {*np.nonzero(np.abs(fit.predict(moved) / base - 1) > 1e-9)[0]}
        assert felt <= {*fit._touched(path)}


def test_shares_stay_between_0_and_1() -> None:
    path = ("libraries", "nemo", "tensor_hidden")
    assert _value(path, _coordinate(path, 0.7)) == pytest.approx(0.7)
    assert all(0 <= _value(path, x) <= 1 for x in (-50.0, -1.0, 0.0, 3.0))
    assert _value(PASSES, _coordinate(PASSES, 1.3)) == pytest.approx(1.3)


def test_folds_have_every_row_once_and_keep_a_model_on_a_device_together() -> None:
    all_rows = [row.cells for row in read(TRAINING) if measured(row).step_s is not None]
    folds = folds_of(all_rows, 5)
    assert sorted(number for fold in folds for number in fold) == [*range(len(all_rows))]
    of_group: dict[tuple[str, str, str], set[int]] = {}
    of_plan: dict[tuple[str, ...], set[int]] = {}
    for place, fold in enumerate(folds):
        for number in fold:
            row = all_rows[number]
            group = (library_of(row), row["model"], row["gpu"])
            of_group.setdefault(group, set()).add(place)
            of_plan.setdefault((*group, *(row[name] for name in PLAN)), set()).add(place)
    libraries = [library for library, *_ in of_group]
    assert {len(places) for group, places in of_group.items() if libraries.count(group[0]) > 1} == {1}
    # Of a library with one such group some rows are left to say how fast it is.
    spread = {group[0] for group, places in of_group.items() if len(places) > 1}
    assert {"internevo", "nanotron-2024"} <= spread
    assert {len(places) for places in of_plan.values()} == {1}
    assert max(map(len, folds)) - min(map(len, folds)) < 10


def test_the_seconds_of_a_row_are_printed_or_follow_from_its_tokens() -> None:
    cells = {"measured_iter_s": "2.5"}
    assert measured_seconds(cells) == 2.5
    cells = {"global_batch_sequences": "16", "seq_len": "1000", "gpus": "8", "measured_tokens_per_s_per_gpu": "500"}
    assert measured_seconds(cells) == 4.0
    assert measured_seconds({**cells, "seq_len": ""}) is None


def test_what_is_added_moves_nothing_else() -> None:
    few = [row.cells for row in read(TRAINING) if row.source in ("internevo", "mpt-llmfoundry")][::7]
    fit = Fit(few, ["internevo"])
    assert {path[:2] for path in fit.paths} == {("libraries", "internevo")}
    assert fit.cases and {case.library for case in fit.cases} == {"internevo"}
    fit.predict(fit.priors + 0.1)
    shipped = tomllib.loads(FILE.read_text()) | tomllib.loads(LIBRARIES.read_text())
    shipped["libraries"].pop("internevo")
    moved = fit.tables["libraries"].pop("internevo")
    assert fit.tables == shipped and moved["passes"] == pytest.approx(1.7 * np.exp(0.1))
