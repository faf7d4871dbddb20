"""Hugging Face `datasets` in streaming mode: lines of JSON in several files, gone on from under another plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Sentences, pad, tower_job
from kept_ranks import KeptRanks, RankFailure

import evenly
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_steps, keep_reference
from evenly.verify.tasks import PlanSteps

pytest.importorskip("datasets")
STEPS = 5
FILES = 3


def write(folder: Path) -> None:
    rows = Sentences(29).rows
    for number in range(FILES):
        lines = [json.dumps({"ids": row.tolist()}) for row in rows[number::FILES]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


def stream_job(folder: Path, *, shuffles: bool) -> evenly.Job:
    """29 rows in batches of 12, 12 and 5."""
    from datasets import load_dataset  # takes a second to import

    files = [str(folder / f"{number}.jsonl") for number in range(FILES)]
    rows: Any = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))
    return tower_job(
        data=rows.shuffle(seed=3, buffer_size=9) if shuffles else rows,
        eval_data=rows.take(9),
        collate=lambda rows: pad([torch.tensor(row["ids"]) for row in rows]),
        cost=lambda row: len(row["ids"]),
        precision="float64",
    )


def reference(folder: Path, shuffles: bool) -> None:
    keep_reference(stream_job(folder, shuffles=shuffles), STEPS, folder / "reference")


def compare(folder: Path, shuffles: bool, part: PlanSteps) -> RankComparison:
    return compare_steps(stream_job(folder, shuffles=shuffles), part, STEPS, folder)


@pytest.mark.full_but("True")
@pytest.mark.parametrize("shuffles", [False, True])  # its own state has no shuffle buffer
def test_it_goes_on_under_another_plan(shuffles: bool, ranks: KeptRanks, tmp_path: Path) -> None:
    write(tmp_path)
    ranks.run(reference, tmp_path, shuffles, size=1)
    parts = [PlanSteps("ddp", 0, 2, tmp_path / "run"), PlanSteps("zero3", 2, STEPS, tmp_path / "run")]  # type: ignore[arg-type]
    found = [one for part in parts for one in ranks.run(compare, tmp_path, shuffles, part, size=2)]
    row = judge("ddp>zero3", found)
    assert (row.status, row.reason) == ("equal", "")


# ------------------------------------------------------------------------------------------- shards
def run_to_end(folder: Path) -> None:
    job = stream_job(folder, shuffles=False)
    with evenly.start(dataclasses.replace(job, eval_data=None), plan="ddp") as run:
        for batch in run.batches():
            run.step(batch)


def test_a_torn_shard_is_named_on_all_ranks(ranks: KeptRanks, tmp_path: Path) -> None:
    write(tmp_path)
    text = (tmp_path / "1.jsonl").read_text()
    (tmp_path / "1.jsonl").write_text(text[: len(text) // 2] + "\n{}")
    with pytest.raises(RankFailure) as failed:
        ranks.run(run_to_end, tmp_path, size=2)
    assert str(failed.value).count("Error: reading sample") == 2 and "of the stream, in epoch 1" in str(failed.value)


def test_a_shard_that_is_gone_is_named_on_all_ranks(ranks: KeptRanks, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(RankFailure) as failed:
        ranks.run(without_a_shard, tmp_path, size=2)
    assert str(failed.value).count("Error: reading sample") == 2 and "2.jsonl" in str(failed.value)


def without_a_shard(folder: Path) -> None:
    """The file goes when reading begins: all ranks have the dataset then."""
    job = stream_job(folder, shuffles=False)
    rows: Any = job.data

    def read() -> Any:
        (folder / "2.jsonl").unlink(missing_ok=True)
        return iter(rows)

    with evenly.start(dataclasses.replace(job, data=read, eval_data=None), plan="ddp") as run:
        for batch in run.batches():
            run.step(batch)
