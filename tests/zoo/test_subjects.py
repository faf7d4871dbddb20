"""The subjects of `benchmarks/zoo`, its rows and its page, without a library that the tests do not need."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ZOO = Path(__file__).parents[2] / "benchmarks" / "zoo"
FUNCTIONS = ("names", "build", "batches", "loss", "head", "avoided", "experts")


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ZOO))


def module(name: str) -> Any:
    """One of the zoo's modules; other benchmarks have a `run` too."""
    if name != "run":
        return importlib.import_module(name)
    own = sys.modules.get("run")
    if own is None or Path(str(own.__file__)).parent != ZOO:
        sys.modules.pop("run", None)
    return importlib.import_module("run")


def test_a_name_has_a_library_and_a_name_there() -> None:
    split = module("subjects").split
    assert split("llama") == ("transformers", "llama")
    assert split("timm:convnext") == ("timm", "convnext")
    assert split("peft:lora-llama") == ("peft", "lora-llama")
    with pytest.raises(ValueError, match="no library of the zoo is called keras"):
        split("keras:vgg")


def test_every_library_has_the_interface() -> None:
    for library in module("subjects").LIBRARIES:
        of = module(f"subjects_{library}")
        assert [name for name in FUNCTIONS if not callable(getattr(of, name, None))] == []


def test_a_library_that_is_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("subjects").importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"timm is not installed: pip install -r benchmarks/zoo/requirements"):
        module("subjects").library("timm")


def test_what_is_left_out_is_a_subject_with_a_reason() -> None:
    subjects, left_out = module("subjects"), module("shrink").left_out()
    for name, reason in left_out.items():
        library, own = subjects.split(name)
        assert len(reason) > 10
        if library != "transformers":
            assert own in module(f"subjects_{library}").names()


def test_at_least_eighty_families_of_timm_are_run() -> None:
    names, left_out = module("subjects_timm").names(), module("shrink").left_out()
    assert len([name for name in names if f"timm:{name}" not in left_out]) >= 80


def test_a_batch_of_timm_has_the_stated_size() -> None:
    timm = module("subjects_timm")
    assert [shapes["image"][1] for shapes in timm.batches("beit")] == [(3, 32, 32)]  # img_size
    assert [shapes["image"][1] for shapes in timm.batches("hiera")] == [(3, 64, 64)]  # of two numbers
    assert [shapes["image"][1][1] for shapes in timm.batches("vgg")] == [64, 96, 128, 224]  # not stated


def test_batches_of_diffusers_are_drawn() -> None:
    diffusers, samples = module("subjects_diffusers"), module("samples")
    for name in diffusers.names():
        for shapes in diffusers.batches(name):
            drawn = samples.Samples(shapes)[3]
            assert {key: tuple(value.shape) for key, value in drawn.items()} == {k: v[1] for k, v in shapes.items()}


def test_adapters_lie_on_at_least_ten_models_of_transformers() -> None:
    peft, transformers = module("subjects_peft"), module("subjects_transformers")
    pairs = [name.split("-") for name in peft.names()]
    models = {model_type for _, model_type in pairs}
    assert len(models) >= 10
    assert models <= set(transformers.names())
    assert {adapter for adapter, _ in pairs} == set(peft.ADAPTERS)


def test_mixtures_of_experts_are_known_by_their_configuration() -> None:
    transformers, peft = module("subjects_transformers"), module("subjects_peft")
    assert transformers.experts("mixtral") == 4
    assert transformers.experts("llama") == 0
    assert peft.experts("lora-mixtral") == 4


def test_rows_are_read_past_one_that_was_cut(tmp_path: Path) -> None:
    run, rows = module("run"), tmp_path / "rows.jsonl"
    run._append(rows, {"architecture": "a", "plan": "ddp", "status": "error"})
    rows.write_text(rows.read_text() + '{"architecture": "b", "pl\n')
    run._append(rows, {"architecture": "a", "plan": "ddp", "status": "equal"})
    assert run.read_rows(rows) == {("a", "ddp"): {"architecture": "a", "plan": "ddp", "status": "equal"}}


def due(monkeypatch: pytest.MonkeyPatch, rows: Path, *arguments: str) -> dict[str, list[str]]:
    """What a campaign of three subjects would run."""
    run = module("run")
    monkeypatch.setattr(run.ranks, "commit_of", lambda folder: "1234567")
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "llama,t5,bert", "--out", str(rows), *arguments])
    return run._campaign(run._arguments()).due


def test_a_campaign_runs_what_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    plans = ("--plans", "ddp;zero3")
    done = [("llama", "ddp", "equal", "1234567"), ("llama", "zero3", "error", "1234567"), ("t5", "ddp", "equal", "old")]
    keys = ("architecture", "plan", "status", "commit")
    rows.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in done))

    assert due(monkeypatch, rows, *plans) == {"t5": ["zero3"], "bert": ["ddp", "zero3"]}
    assert due(monkeypatch, rows, *plans, "--redo", "error")["llama"] == ["zero3"]
    assert due(monkeypatch, rows, *plans, "--stale")["t5"] == ["ddp", "zero3"]


def test_parts_are_all_subjects_and_share_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = [[*due(monkeypatch, tmp_path / "none", "--part", f"{k}/2")] for k in (1, 2)]
    assert parts == [["llama", "bert"], ["t5"]]


def test_a_failure_of_the_campaign_itself_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, ranks = module("run"), module("ranks")
    facts = {"class_name": "Net", "head": "x", "parameters": 1, "experts": 0, "batch": {}}

    class Broken:
        """Prepares, and then cannot start a process."""

        def run(self, function: Any, *args: Any, size: int, limit_s: float) -> Any:
            if function.__name__ == "prepare":
                return ranks.Outcome(results={0: facts})
            raise OSError("no process could be started")

    rows = [*run._rows_of("llama", ["zero=2", "tensor=2"], Broken(), 1.0)]
    assert [(row["plan"], row["status"]) for row in rows] == [("zero=2", "error"), ("tensor=2", "error")]
    assert "no process could be started" in rows[0]["reason"]


def test_the_page_has_a_section_for_each_library() -> None:
    plans = module("run").PLANS.split(";")
    facts = {"head": "x", "reason": "", "versions": {"torch": "2"}, "loss_diff": 0.0, "grad_norm_diff": 0.0}
    rows = [
        *(
            {"architecture": "mixtral", "plan": plan, "status": "equal", "experts": 4, "commit": "aaa"}
            for plan in plans
        ),
        {"architecture": "jamba", "plan": "zero=2", "status": "equal", "experts": 4, "commit": "aaa"},
        {"architecture": "timm:vgg", "plan": "3d", "status": "refused", "experts": 0, "reason": "cannot cut"},
        {"architecture": "peft:lora-llama", "plan": "3d", "status": "unbuilt", "reason": "no adapter"},
    ]
    text = "\n".join(module("summary").lines([{**facts, **row} for row in rows]))
    assert "3 models (2 of transformers, 1 of timm, 0 of peft)" in text
    assert "Rows by commit: aaa (6), not recorded (2)." in text
    assert "Mixtures of experts: 2, of which 1 are equal under all of" in text
    assert "| `3d` | refused | cannot cut | vgg |" in text
    assert "- peft:lora-llama: no adapter" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## transformers",
        "## timm",
        "## peft",
        "## Not run",
    ]
