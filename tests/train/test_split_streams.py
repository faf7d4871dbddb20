"""Streams that libraries split by rank: whole where they are read, refused where they were split before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs_streams import PointStream, points_job
from kept_ranks import KeptRanks, RankFailure

import evenly
from evenly.data.alone import all_ranks, alone
from evenly.data.split_streams import held_by, split_path
from evenly.errors import UserError
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_steps, keep_reference
from evenly.verify.tasks import PlanSteps

STEPS = 5  # of 23 samples in batches of 10, the third is short; the fourth begins an epoch


# ------------------------------------------------------------------------------------------- reading as one
class Splitting(torch.utils.data.IterableDataset[Any]):
    """Yields every nth point of those that its process is to read, as torch.distributed or the environment has it."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[Any]:
        rank, size = 0, 1
        if self.by == "environment":
            rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        elif dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        for number, point in enumerate(PointStream(23)):
            if number % size == rank:
                yield point


def in_workers() -> Any:
    """Workers inherit what the process that forks them finds."""
    return iter(torch.utils.data.DataLoader(Splitting("torch"), batch_size=None, num_workers=1))


STREAMS: dict[str, Any] = {
    "torch": Splitting("torch"),
    "environment": Splitting("environment"),
    "made by a function": lambda: iter(Splitting("torch")),
    "workers": in_workers,
}


def losses(name: str, plan: str) -> list[float]:
    job = points_job(data=STREAMS[name], eval_data=Splitting("torch"), steps=STEPS)
    with evenly.start(job, plan=plan) as run:
        found = [run.step(batch).loss for batch in run.batches()]
        return [*found, run.evaluate().loss]


@pytest.mark.parametrize("name", [*STREAMS])
def test_what_asks_for_its_rank_reads_all_samples(name: str, ranks: KeptRanks) -> None:
    alone_losses = ranks.run(losses, name, "single", size=1)[0]
    assert ranks.run(losses, name, "ddp", size=2)[0] == pytest.approx(alone_losses, rel=1e-5)


def asked() -> tuple[Any, ...]:
    return dist.is_initialized(), dist.get_rank(), dist.get_world_size()


@all_ranks()
def asked_by_torch() -> tuple[Any, ...]:
    return asked()


def asked_by_threads() -> list[tuple[Any, ...]]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, alone():
        return [asked(), pool.submit(asked).result(), pool.submit(asked_by_torch).result()]


def within_and_after() -> tuple[Any, ...]:
    from kept_ranks import group_of_all

    with group_of_all():
        return [asked_by_threads(), asked(), dist.get_rank()]  # type: ignore[return-value]


def test_other_threads_find_one_rank_but_what_torch_asks_all(ranks: KeptRanks) -> None:
    for rank, ((here, elsewhere, by_torch), after, number) in enumerate(ranks.run(within_and_after, size=2)):
        assert here == elsewhere == (False, 0, 1)
        assert by_torch == after == (True, rank, 2) and number == rank


# ------------------------------------------------------------------------------------------- split before
class Part(PointStream):
    """Remembers for which rank it was made."""

    def __init__(self, rank: int) -> None:
        super().__init__(23)
        self.options = {"rank": rank, "seed": 4}


class Files(PointStream):
    def __init__(self, files: list[str]) -> None:
        super().__init__(23)
        self.files = files


def with_default(rank: int) -> Any:
    def read(number: int = rank) -> Iterator[Any]:
        return iter(Part(number))

    return read


FILES = [f"{number}.tar" for number in range(5)]
MADE: dict[str, tuple[Callable[[int], Any], str]] = {
    "whole": (lambda rank: Files(FILES), ""),
    "the rank": (Part, "options.rank"),
    "files of the rank": (lambda rank: Files(FILES[rank::2]), "files"),
    "a function": (lambda rank: lambda: iter(Part(rank)), "rank"),
    "a default": (lambda rank: with_default(rank), "default 0"),
    "a partial": (lambda rank: partial(Part, rank), "args.0"),
    "deeper": (lambda rank: evenly.data.packed(Files(FILES[rank::2]), 4), "_stream.files"),
    "left files": (lambda rank: Files(FILES[rank:]), ""),  # rank 0 has read none, or others have
    "seeds": (lambda rank: Part(10 * rank), ""),
    "one file": (lambda rank: Files(FILES[rank : rank + 1]), "files"),
}


@pytest.mark.parametrize("name", [*MADE])
def test_what_was_made_of_the_rank_is_found(name: str) -> None:
    make, path = MADE[name]
    assert split_path([held_by(make(rank)) for rank in range(2)]) == path
    assert split_path([held_by(make(0))]) == ""


def test_large_streams_are_not_walked_through() -> None:
    class Large(PointStream):
        tokens: Any

    stream = Large(3)
    stream.tokens = [[1] * 1000] * 100_000
    stream.tokens.append(stream)
    assert len(held_by(stream)) < 200


def run_part(split: str) -> None:
    rank = int(os.environ["RANK"])
    job = points_job(data=Part(rank) if split == "data" else PointStream(23), eval_data=None)
    if split == "eval_data":
        job = points_job(data=PointStream(23), eval_data={"test": Files(FILES[rank::2])})
    with evenly.start(job, plan="ddp") as run:
        for batch in run.batches():
            run.step(batch)


@pytest.mark.parametrize(("split", "path"), [("data", "options.rank"), ("eval_data", "files")])
def test_a_part_is_refused_on_all_ranks(split: str, path: str, ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure) as failed:
        ranks.run(run_part, split, size=2)
    assert str(failed.value).count(f"it was split already: {path} follows from the rank") == 2


