"""`evenly plan --explain`: what the tensor axis splits of a job, as tables and as JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import JOB, Done, evenly

ROOT = Path(__file__).parents[2]
GPT2, TENSOR_JOBS, RECURRENT = (
    ROOT / name for name in ("examples/gpt2.py", "tests/jobs_tensor.py", "examples/recurrent.py")
)
EXPLAIN = ("--explain", "--only", "tensor=2")


def rows(done: Done) -> dict[str, list[str]]:
    """The first words of every line -> its other words."""
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def explained(job: Path, *arguments: str, folder: Path) -> Any:
    done = evenly("plan", job, *EXPLAIN, *arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_the_groups_of_gpt2_in_a_table(tmp_path: Path) -> None:
    done = evenly("plan", GPT2, *EXPLAIN, folder=tmp_path)
    found = rows(done)
    assert found["transformer.wte.weight[0]"] == ["1", "256", "9.6%", "64", "KiB", "64", "KiB", "split"]
    assert found["transformer.h.*.attn.c_attn.weight[1]"][:4] == ["3x", "3", "4", "29.1%"]
    assert (
        found["transformer.h.*.attn.c_attn.bias[0]"] == ["3x"] and found["transformer.h.*.attn.c_proj.weight[0]"] == []
    )
    assert found["transformer.h.*.ln_1.weight"] == ["3", "layer_norm", "in", "transformer.h.0.ln_1"]
    last = done.stdout.splitlines()[-1]
    assert last.startswith("99.2% of the model's elements are split over 2 ranks") and "whole=PATTERN" in last


def test_the_groups_of_gpt2_as_json(tmp_path: Path) -> None:
    found = explained(GPT2, "--set", "layers=2", folder=tmp_path)
    assert (found["job"], found["plan"], found["ranks"]) == (str(GPT2), "tensor=2", 2)
    assert [len(group["parameters"]) for group in found["groups"]] == [1, 1, 3, 3, 3, 3]
    assert found["groups"][2]["parameters"][0] == {
        "name": "transformer.h.0.attn.c_attn.weight", "dim": 1, "outer": 3, "units": 4, "inner": 16,
    }  # fmt: skip
    assert found["groups"][2]["sums"] == ["transformer.h.0.attn.c_proj"]
    assert found["groups"][2]["forward_bytes"] == 4 * 64 * 64 * 4  # of 4 samples of 64 tokens, 64 numbers in float32
    assert found["share"] == pytest.approx(sum(group["elements"] for group in found["groups"]) / found["elements"])
    assert found["whole"]["transformer.ln_f.bias"] == ["layer_norm in transformer.h.0.ln_1"]


def test_heads_that_do_not_divide_stay_whole(tmp_path: Path) -> None:
    found = rows(evenly("plan", TENSOR_JOBS, *EXPLAIN, "--set", "name=threes", folder=tmp_path))
    assert found["*.up.weight[0]"][-1] == "split"
    assert " ".join(found["*.keys.weight[0]"]).endswith("whole: 3 units do not divide by 2 ranks")
    assert " ".join(found["3.weight"]) == "1 [0] cross_entropy; [1] layer_norm in 1.norm"


def test_what_is_split_in_another_way_says_so(tmp_path: Path) -> None:
    found = evenly("plan", TENSOR_JOBS, *EXPLAIN, "--set", "kv_heads=2", folder=tmp_path)
    assert "otherwise: blocks.*.query.weight is split along dim 0 as 1 x 2 x 16, for fewer bytes" in found.stdout


def test_patterns_keep_parameters_whole(tmp_path: Path) -> None:
    found = explained(TENSOR_JOBS, "--only", "data=2 tensor=4 whole=tok.*|*.up.bias", folder=tmp_path)
    assert found["ranks"] == 4 and found["plan"] == "data=2 tensor=4 whole=tok.*|*.up.bias"
    kept = {group["parameters"][0]["name"]: group["reason"] for group in found["groups"] if "kept" in group["reason"]}
    assert kept["tok.weight"] == "tok.weight is kept whole by 'tok.*'"
    assert kept["blocks.1.up.weight"] == "blocks.1.up.bias is kept whole by '*.up.bias'"


def test_nothing_to_split_is_an_answer_too(tmp_path: Path) -> None:
    done = evenly("plan", TENSOR_JOBS, "--explain", "--only", "tensor=499", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.endswith("nothing is split over 499 ranks; evenly run refuses this plan\n")


PRINTING = """
import torch, evenly
from torch import nn
print("read")

