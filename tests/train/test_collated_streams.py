"""A job's own collate of a stream runs on the ranks that run the microbatches, and as on one device."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Points
from jobs_streams import points_job
from kept_ranks import KeptRanks, RankFailure
from kept_references import References

import evenly
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, compare_steps
from evenly.verify.tasks import PlanSteps

STEPS = 5  # of 23 samples in batches of 10, the third is short; the fourth begins an epoch


class Raw:
    """A sample that cannot be pickled."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __reduce__(self) -> Any:
        raise TypeError("it holds an open file")


def rows() -> Iterator[Any]:
    for number, (x, y) in enumerate(Points(23)):  # type: ignore[arg-type]
        yield {"x": x.tolist(), "y": int(y), "number": number}


def raw_rows() -> Iterator[Any]:
    yield from map(Raw, rows())


def decoded(samples: list[Any]) -> Any:
    """Draws, and takes fields out of the samples, as collators of transformers do."""
    labels = torch.tensor([sample.pop("y") for sample in samples])
    drawn = torch.tensor([random.random() for _ in samples], dtype=torch.float32)
    return torch.tensor([sample.pop("x") for sample in samples]) + drawn[:, None] * torch.rand(5), labels


def decoded_raw(samples: list[Any]) -> Any:
    return decoded([dict(one.sample) for one in samples])


def decoding_job(name: str = "rows", **changes: Any) -> evenly.Job:
    data, collate = {"rows": (rows, decoded), "raw": (raw_rows, decoded_raw)}[name]
    return points_job(**{"data": data, "eval_data": data, "collate": collate, **changes})


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory, lambda name: decoding_job(name, precision="float64"), STEPS)


def compare(name: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(decoding_job(name, precision="float64"), plan, STEPS, folder)


@pytest.mark.full_but("rows-ddp-3", "raw-ddp-2")
@pytest.mark.parametrize(
    ("name", "plan", "size"), [("rows", "single", 1), ("rows", "ddp", 3), ("rows", "zero3", 2), ("raw", "ddp", 2)]
)
def test_it_has_the_numbers_of_one_device(
    name: str, plan: str, size: int, ranks: KeptRanks, references: References
) -> None:
    row = judge(plan, ranks.run(compare, name, plan, references(name), size=size))
    assert (row.status, row.reason) == ("equal", "")


def compare_part(part: PlanSteps, folder: Path) -> RankComparison:
    return compare_steps(decoding_job(precision="float64"), part, STEPS, folder)


def test_it_goes_on_under_another_plan(ranks: KeptRanks, references: References, tmp_path: Path) -> None:
    first, second = PlanSteps("ddp", 0, 2, tmp_path), PlanSteps("zero3", 2, STEPS, tmp_path)  # type: ignore[arg-type]
    found = ranks.run(compare_part, first, references("rows"), size=2)
    found += ranks.run(compare_part, second, references("rows"), size=3)
    row = judge("ddp>zero3", found)
    assert (row.status, row.reason) == ("equal", "")


def noted(folder: Path, plan: str, steps: int) -> int:
    """Notes in a file of this process how many samples it collates after the look at the job."""

    def collate(samples: list[Any]) -> Any:
        with (folder / str(os.getpid())).open("a") as file:
            file.write("\n".join(str(sample["number"]) for sample in samples) + "\n")
        return decoded(samples)

    with evenly.start(decoding_job(eval_data=None, collate=collate, steps=steps), plan=plan) as run:
        (folder / str(os.getpid())).unlink(missing_ok=True)
        for batch in run.batches():
            run.step(batch)
    return os.getpid()


def test_each_sample_is_put_together_where_it_is_trained_on(ranks: KeptRanks, tmp_path: Path) -> None:
    pids = ranks.run(noted, tmp_path, "ddp", 3, size=2)
    by_rank = [(tmp_path / str(pid)).read_text().split() for pid in pids]
    assert [len(one) > 5 for one in by_rank] == [True, True]
    assert Counter(by_rank[0] + by_rank[1]) == Counter(map(str, range(23)))


def torn(samples: list[Any]) -> Any:
    if any(sample["y"] == 9 for sample in samples):
        raise ValueError("no picture")
    return decoded(samples)


def bad_rows() -> Iterator[Any]:
    for number, row in enumerate(rows()):
        yield {**row, "y": 9} if number == 15 else row


def run_torn() -> None:
    with evenly.start(decoding_job(data=bad_rows, eval_data=None, collate=torn), plan="ddp") as run:
        for batch in run.batches():
            run.step(batch)


def test_a_sample_that_cannot_be_put_together_is_named(ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure) as failed:
        ranks.run(run_torn, size=2)
    assert "(sample 15 does not fit the others)" in str(failed.value) and "no picture" in str(failed.value)