# ------------------------------------------------------------------------------------------- datasets
def rows_of(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    for number in range(4):
        (folder / f"{number}.jsonl").write_text("\n".join(json.dumps({"x": 10 * number + n}) for n in range(10)))
    files = [str(folder / f"{number}.jsonl") for number in range(4)]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))


def test_a_dataset_that_is_split_by_node_is_found(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    from datasets.distributed import split_dataset_by_node  # takes a second to import

    def split(rank: int, size: int) -> str:
        part: Any = evenly.data.packed(split_dataset_by_node(rows, rank=rank, world_size=size).map(len), 4)
        return split_path([held_by(part), held_by(part)])

    assert split(0, 1) == ""
    assert split(1, 2) == split(0, 2) == "_stream._distributed.world_size"


def test_shards_of_the_rank_are_found(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    parts = [held_by(rows.map(len).shard(num_shards=2, index=rank).shuffle(seed=1)) for rank in range(2)]
    assert split_path(parts).endswith("files")
    assert split_path([held_by(rows.map(len)), held_by(rows.map(len))]) == ""


# ------------------------------------------------------------------------------------------- webdataset
def shards_in(folder: Path) -> list[str]:
    """23 points in shards of 7, 3, 8 and 5."""
    wds = pytest.importorskip("webdataset")
    torch.manual_seed(0)
    points = iter(PointStream(23))
    for shard, count in enumerate((7, 3, 8, 5)):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(count):
                x, y = next(points)
                writer.write({"__key__": f"{shard}-{number}", "x.npy": x.numpy(), "cls": int(y)})
    return [str(folder / f"{shard}.tar") for shard in range(4)]


def web_points(urls: list[str], splitter: str) -> Any:
    wds: Any = pytest.importorskip("webdataset")
    kept = {"nodesplitter": wds.split_by_node} if splitter == "split_by_node" else {}
    return wds.WebDataset(urls, shardshuffle=False, seed=0, **kept).decode().to_tuple("x.npy", "cls")


def web_job(urls: list[str], splitter: str) -> evenly.Job:
    data = web_points(urls, splitter)
    return points_job(data=data, eval_data=data, precision="float64")


def web_reference(urls: list[str], folder: Path) -> None:
    keep_reference(web_job(urls, "none"), STEPS, folder / "reference")


def compare_web(urls: list[str], splitter: str, part: PlanSteps, folder: Path) -> RankComparison:
    return compare_steps(web_job(urls, splitter), part, STEPS, folder)


@pytest.mark.parametrize("splitter", ["none", "split_by_node"])
def test_webdataset_is_read_whole_and_gone_on_from(splitter: str, ranks: KeptRanks, tmp_path: Path) -> None:
    urls = shards_in(tmp_path)
    ranks.run(web_reference, urls, tmp_path, size=1)
    parts = [PlanSteps("ddp", 0, 2, tmp_path / "run"), PlanSteps("zero3", 2, STEPS, tmp_path / "run")]  # type: ignore[arg-type]
    found = [one for part in parts for one in ranks.run(compare_web, urls, splitter, part, tmp_path, size=2)]
    row = judge("ddp>zero3", found)
    assert (row.status, row.reason) == ("equal", "")


def test_a_webdataset_that_is_shuffled_by_the_clock_is_refused(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    points = web_points(["0.tar"], "none")
    for seeded in (points.shuffle(9, seed=3), points.compose(wds.detshuffle(9, seed=3))):
        points_job(data=seeded)
    with pytest.raises(UserError, match="data is shuffled by webdataset without a seed"):
        points_job(data=points.shuffle(9))


def torn_web(urls: list[str]) -> None:
    with evenly.start(web_job(urls, "split_by_node"), plan="ddp") as run:
        for batch in run.batches():
            run.step(batch)


def test_a_torn_shard_is_named_on_all_ranks(ranks: KeptRanks, tmp_path: Path) -> None:
    urls = shards_in(tmp_path)
    Path(urls[2]).write_bytes(Path(urls[2]).read_bytes()[:3000])
    with pytest.raises(RankFailure) as failed:
        ranks.run(torn_web, urls, size=2)
    assert str(failed.value).count("of the stream, in epoch 1") == 2 and "2.tar" in str(failed.value)


def test_files_of_each_rank_s_own_content_are_no_copies(tmp_path: Path) -> None:
    def found(*texts: str) -> str:
        held = []
        for folder, text in zip(("xa", "by", "qc"), texts, strict=False):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "train.jsonl").write_text(text)
            held.append(held_by({"files": [str(tmp_path / folder / "train.jsonl")]}))
        return split_path(held)

    assert found("same", "same", "same") == ""
    assert found("mine", "other's") == "files"


def test_files_in_a_folder_of_each_rank_are_copies_unless_it_has_the_rank_s_number() -> None:
    def found(*folders: str) -> str:
        return split_path([{"files": [f"{folder}/a.jsonl", f"{folder}/b.jsonl"]} for folder in folders])

    assert found("/tmp/tmpx1kq", "/tmp/tmp7fzz", "/tmp/tmpqq3a") == ""
    assert found("/data/rank0", "/data/rank1") == "files"
    assert split_path([{"files": ["/tmp/tmpx1kq/a.jsonl"]}, {"files": ["/tmp/tmp7fzz/b.jsonl"]}]) == "files"