def model():
    print("built")
    width = 8 * int(torch.ones(1).item())  # a number, which a tensor on the meta device has not
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

def loss(model, x):
    print("computed")
    return model(x).sum()

def job():
    adam, data = torch.optim.AdamW, torch.randn(9, 4)
    return evenly.Job(model=model, loss=loss, data=data, optimizer=adam, global_batch=4, steps=1)
"""


def test_a_model_that_prints_and_wants_numbers(tmp_path: Path) -> None:
    (tmp_path / "printing.py").write_text(PRINTING)
    found = explained(Path("printing.py"), folder=tmp_path)
    assert [group["split"] for group in found["groups"] if group["sums"] == ["2"]] == [True]


REFUSALS = {
    "no explanation": ([JOB], "prediction of memory and time is not part of this version yet"),
    "no plan": ([JOB, "--explain"], "add its size: --only tensor=2"),
    "no tensor axis": ([JOB, "--explain", "--only", "zero3"], "explain plan zero=3"),
    "no size": ([JOB, "--explain", "--only", "tp"], "takes all devices that a run is given"),
    "unknown plan": ([JOB, "--explain", "--only", "tensro=2"], "did you mean 'tensor'?"),
    "bits": ([JOB, "--explain", "--only", "tensor=2 exact=bitwise"], "use exact=rounding"),
    "no such pattern": ([JOB, "--explain", "--only", "tensor=2 whole=0.weigt"], "close: 0.weight"),
    "no file": (["no_such_job.py", *EXPLAIN], "no such file"),
    "unknown setting": ([JOB, *EXPLAIN, "--set", "layer=2"], "did you mean layers?"),
    "no trace": ([RECURRENT, *EXPLAIN], "needs numbers"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_clear_message(name: str, tmp_path: Path) -> None:
    arguments, message = REFUSALS[name]
    done = evenly("plan", *arguments, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.count("evenly: ") == 1 and done.stderr.rstrip().splitlines()[-1].startswith("  to do: ")


def test_help_names_the_command(tmp_path: Path) -> None:
    assert "plan " in evenly("--help", folder=tmp_path).stdout


def test_the_stages_of_gpt2_in_a_table(tmp_path: Path) -> None:
    done = evenly("plan", GPT2, "--explain", "--only", "pipeline=2", "--set", "layers=4", folder=tmp_path)
    found = rows(done)
    assert found["0"][:4] == ["0", "transformer.h.0", "to", "transformer.h.1"] and found["0"][-2:] == ["the", "batch"]
    assert found["1"][:4] == ["1", "transformer.h.2", "to", "transformer.h.3"] and found["1"][-2:] == ["argument", "0"]
    last = done.stdout.splitlines()[-1]
    assert last == "in the plan this cut is cut=2; held by several stages: transformer.wte.weight (stages 0, 1)"


def test_the_stages_of_gpt2_as_json(tmp_path: Path) -> None:
    only = "tensor=2 pipeline=2 schedule=interleaved"
    done = evenly("plan", GPT2, "--explain", "--only", only, "--set", "layers=4", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [stage["rank"] for stage in found["stages"]] == [0, 1, 0, 1]
    assert [stage["blocks"] for stage in found["stages"]] == [[f"transformer.h.{n}"] for n in range(4)]
    assert sum(stage["cost"] for stage in found["stages"]) == pytest.approx(1)
    assert [stage["in_flight"] for stage in found["stages"]] == [4, 3, 2, 1]
    assert found["shared"] == {"transformer.wte.weight": [0, 3]}
    assert found["ranks"] == 2 and found["groups"]  # and what the tensor axis splits
