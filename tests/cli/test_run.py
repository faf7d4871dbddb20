"""`evenly run` and `verify` from end to end: files, JSON, interruption, a killed rank, resuming elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from cli_job import job
from command import COMMAND, JOB, LIMIT_S, environment, evenly
from safetensors.torch import load_file

import evenly as package
from evenly.checkpoint.folder import CheckpointFolder
from evenly.cli.run import RunRequest, _with_place, choose_folder
from evenly.errors import UserError
from evenly.launcher.environment import ProcessInfo
from evenly.launcher.rounds import NodeRange

BITS = ("--plan", "exact=bitwise")

# Two tests start a launcher of their own, which imports torch twice.


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    files = sorted((out / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run on one rank, in this process."""
    out = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    with package.start(job(steps=12), plan="single exact=bitwise", out=out) as run:
        for batch in run.batches():
            run.step(batch)
        run.save()
    torch.set_num_threads(threads)
    return out


def test_a_run_writes_its_folder_and_one_json_document(alone: Path, tmp_path: Path) -> None:
    done = evenly("run", JOB, "--devices", 2, *BITS, "--set", "steps=12", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["world"], summary["stopped"]) == (12, 2, False)
    out = tmp_path / "runs" / "cli_job-1"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert len(lines[0]["memory_bytes"]) == 2 and min(lines[0]["memory_bytes"]) > 2**20
    ((first, second),) = (line["memory"] for line in lines if "memory" in line)
    assert first["parameters"] == second["parameters"] > 0 and first["optimizer"] > 0
    assert json.loads((out / "plan.json").read_text())["plan"] == "data=2 precision=float32 exact=bitwise"
    assert {path.name for path in (out / "events").iterdir()} == {"rank0.jsonl", "rank1.jsonl"}
    for name, tensor in weights(alone, 12).items():
        assert torch.equal(tensor, weights(out, 12)[name]), name


