"""`evenly plan`: which plans fit and why, and with --explain what is split of a job; tables, JSON, and refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import JOB, Done, environment, evenly

from evenly.cli.plan_request import assumed_batch, parse_memory
from evenly.errors import UserError
from evenly.hardware.cluster_text import parse_cluster
from evenly.plan import parse_plan

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
    assert last.startswith("99.2% of the model's elements are split over 2 ranks") and "tensor_exclude=PATTERN" in last


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
    assert found["unsplit"]["transformer.ln_f.bias"] == ["layer_norm in transformer.h.0.ln_1"]


def test_heads_that_do_not_divide_stay_whole(tmp_path: Path) -> None:
    found = rows(evenly("plan", TENSOR_JOBS, *EXPLAIN, "--set", "name=threes", folder=tmp_path))
    assert found["*.up.weight[0]"][-1] == "split"
    assert " ".join(found["*.keys.weight[0]"]).endswith("whole: 3 units do not divide by 2 ranks")
    assert " ".join(found["3.weight"]) == "1 [0] cross_entropy; [1] layer_norm in 1.norm"


def test_what_is_split_in_another_way_says_so(tmp_path: Path) -> None:
    found = evenly("plan", TENSOR_JOBS, *EXPLAIN, "--set", "kv_heads=2", folder=tmp_path)
    assert "otherwise: blocks.*.query.weight is split along dim 0 as 1 x 2 x 16, for fewer bytes" in found.stdout


def test_patterns_keep_parameters_whole(tmp_path: Path) -> None:
    found = explained(TENSOR_JOBS, "--only", "data=2 tensor=4 tensor_exclude=tok.*|*.up.bias", folder=tmp_path)
    assert found["ranks"] == 4 and found["plan"] == "data=2 tensor=4 tensor_exclude=tok.*|*.up.bias"
    reasons = {group["parameters"][0]["name"]: group["reason"] for group in found["groups"]}
    assert reasons["tok.weight"] == "tok.weight is excluded by 'tok.*'"
    assert reasons["blocks.1.up.weight"] == "blocks.1.up.bias is excluded by '*.up.bias'"


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


EIGHT = ("--cluster", "8xA100-80")
# A job whose model decides by what it has computed.
LOOKS = """
import evenly, torch

