"""`evenly export` of what `evenly run` saved: under any plan, for transformers and for a plain module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli_job import job
from command import JOB, evenly
from safetensors.torch import load_file, load_model

from evenly.checkpoint.store import CheckpointStore

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--set", "steps=2", "--set", "width=16", "--set", "layers=2")


def read_by_torch(out: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in the newest checkpoint as a run that resumes reads them."""
    checkpoint = CheckpointStore(out).load()
    into = {name: torch.empty(form.shape, dtype=getattr(torch, form.dtype)) for name, form in checkpoint.forms.items()}
    checkpoint.read(into)
    return {name.removeprefix("model."): tensor for name, tensor in into.items() if name.startswith("model.")}


def from_pretrained(model_class: str, folder: Path) -> dict[str, torch.Tensor]:
    model, told = getattr(transformers, model_class).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.state_dict()


@pytest.mark.full_but("single-1-*")
@pytest.mark.parametrize(
    ("plan", "devices", "example", "model_class"),
    [
        ("single", 1, "llama", "LlamaForCausalLM"),
        ("ddp", 2, "gpt2", "GPT2LMHeadModel"),
        ("zero3", 2, "t5", "T5ForConditionalGeneration"),
        ("tensor=2", 2, "gpt2", "GPT2LMHeadModel"),
        ("data=2 pipeline=2 zero=3", 4, "gpt2", "GPT2LMHeadModel"),
    ],
)
def test_what_a_run_saved_under_a_plan_is_what_transformers_loads(
    plan: str, devices: int, example: str, model_class: str, tmp_path: Path
) -> None:
    command: tuple[Any, ...] = ("run", EXAMPLES / f"{example}.py", "--plan", plan, "--devices", devices, "--out", "run")
    done = evenly(*command, *SMALL, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = evenly("export", "run", "--to", "out", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = read_by_torch(tmp_path / "run")
    assert json.loads(done.stdout) == {
        "files": ["model.safetensors"],
        "tensors": len(saved),
        "bytes": sum(tensor.nbytes for tensor in saved.values()),
        "step": 2,
        "config": True,
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [model_class]
    told = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert told["parameters"] == sum(tensor.numel() for tensor in saved.values())
    loaded = from_pretrained(model_class, tmp_path / "out")
    assert saved.keys() <= loaded.keys()
    assert [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])] == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a plain module, with checkpoints of steps 3 and 4; the last is evaluated."""
    folder = tmp_path_factory.mktemp("plain")
    done = evenly(
        "run", JOB, "--devices", 1, "--out", "run", "--set", "steps=4", "--set", "save_every=3", folder=folder
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_a_plain_module_loads_as_the_command_says(plain: Path) -> None:
    done = evenly("export", "run", "--to", "out", "--step", "best", folder=plain)
    assert done.returncode == 0, done.stderr
    assert "step 4: 4 tensors" in done.stdout and "load_model(model, 'out/model.safetensors')" in done.stdout
    model: Any = job().model()
    load_model(model, plain / "out" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in read_by_torch(plain / "run").items())
    assert evenly("export", "run", "--to", "second", "--step", 3, folder=plain).returncode == 0
    first, second = (load_file(plain / name / "model.safetensors") for name in ("out", "second"))
    assert first.keys() == second.keys() and not torch.equal(first["0.weight"], second["0.weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", 2), "there are those of 3, 4"),
        (("--step", "last"), "give its number, newest or best"),
        (("--to", "run"), "it is not empty"),
    ],
)
def test_what_cannot_be_exported_ends_in_a_message(arguments: tuple[Any, ...], message: str, plain: Path) -> None:
    done = evenly("export", "run", "--to", "new", *arguments, folder=plain)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (plain / "new").exists()
    done = evenly("export", "nothing", "--to", "new", folder=plain)
    assert done.returncode == 2 and "it has no checkpoints" in done.stderr