def test_a_script_names_its_own_plan(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(JOB.parent)!r})\nimport evenly\nfrom cli_job import job\n"
        "if __name__ == '__main__':\n"
        f"    with evenly.start(job(steps=2), plan='zero2', out={str(tmp_path / 'out')!r}) as run:\n"
        "        for batch in run.batches():\n"
        "            run.step(batch)\n"
    )
    done = evenly("run", script, "--devices", 2, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["plan"].startswith("data=2 zero=2")
    assert CheckpointFolder(tmp_path / "out").steps() == [2]  # saved at its end, without being asked
    done = evenly("run", script, "--devices", 2, "--plan", "ddp", folder=tmp_path)
    assert done.returncode == 2 and "the script itself asks for zero=2" in done.stderr


def start(*arguments: object, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "run", str(JOB), *map(str, arguments)], cwd=folder, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not path.exists():
        assert process.poll() is None and time.monotonic() < limit, process.communicate(timeout=10)
        time.sleep(0.05)


def test_a_killed_rank_ends_the_run_and_another_number_of_ranks_goes_on(alone: Path, tmp_path: Path) -> None:
    slow = ("--set", "fault=slow", "--set", "steps=12")
    process = start("--devices", 2, "--out", "out", *BITS, *slow, folder=tmp_path)
    wait_for(tmp_path / "out" / "checkpoints" / "step-00000004", process)
    pids = [json.loads(path.read_text().splitlines()[0])["pid"] for path in (tmp_path / "out" / "events").iterdir()]
    os.kill(pids[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "SIGKILL" in errors and "Traceback" not in errors and "tensors at the peak" not in errors
    assert "; go on from step " in errors and errors.endswith("--resume --out out\n")
    assert not any(psutil.pid_exists(pid) for pid in pids)
    done = evenly("run", JOB, "--devices", 3, "--out", "out", "--resume", "--set", "steps=12", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, tensor in weights(alone, 12).items():
        assert torch.equal(tensor, weights(tmp_path / "out", 12)[name]), name


def test_a_run_is_started_again_until_it_is_done(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "attempts").touch()
    command = ("run", JOB, "--devices", 2, "--out", "out", *BITS, "--set", "steps=12", "--restarts", 2)
    done = evenly(*command, "--set", "fault=killed", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "attempts").read_text() == "x\nx\n"
    assert "restart 1 in 1 s, from step " in done.stderr and "restart 2 in " in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line].count(1) == 1
    for name, tensor in weights(alone, 12).items():
        assert torch.equal(tensor, weights(tmp_path / "out", 12)[name]), name


@pytest.mark.full
def test_an_error_that_comes_again_ends_it(tmp_path: Path) -> None:
    (tmp_path / "attempts").touch()
    command = ("run", JOB, "--devices", 2, "--out", "out", "--set", "save_every=1000", "--restarts", 9)
    done = evenly(*command, "--set", "fault=raises", folder=tmp_path)
    assert done.returncode == 1
    assert "the same error in the same step came before" in done.stderr
    assert (tmp_path / "attempts").read_text() == "x\nx\n" and "from the beginning" in done.stderr


def test_an_interrupted_run_saves_and_goes_on(alone: Path, tmp_path: Path) -> None:
    slow = ("--set", "fault=slow", "--set", "steps=12", "--set", "save_every=1000")
    process = start("--devices", 2, "--out", "out", *BITS, *slow, folder=tmp_path)
    wait_for(tmp_path / "out" / "metrics.jsonl", process)
    while not (tmp_path / "out" / "metrics.jsonl").read_text():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors and "--resume --out out" in output
    [saved] = CheckpointFolder(tmp_path / "out").steps()
    done = evenly("run", JOB, "--devices", 1, "--out", "out", "--resume", "--set", "steps=12", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"steps {saved + 1} to 12 on 1 rank (" in done.stdout
    plan = (tmp_path / "out" / "plan.json").read_text()
    done = evenly("run", JOB, "--out", "out", "--resume", "--set", "steps=5", folder=tmp_path)
    assert "nothing left to do: step 12 is already done, and 5 were asked for" in done.stdout
    assert (tmp_path / "out" / "plan.json").read_text() == plan
    steps = [json.loads(line).get("step") for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 13))
    for name, tensor in weights(alone, 12).items():
        assert torch.equal(tensor, weights(tmp_path / "out", 12)[name]), name


def test_the_newest_run_that_has_a_checkpoint_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fresh = RunRequest(
        Path("job.py"), [], None, None, None, None, False, None, 0, False, None, [], nodes=NodeRange(), node_rank=0,
        rendezvous="",
        secret_file=None,
        json_only=False,
    )  # fmt: skip
    assert choose_folder(fresh) == Path("runs/job-1")
    again = replace(fresh, resume=True)
    with pytest.raises(UserError, match="no runs/job-N here has a checkpoint"):
        choose_folder(again)
    for number, step in ((2, "step-00000004"), (9, "step-00000002"), (10, "")):  # the last failed at its start
        (tmp_path / "runs" / f"job-{number}" / "checkpoints" / step).mkdir(parents=True)
    assert choose_folder(again) == Path("runs/job-9")
    assert choose_folder(fresh) == Path("runs/job-11")


def test_a_launcher_of_one_task_per_node_says_which_node_this_is() -> None:
    place = ProcessInfo(
        rank=1, local_rank=0, size=4, local_size=1, node=1, nodes=4, address="a", port=9, launcher="srun"
    )
    asked = RunRequest(
        Path("job.py"), [], None, None, None, None, False, None, 0, False, None, [], nodes=NodeRange(), node_rank=0,
        rendezvous="", secret_file=None, json_only=False,
    )  # fmt: skip
    found = _with_place(asked, place)
    assert (found.nodes, found.node_rank, found.rendezvous) == (NodeRange(4, 4), 1, "a:9")
    assert _with_place(replace(asked, nodes=NodeRange(2, 4)), place).nodes == NodeRange(2, 4)
    with pytest.raises(UserError, match="srun has started 4"):
        _with_place(replace(asked, nodes=NodeRange(2, 3)), place)


def test_a_script_with_its_own_loop_runs_on_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(JOB.parent)!r})\n"
        "import evenly\nfrom cli_job import job\n"
        "with evenly.start(job()) as run:\n"
        "    for batch in run.batches():\n"
        "        report = run.step(batch)\n"
        "    with open(f'{sys.argv[2]}{run.world.rank}', 'w') as file:\n"
        "        print(run.world.size, report.step, sys.argv[1:], file=file)\n"
    )
    done = evenly("run", "--devices", 2, "--steps", 3, "--", script, "--flag", tmp_path / "rank", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text() == f"2 3 ['--flag', '{tmp_path / 'rank'}']\n"


def test_a_script_that_is_stopped_saves_and_says_so_by_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        f"import os, signal, sys; sys.path.insert(0, {str(JOB.parent)!r})\n"
        "import evenly\nfrom cli_job import job\n"
        "with evenly.start(job(steps=9), out='out') as run:\n"
        "    for batch in run.batches():\n"
        "        if run.step(batch).step == 2 and run.world.is_main:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = evenly("run", script, "--devices", 2, folder=tmp_path)
    assert done.returncode == 130, done.stderr
    assert CheckpointFolder(tmp_path / "out").steps() == [3]


def test_verify_prints_a_row_per_plan(tmp_path: Path) -> None:
    done = evenly("verify", JOB, "--plans", "ddp;dp;pp;3d", "--devices", 2, "--steps", 2, "--json", folder=tmp_path)
    verdict = json.loads(done.stdout)
    assert [(row["plan"], row["status"]) for row in verdict["plans"]] == [
        ("ddp", "equal"),
        ("dp", "equal"),
        ("pp", "equal"),
        ("3d", "unsupported"),
    ]
    assert done.returncode == 1  # a plan that cannot be shown to be equal is not
    assert [row["world"] for row in verdict["plans"][:2]] == [2, 2] and verdict["plans"][0]["param_diff"] < 1e-9
    assert verdict["dtype"] == "float64" and verdict["steps"] == 2


PLANS = ("--plans", "ddp;ddp microbatch=4", "--devices", 2, "--steps", 2, "--json")


@pytest.mark.full
def test_verify_holds_a_plan_against_one_device_of_its_microbatch(tmp_path: Path) -> None:
    done = evenly("verify", JOB, *PLANS, "--set", "microbatch=None", folder=tmp_path)
    assert [row["status"] for row in json.loads(done.stdout)["plans"]] == ["equal", "equal"]


def test_verify_leaves_out_a_plan_of_another_microbatch_than_the_job_states(tmp_path: Path) -> None:
    done = evenly("verify", JOB, *PLANS, folder=tmp_path)
    same, other = json.loads(done.stdout)["plans"]
    assert (same["status"], other["status"]) == ("equal", "unsupported") and done.returncode == 1
    assert "the job states microbatch=3" in other["reason"]