class Looks(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y

def job():
    return evenly.Job(
        model=lambda: Looks(3, 1), loss=lambda model, x: model(x).mean(), data=torch.ones(8, 3), global_batch=4,
        steps=2, optimizer=torch.optim.Adam,
    )
"""
# One whose code fails before its first layer.
FAILS = LOOKS.replace("super().forward(x)", "super().forward({}['not there'])")
REFUSALS = {
    "no cluster": (["gpt2"], "add --cluster 8xH100"),
    "unknown model": (["gtp2", *EIGHT], "near are gpt2"),
    "unknown device": (["gpt2", "--cluster", "8xA10O-80"], "did you mean A100-80"),
    "impossible cluster": (["gpt2", "--cluster", "2x2x8xH100"], "nodes x devices x kind"),
    "no size of memory": (["gpt2", *EIGHT, "--memory=-3GB"], "give bytes, or a number with a unit: 80GB, 40GiB"),
    "memory without unit": (["gpt2", *EIGHT, "--memory", "80"], "add a unit: 80GiB"),
    "no split of the batch": (["gpt2", *EIGHT, "--global-batch", "3", "--only", "data=8"], "a batch of 3 on 8 devices"),
    "no prediction of offload": (
        ["gpt2", *EIGHT, "--only", "zero3 offload=parameters"],
        "what offload=parameters does to",
    ),
    "no names in a shape": (
        ["gpt2", *EIGHT, "--only", "tensor=2 tensor_exclude=lm_head.*"],
        "tensor_exclude names parameters",
    ),
    "no time at all": (["gpt2", *EIGHT, "--step-time", "0"], "no step takes so long"),
    "settings of a model": (["gpt2", *EIGHT, "--set", "layers=2"], "for example gpt2:layers=4"),
    "impossible sequence": (["gpt2", *EIGHT, "--sequence", "1000000001"], "is not between 1 and 1000000000"),
    "job without its ending": ([GPT2.with_suffix(""), *EIGHT], f"name {GPT2}"),
    "batch of a job": ([JOB, "--global-batch", "8"], "a job states its batch"),
    "prices of no cluster": (["gpt2", *EIGHT, "--price", "1", "--price", "2"], "2 times --price for 1 cluster"),
    "no price": (["gpt2", *EIGHT, "--price", "0"], "it is no price"),
    "tokens of a job": ([JOB, "--price", "1", "--tokens", "1e9"], "a job states its steps"),
    "tokens without a price": (["gpt2", *EIGHT, "--tokens", "1e9"], "it is what a run's cost is of"),
    "no common batch": (["gpt2", *(f"--cluster={n}x1xA100-80" for n in (7, 11, 13, 17))], "state the batch"),
    "more devices than there are": (["gpt2", *EIGHT, "--only", "data=16"], "takes 16 devices, and there are 8"),
    "explained cluster": ([JOB, "--explain", "--only", "tensor=2", *EIGHT], "--cluster is for predictions"),
    "no file to plan": (["no_such_job.py"], "no such file"),
    "no model to read": (["looks.py"], "needs numbers"),
    "no plan": ([JOB, "--explain"], "add its size: --only tensor=2"),
    "no tensor axis": ([JOB, "--explain", "--only", "zero3"], "explain plan zero=3"),
    "no size": ([JOB, "--explain", "--only", "tp"], "takes all devices that a run is given"),
    "unknown plan": ([JOB, "--explain", "--only", "tensro=2"], "did you mean 'tensor'?"),
    "bits": ([JOB, "--explain", "--only", "tensor=2 exact=bitwise"], "use exact=rounding"),
    "no such pattern": ([JOB, "--explain", "--only", "tensor=2 tensor_exclude=0.weigt"], "close: 0.weight"),
    "no file": (["no_such_job.py", *EXPLAIN], "no such file"),
    "unknown setting": ([JOB, *EXPLAIN, "--set", "layer=2"], "did you mean layers?"),
    "no trace": (["fails.py", *EXPLAIN], "it does not run on fake tensors: KeyError: 'not there'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_clear_message(name: str, tmp_path: Path) -> None:
    arguments, message = REFUSALS[name]
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "fails.py").write_text(FAILS)
    done = evenly("plan", *arguments, folder=tmp_path)
    assert done.returncode == 2 and message in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.count("evenly: ") == 1 and done.stderr.rstrip().splitlines()[-1].startswith("  to do: ")


def test_a_job_whose_shapes_follow_from_numbers_of_the_batch_is_planned(tmp_path: Path) -> None:
    done = evenly("plan", RECURRENT, "--only", "data=1 zero=0", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plans"][0]["memory_bytes"]["activations"] > 0


def test_help_names_the_command(tmp_path: Path) -> None:
    assert "plan " in evenly("--help", folder=tmp_path).stdout


def test_the_stages_of_gpt2_in_a_table(tmp_path: Path) -> None:
    done = evenly("plan", GPT2, "--explain", "--only", "pipeline=2", "--set", "layers=4", folder=tmp_path)
    found = rows(done)
    assert found["0"][:4] == ["0", "transformer.h.0", "to", "transformer.h.1"] and found["0"][-2:] == ["the", "batch"]
    assert found["1"][:4] == ["1", "transformer.h.2", "to", "transformer.h.3"] and found["1"][-2:] == ["argument", "0"]
    last = done.stdout.splitlines()[-1]
    assert (
        last == "in the plan this cut is split_points=2; held by several stages: transformer.wte.weight (stages 0, 1)"
    )


def test_the_stages_of_gpt2_as_json(tmp_path: Path) -> None:
    only = "tensor=2 pipeline=2 schedule=interleaved"
    done = evenly("plan", GPT2, "--explain", "--only", only, "--set", "layers=4", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [stage["rank"] for stage in found["stages"]] == [0, 1, 0, 1]
    assert [stage["ranks"] for stage in found["stages"]] == [[0, 1], [2, 3], [0, 1], [2, 3]]  # of the world
    assert [stage["blocks"] for stage in found["stages"]] == [[f"transformer.h.{n}"] for n in range(4)]
    assert sum(stage["cost"] for stage in found["stages"]) == pytest.approx(1)
    assert [stage["in_flight"] for stage in found["stages"]] == [4, 3, 2, 1]
    assert found["shared"] == {"transformer.wte.weight": [0, 3]}
    assert found["ranks"] == 2 and found["groups"]  # and what the tensor axis splits


# --- predictions ---------------------------------------------------------------------------------------


def planned(*arguments: str, folder: Path, code: int = 0) -> Any:
    done = evenly("plan", *arguments, "--json", folder=folder)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def test_plans_of_a_model_as_json(tmp_path: Path) -> None:
    found = planned("gpt2", *EIGHT, "--top", "3", folder=tmp_path)
    assert (found["model"], found["cluster"], found["assumed"]) == ("gpt2", "8xA100-80", ["global_batch"])
    assert len(found["plans"]) == 3
    for one in found["plans"]:
        sizes = one["memory_bytes"]
        assert one["fits"] and sizes["peak"] <= one["limit_bytes"] < parse_cluster("8xA100-80").device.memory_bytes
        assert sizes["peak"] == pytest.approx(sum(size for cause, size in sizes.items() if cause != "peak"))
        assert sizes == one["ranks"][one["worst_rank"]]
        assert one["samples_per_s"] * one["step_s"] == pytest.approx(1024) and one["global_batch"] == 1024
        assert one["tokens_per_s_per_device"] == pytest.approx(one["samples_per_s"] * 1024 / 8)
        assert 0 < one["mfu"] < 1 and 0 <= one["bubble"] < 1 and one["devices"] == parse_plan(one["plan"]).ranks == 8
    times = [one["step_s"] for one in found["plans"]]
    assert times == sorted(times)


def test_a_table_with_reasons_that_fits_100_columns(tmp_path: Path) -> None:
    done = evenly("plan", "gpt2", *EIGHT, "--global-batch", "64", "--top", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("gpt2 on 8xA100-80, 76 GiB per device")
    assert lines[1].strip() == "a step of 64 samples (65,536 tokens)"
    assert [line[:3] for line in lines if re.match(r" [1-9] ", line)] == [" 1 ", " 2 ", " 3 "]
    assert [line[:2] for line in lines if re.match(r"[1-9]\.", line)] == ["1.", "2.", "3."]
    in_full = done.stdout.partition("in full:")[2].partition("\n2. ")[0]
    assert parse_plan(in_full).ranks == 8


def test_the_options_of_the_question_arrive(tmp_path: Path) -> None:
    arguments = ("--only", "tensor=2 precision=float16", "--sequence", "512", "--memory", "40GB", "--max-devices", "4")
    (one,) = planned("gpt2", *EIGHT, *arguments, "--top", "1", folder=tmp_path)["plans"]
    plan = parse_plan(one["plan"])
    assert (plan.tensor, plan.precision, plan.ranks) == (2, "float16", 4)
    assert one["global_batch"] == 2048 and one["limit_bytes"] == 40e9


def test_plans_leave_the_reserve_and_faster_ones_are_shown_as_fuller(tmp_path: Path) -> None:
    arguments = ("gpt2", "--cluster", "1xA100-80", "--only", "recompute=none", "--global-batch", "64", "--top", "1")
    first = planned(*arguments, "--reserve", "0", folder=tmp_path)
    used = first["plans"][0]["memory_bytes"]["peak"] / first["plans"][0]["limit_bytes"]
    assert "fuller" not in first and first["plans"][0]["reserve_bytes"] == 0
    found = planned(*arguments, "--reserve", str(100 * (1 - used) + 1), folder=tmp_path)
    (best,), (fuller,) = found["plans"], found["fuller"]
    assert fuller["plan"] == first["plans"][0]["plan"] and fuller["step_s"] < best["step_s"]
    assert best["leaves_reserve"] and not fuller["leaves_reserve"]


def test_the_fewest_devices_for_a_step_time(tmp_path: Path) -> None:
    arguments = ("gpt2", "--cluster", "4x8xA100-80", "--global-batch", "1024", "--top", "1")
    whole = planned(*arguments, "--max-devices", "8", folder=tmp_path)["plans"][0]
    fewer = planned(*arguments, "--step-time", str(whole["step_s"] * 1.01), folder=tmp_path)["plans"][0]
    assert fewer["devices"] == 8 and fewer["step_s"] <= whole["step_s"] * 1.01
    done = evenly("plan", *arguments, "--step-time", "0.001", folder=tmp_path)
    assert done.returncode == 1 and "nothing is that fast" in done.stderr
    allowed = re.findall(r"allow --step-time ([\d.]+)", done.stderr)[0]
    assert evenly("plan", *arguments, "--step-time", allowed, folder=tmp_path).returncode == 0


def test_nothing_that_fits_tells_what_lacks_and_what_would_do(tmp_path: Path) -> None:
    arguments = ("llama-3.1-70b", "--cluster", "1xH100", "--only", "microbatch=1 recompute=full")
    found = planned(*arguments, "--global-batch", "8", folder=tmp_path, code=1)
    (nearest,) = found["plans"]
    assert not nearest["fits"] and nearest["memory_bytes"]["peak"] > nearest["limit_bytes"] and found["change"]
    done = evenly("plan", *arguments, "--global-batch", "8", folder=tmp_path)
    assert done.returncode == 1 and "nothing fits; nearest is data=1" in done.stderr
    assert f"to do: {found['change']}" in done.stderr and "optimizer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "only", ["single", "pipeline=4 schedule=1f1b", "pipeline=4 schedule=zbv", "pipeline=4 schedule=interleaved"]
)
def test_the_page_of_pictures(only: str, tmp_path: Path) -> None:
    count = "1" if only == "single" else "4"
    arguments = ("gpt2", "--cluster", "8xA100-80", "--max-devices", count, "--only", only, "--global-batch", "16")
    done = evenly("plan", *arguments, "--top", "2", "--html", "plans.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pictures in plans.html" in done.stderr
    text = (tmp_path / "plans.html").read_text()
    assert text.count("<figure ") >= 3 and not re.findall(r"<script[^>]*src", text)
    assert (">rank 3</i>" in text) == (count == "4")
    assert re.search(
        r'data-texts="\[&quot;F0\.0&quot;[^"]*" d="M0,\d+h[1-9]\d+v', text
    )  # from 0 on, as long as it takes


def test_pictures_of_what_a_plan_does(tmp_path: Path) -> None:
    arguments = ("--explain", "--only", "data=2 tensor=2 zero=1", "--set", "layers=2", "--html", "plan.html")
    done = evenly("plan", GPT2, *arguments, folder=tmp_path)
    assert done.returncode == 0 and "are split over 2 ranks" in done.stdout, done.stderr
    text = (tmp_path / "plan.html").read_text()
    assert "Weights split by the tensor axis" in text and "transformer.h.*.attn.c_attn.weight" in text
    done = evenly("plan", JOB, "--explain", "--only", "data=2", "--html", "plan.html", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "") and "The steps of a ring" in (tmp_path / "plan.html").read_text()


def test_clusters_and_their_prices(tmp_path: Path) -> None:
    clusters = ("--cluster", "8xH100", "--cluster", "8xA100-80", "--cluster", "1xT4")
    prices = ("--price", "3", "--price", "0.5", "--price", "0.5")
    arguments = ("llama-3.1-8b", *clusters, *prices, "--tokens", "1e9")
    found = planned(*arguments, folder=tmp_path)
    fast, slow, none = found["clusters"]
    assert (fast["cluster"], fast["is"], none["plan"]) == ("8xH100-80", "fastest", None) and none["refused"]
    steps = -(-1e9 // fast["plan"]["tokens"]) if "tokens" in fast["plan"] else fast["run_steps"]
    assert fast["run_steps"] == steps and fast["run_s"] == pytest.approx(steps * fast["plan"]["step_s"])
    assert fast["run_cost"] == pytest.approx(3 * 8 * fast["run_s"] / 3600)
    assert slow["plan"]["global_batch"] == fast["plan"]["global_batch"] == found["global_batch"]
    done = evenly("plan", *arguments, "--html", "clusters.html", folder=tmp_path)
    assert done.returncode == 0 and "8xA100-80" in done.stdout and "cheapest" in done.stdout
    assert "clusters and costs" in (tmp_path / "clusters.html").read_text()
    done = evenly("plan", "llama-3.1-70b", "--cluster", "1xT4", "--price", "1", folder=tmp_path)
    assert done.returncode == 1 and "nothing fits" in done.stderr


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    done = evenly("plan", "gpt2", *EIGHT, "--top", "1", "--html", "no/such/folder.html", folder=tmp_path)
    assert done.returncode == 2 and "name a file that can be written" in done.stderr


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("80GB", 80e9), ("40GiB", 40 * 2**30), ("1.5g", 1.5 * 2**30), (" 5000000 ", 5e6)]
)
def test_sizes_of_memory(text: str, size_bytes: float) -> None:
    assert parse_memory(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e3GB", "nan", "80 GBit", "1..5GB", "0GB", "999KiB"])
def test_no_sizes_of_memory(text: str) -> None:
    with pytest.raises(UserError, match="--memory"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("sequence", "devices", "samples"),
    [(8192, 8, 128), (1024, 3, 1026), (8192, 1024, 1024), (2**21, 4, 4), (None, 8, 1024)],
)
def test_a_batch_that_nobody_stated_comes_out_even(sequence: int | None, devices: int, samples: int) -> None:
    assert assumed_batch(sequence, devices) == samples


def test_a_model_is_planned_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['evenly', 'plan', 'llama-3.1-8b', '--cluster', '8xH100', '--json']\n"
        "from evenly.cli.main import app\n"
        "try: app()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'rich', 'plotly', 'psutil'} & {*sys.modules}; assert not heavy, heavy"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, timeout=300, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "llama-3.1-8b"
