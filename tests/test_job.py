"""What a `Job` refuses, and job files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Points, classifier_job

from evenly.errors import UserError
from evenly.jobfile import check_settings, libraries_of, load_job, owns_loop, parse_settings


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"microbatch": -1}, "microbatch is -1"),
        ({"data": Points(0)}, "data is empty"),
        ({"data": Points(9)}, "global_batch is 10 but data has only 9 samples"),
        ({"data": iter([1])}, "can be read once"),
        ({"data": object()}, "neither a map-style dataset"),
        ({"model": 3}, "model is a int, not a callable"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"microbatch_cost": 10}, "microbatch_cost is set but cost is not"),
        ({"precision": "float8"}, "precision is 'float8'"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"eval_every": 2, "eval_data": None}, "eval_every is set but eval_data is not"),
    ],
)
def test_a_field_out_of_range_is_named(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError) as caught:
        classifier_job(**changes)
    assert found in caught.value.found


def test_all_fields_out_of_range_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        classifier_job(global_batch=0, steps=0, model=None)
    assert caught.value.found.count(";") == 2


def test_an_eighth_of_the_batch_is_the_microbatch_where_none_is_stated() -> None:
    assert classifier_job(microbatch=None, global_batch=10).samples_per_microbatch == 2
    assert classifier_job(microbatch=3).samples_per_microbatch == 3


def test_settings_are_literals_where_they_can_be() -> None:
    assert parse_settings(["a=1", "b=1e-3", "c=wide", "d=True", "e=x=y"]) == {
        "a": 1, "b": 1e-3, "c": "wide", "d": True, "e": "x=y",
    }  # fmt: skip
    with pytest.raises(UserError, match="key=value"):
        parse_settings(["lr"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("wide=3", "did you mean width?"),
        ("width=abc", "width=16\n  to do: give a number"),
        ("rate=fast", "rate=0.1\n  to do: give a number"),
        ("width=3", ""),
        ("rate=1", ""),
        ("width=None", ""),
        ("tied=false", "tied=True\n  to do: give True or False"),
        ("tied=1", "give True or False"),
        ("tied=False", ""),
        ("name=abc", ""),
        ("free=abc", ""),
        ("first=abc", ""),
        ("known=abc", ""),
    ],
)
def test_a_setting_that_the_job_cannot_take(setting: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text("def job(first, width=16, known=max(1, 2), *, free, tied=True, rate=0.1, name='a'): ...")
    if not message:
        check_settings(path, parse_settings([setting]))
        return
    with pytest.raises(UserError) as caught:
        check_settings(path, parse_settings([setting]))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("def job(:", "it is not Python"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("x = 1", "no `job`"),
        ("job = 3", "`job` is a int"),
        ("def job(): raise ValueError('boom')", r"ValueError: boom \(case.py:1\)"),
        ("def job(): return 3", "it returned a int"),
        ("def job(layers=2, width=3): return 3", "did you mean layers?"),
    ],
)
def test_a_bad_job_file_is_one_clear_message(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    if text is not None:
        path.write_text(text)
    settings = {"layer": 1} if text and "layers" in text else {}
    with pytest.raises(UserError) as caught:
        load_job(path, settings)
    assert caught.match(message)
    assert caught.value.exit_code == 2


def test_a_file_that_calls_start_owns_its_loop(tmp_path: Path) -> None:
    script, plain = tmp_path / "script.py", tmp_path / "plain.py"
    script.write_text("import evenly\nwith evenly.start(None) as run:\n    pass\n")
    plain.write_text("import evenly\n\ndef job():\n    return None\n")
    assert owns_loop(script)
    assert not owns_loop(plain)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("evenly.Job(batch_size=4)", "did you mean global_batch?"),
        ("evenly.Job(epochs=4)", r"did you mean steps \(epochs times the batches of one\)\?"),
        ("evenly.Job(stepz=4)", "did you mean steps?"),
        ("evenly.Job(quite_another=4)", "a Job has model, loss, data, "),
        ("torch.zeros(2) @ torch.zeros(3)", r"\(case.py:3\)"),
    ],
)
def test_what_to_do_about_a_mistaken_job(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text(f"import evenly, torch\ndef job():\n    {text}\n")
    with pytest.raises(UserError, match=message):
        load_job(tmp_path / "case.py", {})


def test_a_model_is_built_by_the_job() -> None:
    with pytest.raises(UserError, match=r"model is a Linear, not what builds one \(model=lambda: Linear\(...\)\)"):
        classifier_job(model=torch.nn.Linear(2, 3))


def test_the_libraries_of_a_job_file_are_found_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    path = tmp_path / "job.py"
    path.write_text(
        "import json, numpy.linalg\nimport torch\nfrom torch import nn\nimport evenly\nimport neighbour\n"
        "from safetensors.torch import load_file as load, save_file\nimport no_such_library\nfrom . import sibling\n"
        "raise SystemExit\ndef job():\n    import psutil\n"
    )
    assert libraries_of(path) == ["numpy.linalg", "safetensors.torch:load_file", "safetensors.torch:save_file"]
