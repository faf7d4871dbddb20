"""Ranks that another launcher has started: one folder, one error, and the words of the first that fails."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command import COMMAND, LIMIT_S, environment
from torch.distributed import DistNetworkError, HashStore

import evenly.comm.connect
from evenly.cli.run import RunRequest, choose_folder, with_autoresume
from evenly.cli.run_rank import _check, _to_say
from evenly.comm.connect import own_gpu
from evenly.comm.last_words import LastWords
from evenly.errors import UserError
from evenly.launcher.environment import ProcessInfo
from evenly.launcher.rank import RankExit, describe
from evenly.launcher.rounds import NodeRange

JOB = """
import torch
import evenly

def job(fails: int = -1):
    def on_step(run, report):
        if run.world.rank == fails and report.step == 2:
            raise ValueError("this step is one too many")
    return evenly.Job(
        model=lambda: torch.nn.Linear(3, 2), loss=lambda model, x: evenly.Loss(model(x).sum(), len(x)),
        data=[torch.ones(3) for _ in range(64)], optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch=8, microbatch=2, steps=3, save_every=1, on_step=on_step,
    )
"""
SCRIPT = """
import evenly
from job import job

with evenly.start(job()) as run:
    for batch in run.batches():
        run.step(batch)
    if run.is_main:
        print(run.plan.data.zero_stage, run.out, run.steps_done)
"""
REQUEST = RunRequest(
    Path("job.py"), [], None, None, None, None, False, None, 0, False, None, [], nodes=NodeRange(), node_rank=0,
    rendezvous="", secret_file=None, json_only=False,
)  # fmt: skip


def place(rank: int, size: int = 4, launcher: str = "mpirun") -> ProcessInfo:
    return ProcessInfo(
        rank=rank, local_rank=rank, size=size, local_size=size, node=0, nodes=1, address="127.0.0.1", port=9,
        launcher=launcher,  # type: ignore[arg-type]
    )  # fmt: skip


def under_mpirun(folder: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of two ranks with the variables that Open MPI sets."""
    (folder / "job.py").write_text(JOB)
    (folder / "own.py").write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []
    for rank in range(2):
        variables = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        of_mpi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in variables.items()}
        started.append(
            subprocess.Popen(
                [*COMMAND, "run", *arguments], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**environment(), **of_mpi, "PMIX_NAMESPACE": str(os.getpid())},
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def test_one_error_of_the_rank_that_has_failed_and_the_same_exit_code(tmp_path: Path) -> None:
    (code, _, first), (other_code, _, second) = under_mpirun(tmp_path, "job.py", "--set", "fails=1", "--out", "out")
    assert (code, other_code) == (1, 1), first + second
    assert "evenly:" not in first
    assert second.count("evenly:") == 1 and "rank 1 failed" in second and "this step is one too many" in second
    assert "Traceback" not in first + second
    assert "ValueError: this step is one too many" in (tmp_path / "out" / "logs" / "rank1.log").read_text()


def test_the_options_of_a_script_reach_the_ranks_and_a_mistake_is_said_once(tmp_path: Path) -> None:
    (code, said, _), (other_code, nothing, _) = under_mpirun(tmp_path, "own.py", "--plan", "zero3", "--out", "out")
    assert (code, other_code) == (0, 0)
    assert (said.strip(), nothing) == ("3 out 3", "")
    found = under_mpirun(tmp_path, "job.py", "--plan", "tensr=2")
    assert [code for code, _, _ in found] == [2, 2]
    assert sum(error.count("unknown key 'tensr'") for _, _, error in found) == 1


def test_the_first_rank_chooses_the_folder_for_all(tmp_path: Path) -> None:
    (tmp_path / "runs" / "job-4").mkdir(parents=True)
    assert [code for code, _, _ in under_mpirun(tmp_path, "job.py")] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["job-4", "job-5"]
    events = tmp_path / "runs" / "job-5" / "events"
    assert sorted(path.name for path in events.iterdir()) == ["rank0.jsonl", "rank1.jsonl"]


@pytest.mark.parametrize(
    "asked", [{"restarts": 1}, {"nodes": NodeRange(2, 4)}, {"stall_limit_s": 5.0}, {"snapshot": 2}, {"devices": 2}]
)
def test_what_only_a_launcher_can_do_is_refused(asked: dict[str, object]) -> None:
    with pytest.raises(UserError, match="mpirun has started all 4 ranks"):
        _check(replace(REQUEST, **asked), place(1))
    _check(replace(REQUEST, devices=4), place(1))


def test_a_task_that_sees_one_gpu_has_that() -> None:
    assert own_gpu(place(3), 8) == 3
    assert own_gpu(place(3, launcher="srun"), 1) == 0
    for launcher, found in (("torchrun", 1), ("srun", 2)):
        with pytest.raises(UserError, match="4 devices on this machine"):
            own_gpu(place(3, launcher=launcher), found)


def test_autoresume_goes_on_where_there_is_a_checkpoint_and_else_begins(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--autoresume"):
        with_autoresume(replace(REQUEST, autoresume=True))
    out, second = tmp_path / "out", tmp_path / "second"
    asked = replace(REQUEST, autoresume=True, out=out, save_to=second)
    assert not with_autoresume(asked).resume
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")  # of an attempt that was ended before its first checkpoint
    assert not with_autoresume(asked).resume
    assert choose_folder(asked) == out
    with pytest.raises(UserError, match="already holds a run"):
        choose_folder(replace(asked, autoresume=False))
    (second / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert with_autoresume(asked).resume


# ------------------------------------------------------------------------------------------------ who says what
LOST = RuntimeError("Connection closed by peer [127.0.0.1]:1")


class Gone(LastWords):
    """Words whose store has ended."""

    def speaks(self, text: str) -> bool:
        raise DistNetworkError(text)

    def anything_said(self, limit_s: float) -> bool:
        raise DistNetworkError("gone")


def said(monkeypatch: pytest.MonkeyPatch, words: LastWords | None, found: RankExit, size: int = 4) -> object:
    monkeypatch.setattr(evenly.comm.connect, "last_words", lambda place: words)
    monkeypatch.setattr("evenly.cli.run_rank.LINGER_S", 0.05)
    return _to_say(found, place(found.rank, size))


def test_of_a_rank_that_was_killed_one_of_the_others_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    words = [LastWords(store, rank, 3) for rank in range(3)]
    spoken = said(monkeypatch, words[0], describe(0, LOST))
    assert isinstance(spoken, tuple) and spoken[0] == "the ranks lost one of them" and "mpirun" in spoken[2]
    assert said(monkeypatch, words[1], describe(1, LOST)) is None


def test_a_rank_that_lost_one_that_has_spoken_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    words = [LastWords(store, rank, 2) for rank in range(2)]
    failed = said(monkeypatch, words[1], describe(1, ValueError("too much")))
    assert failed == ("rank 1 failed", "ValueError: too much", "")
    assert said(monkeypatch, words[0], describe(0, LOST)) is None


def test_a_mistake_is_said_as_it_is_and_without_ranks_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = describe(2, UserError("asked", "found", "do"))
    assert said(monkeypatch, None, mistake) == ("asked", "found", "do")


def test_where_the_store_is_gone_one_rank_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Gone(HashStore(), 0, 3)
    first = said(monkeypatch, words, describe(1, LOST))
    assert isinstance(first, tuple) and first[0] == "rank 0 is gone"
    assert said(monkeypatch, words, describe(2, LOST)) is None
    assert said(monkeypatch, words, describe(2, ValueError("too much"))) == (
        "rank 2 failed",
        "ValueError: too much",
        "",
    )
