"""Ranks that do not come together end with the sentence that says who, in which operation, on which line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import disagreements
import pytest
from disagreements import KINDS, disagree
from test_launch import _children_that_are_ranks

from evenly.launcher.agent import FailedRank, Launch, start_ranks
from evenly.launcher.rank import LaunchFolder
from evenly.launcher.watch import Watch, users_places
from evenly.observe.recorder import Recorder

STALL_LIMIT_S = 3.0
MOST_S = 240.0  # of a machine that may stand still: starting, stalling and ending

SOURCE = Path(disagreements.__file__).read_text().splitlines()

# What the message must hold; `<mark>` stands for the line that ends in `# mark`.
SENTENCES = {
    "missing": ["rank 1 did not reach all_reduce #4", "<missing, others>", "is in missing (<missing, odd>", "2 wait"],
    "shape": ["#4", "rank 1: all_reduce of float32 [5], sum at shape (<shape>", "ranks 0, 2: all_reduce of"],
    "dtype": ["#4", "rank 1: all_reduce of float64 [4000], sum at dtype (<dtype>", "ranks 0, 2: all_reduce of float32"],
    "operation": ["#4", "rank 1: barrier at operation (<operation, odd>", "all_reduce", "<operation, others>"],
    "order": ["#4", "rank 1: broadcast of float32 [70000], from 0 at order.sent (<order, broadcast>", "<order, sum>"],
    "dead": ["rank 1", "was killed by SIGKILL", "did not reach all_reduce #4 (dead (<dead>"],
    "stuck loader": ["rank 1 did not reach all_reduce #6 (stuck_loader (<stuck loader>", "__getitem__ (<stuck worker>"],
    "raised": ["rank 1 failed", "ValueError: no such label", "<raised, odd>"],
    "slow": ["rank 1 did not reach all_reduce #4", "in slow_work (disagreements.py:", "<slow, others>"],
    "microbatches": ["rank 1 did not reach all_reduce #6 (microbatches (<microbatches>", "rank 1 has come to its end"],
}  # fmt: skip


def line_of(mark: str) -> str:
    (number,) = [number for number, line in enumerate(SOURCE, 1) if line.endswith(f"# {mark}")]
    return f"disagreements.py:{number}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_disagreement_is_put_into_words(kind: str, tmp_path: Path) -> None:
    before, began_s = _children_that_are_ranks(), time.monotonic()  # kept ranks of other tests
    with pytest.raises(FailedRank) as caught:
        start_ranks(disagree, (kind,), Launch(devices=3, stall_limit_s=STALL_LIMIT_S, log_dir=tmp_path))
    took_s, message = time.monotonic() - began_s, str(caught.value)
    for words in SENTENCES[kind]:
        start, _, mark = words.partition("<")
        mark, closed, rest = mark.partition(">")
        assert (start + line_of(mark) + rest if closed else words) in message, message
    assert caught.value.rank == disagreements.ODD
    assert took_s < MOST_S
    assert [c for c in _children_that_are_ranks() if c not in before] == []


def test_stacks_of_a_stall_are_kept_beside_the_logs(tmp_path: Path) -> None:
    with pytest.raises(FailedRank) as caught:
        start_ranks(disagree, ("missing",), Launch(devices=2, stall_limit_s=STALL_LIMIT_S, log_dir=tmp_path))
    assert "stacks of all ranks" in caught.value.do
    assert sorted(path.name for path in tmp_path.glob("*.stacks")) == ["rank0.stacks", "rank1.stacks"]
    assert " in missing\n" in (tmp_path / "rank1.stacks").read_text()


def test_a_rank_that_died_is_left_to_the_agent_but_not_one_that_came_to_its_end(tmp_path: Path) -> None:
    folder = LaunchFolder(tmp_path, tmp_path, False)
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    recorder = Recorder(tmp_path / "1.record", 1)
    for rank, pid in enumerate((os.getpid(), dead.pid)):
        (tmp_path / f"{rank}.pid").write_text(str(pid))
    assert Watch(folder, 1.0)._any_died()
    recorder.close()
    assert not Watch(folder, 1.0)._any_died()


def test_places_are_read_from_a_dump_of_stacks() -> None:
    dump = (
        "Thread 0x1 (most recent call first):\n"
        f'  File "{time.__name__}/lib/site-packages/torch/x.py", line 3 in wait\n'
        '  File "/home/me/data.py", line 31 in __getitem__\n'
        '  File "/home/me/train.py", line 9 in <module>\n'
        "\n"
        "Current thread 0x2 (most recent call first):\n"
        '  File "/home/me/train.py", line 12 in main\n'
    )
    assert users_places(dump, besides="Job.main (train.py:11)") == ["__getitem__ (data.py:31)"]
    assert users_places("", besides="") == []
