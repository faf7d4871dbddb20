"""Which microbatches a rank runs at each step, and loading their samples.

Samples of a dataset are known by their index, those of a stream by their number in it (`stream_reader`). Of a stream
only the first batch is known here, whatever the step; `train/streaming` reads it in order.

The decision (`share_of_step`) is pure. The loader uses torch's DataLoader with one work item per microbatch, so that a
rank reads only its own share and workers can read ahead; without workers it reads in the rank itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from evenly.data.generators import undisturbed
from evenly.data.microbatch import cut, padded_cost
from evenly.data.order import batch_indices, steps_per_epoch
from evenly.data.sample_reader import Microbatch, MicrobatchItem, SampleReader, UncollatedMicrobatch
from evenly.data.sampler_order import SamplerOrder, sampler_order
from evenly.data.share import deal, deal_by_speed
from evenly.data.stream import stream_key
from evenly.data.stream_reader import StreamBatch, StreamReader
from evenly.errors import SampleError, UserError
from evenly.job import Job, is_stream


@dataclass(frozen=True)
class Share:
    """What one rank runs of one pass (a training step, or an evaluation).

    step:         number of the step, from 0.
    microbatches: the sample indices of every microbatch of the pass, all ranks'.
    own:          the numbers of the microbatches that this rank runs, ascending.
    rounds:       the most microbatches that any rank runs.
    fillers:      microbatches that this rank runs after its own without counting them, see `filled`.
    costs:        the padded cost of every microbatch, where the job has costs.
    first:        number of the first of `microbatches`, where they are not all of an evaluation.
    """

    step: int
    microbatches: list[list[int]]
    own: list[int]
    rounds: int
    fillers: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()
    first: int = 0

    @property
    def samples(self) -> int:
        """Samples of the pass, all ranks'."""
        return sum(map(len, self.microbatches))

    @property
    def runs(self) -> int:
        return len(self.own) + len(self.fillers)

    def filled(self) -> Share:
        """The share padded with fillers, for plans with collectives inside the model: all ranks run equally many.

        A filler repeats the rank's last microbatch (the first of the pass if it has none), with weight zero.
        """
        filler = self.own[-1] if self.own else 0
        return replace(self, fillers=(filler,) * (self.rounds - len(self.own)))


class CutBatch:
    """The batch of a step, cut into microbatches: the job's own, whatever the plan.

    microbatches: their samples. lengths: those of their samples, where the job has costs.
    """

    def __init__(self, job: Job, step: int, indices: Sequence[int], costed: Sequence[Any]) -> None:
        """costed: what the job's cost takes for each of `indices`."""
        self.step, self.lengths = step, None
        if job.cost is None:
            self.microbatches = cut(indices, size=job.samples_per_microbatch)
            return
        size = job.samples_per_microbatch if job.microbatch or job.microbatch_cost is None else None
        costs = [job.cost(one) for one in costed]
        places = cut(range(len(indices)), size=size, costs=costs, budget=job.microbatch_cost)
        self.microbatches = [[indices[place] for place in group] for group in places]
        self.lengths = [[costs[place] for place in group] for group in places]

    def shares(self, ranks: int, speeds: Sequence[float] = ()) -> list[Share]:
        """What each of `ranks` runs: balanced by padded cost if the job has costs, else by samples.

        Padded cost x length is balanced second, so that work that is quadratic in the length is even too. speeds: of
        the ranks, where they differ.
        """
        costs = () if self.lengths is None else tuple(map(padded_cost, self.lengths))
        if speeds:
            dealt = deal_by_speed(costs or [float(len(one)) for one in self.microbatches], speeds)
        elif self.lengths is None:
            dealt = _dealt_by_samples(tuple(map(len, self.microbatches)), ranks)
        else:
            squares = [cost * max(group) for cost, group in zip(costs, self.lengths, strict=True)]
            dealt = deal(costs, ranks, squares)
        return [_share(self.step, self.microbatches, dealt, rank, costs) for rank in range(len(dealt))]


class StreamedBatch(CutBatch):
    """A cut batch whose samples are here.

    collate: the job's own, or None. sample_of: by number.
    """

    collate: Any
    sample_of: Mapping[int, Any]

    @abstractmethod
    def item(self, number: int) -> MicrobatchItem:
        """What microbatch `number` is made of."""

    def uncollated(self, number: int) -> UncollatedMicrobatch:
        """Microbatch `number`, with its samples apart."""
        item = self.item(number)
        return UncollatedMicrobatch(item, [self.sample_of[one] for one in item.indices])

    def microbatch(self, number: int) -> Microbatch:
        """Microbatch `number`, collated. Raises `SampleError`."""
        return self.uncollated(number).collated(self.collate)


class CutStreamBatch(StreamedBatch):
    """A batch of a stream, cut into microbatches."""

    def __init__(self, job: Job, step: int, batch: StreamBatch) -> None:
        super().__init__(job, step, batch.numbers, batch.samples)
        self.batch, self.collate, self._seed = batch, job.collate, job.seed
        self.sample_of = dict(zip(batch.numbers, batch.samples, strict=True))

    def item(self, number: int) -> MicrobatchItem:
        return MicrobatchItem(
            number,
            self.microbatches[number],
            stream_key(self._seed, "data", self.step, number),
            counts=True,
            epoch=self.batch.after.epoch,
        )


class HeldStream:
    """A stream whose first batch is read once and held, for all that look at it before training does.

    data: the stream itself.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self._reader: StreamReader | None = None
        self._first: StreamBatch | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data if hasattr(self.data, "__iter__") else self.data())

    def first(self, job: Job) -> StreamBatch:
        if self._first is None:
            self._reader = StreamReader.of(replace(job, data=self.data))
            self._first = self._reader.read()
        return self._first

    def take(self, job: Job) -> tuple[StreamBatch, StreamReader]:
        first, reader = self.first(job), self._reader
        assert reader is not None
        self._first = self._reader = None
        return first, reader


def holding_first(job: Job) -> Job:
    """`job`, whose stream, if it has one, is read for its first batch once only."""
    return replace(job, data=HeldStream(job.data)) if job.streams and not isinstance(job.data, HeldStream) else job


def cut_batch(job: Job, step: int) -> CutBatch:
    """The batch of step `step` (from 0), cut; of a stream, its first batch."""
    if job.streams:
        return first_batch(job)
    indices = indices_of_step(job, step)
    return CutBatch(job, step, indices, indices)


def _order(job: Job) -> SamplerOrder | None:
    if job.order is None:
        return None
    batched = job.batch_sampler is not None
    return sampler_order(job.order, seed=job.seed, size=job.global_batch, length=job.length, batched=batched)


def indices_of_step(job: Job, step: int) -> list[Any]:
    """The indices of the batch of `step`, in order: as the job's sampler has them, else by the rule of `order`."""
    if (order := _order(job)) is not None:
        return order.batch(step)
    size = job.global_batch
    return batch_indices(seed=job.seed, step=step, length=job.length, global_batch=size, shuffle=job.shuffle)


def epoch_of_step(job: Job, step: int) -> int:
    """Return the epoch of `step` of a job whose data have indices, both from 0."""
    order = _order(job)
    return step // steps_per_epoch(job.length, job.global_batch) if order is None else order.epoch(step)


def first_batch(job: Job) -> CutStreamBatch:
    """The first batch of the job's stream, cut; drawing as in the first step."""
    held = job.data if isinstance(job.data, HeldStream) else HeldStream(job.data)
    with undisturbed():
        return CutStreamBatch(job, 0, held.first(job))


def microbatches_of_step(job: Job, step: int) -> list[list[int]]:
    """The microbatches of step `step` (from 0), as lists of sample indices: the job's own, whatever the plan."""
    return cut_batch(job, step).microbatches


def microbatches_of_evaluation(job: Job) -> list[list[int]]:
    """The evaluation samples in their own order, counted into microbatches; each exactly once. Of a stream, the first
    microbatch.
    """
    assert job.eval_data is not None
    if is_stream(job.eval_data):
        return [first_evaluated(job).numbers]
    return cut(list(range(len(job.eval_data))), size=job.samples_per_microbatch)  # pyright: ignore[reportArgumentType]


def first_evaluated(job: Job) -> StreamBatch:
    """The first microbatch of the stream that `job` evaluates. Raises `UserError` where it has no samples."""
    with undisturbed():
        found = StreamReader.of_evaluation(job).read_in_epoch()
    if found is None:
        raise no_evaluation_samples()
    return found


class EvaluatedBatch(StreamedBatch):
    """Consecutive microbatches of an evaluation stream; `first` is the number of the first of them."""

    def __init__(self, job: Job, first: int, batches: Sequence[StreamBatch]) -> None:
        self.step, self.lengths, self.first = 0, None, first
        self.microbatches = [batch.numbers for batch in batches]
        self.collate, self._seed = job.collate, job.seed
        self.sample_of = {n: one for batch in batches for n, one in zip(batch.numbers, batch.samples, strict=True)}

    def shares(self, ranks: int, speeds: Sequence[float] = ()) -> list[Share]:
        return [replace(share, first=self.first) for share in super().shares(ranks, speeds)]

    def item(self, number: int) -> MicrobatchItem:
        place = self.first + number
        return MicrobatchItem(
            place, self.microbatches[number], stream_key(self._seed, "evaluation data", 0, place), counts=True
        )


def no_evaluation_samples() -> UserError:
    """The error of an evaluation stream that ends before its first sample."""
    return UserError("the stream eval_data", "it has no samples", "look for what leaves out all of them")


def share_of_step(job: Job, step: int, *, rank: int, ranks: int, speeds: Sequence[float] = ()) -> Share:
    return cut_batch(job, step).shares(ranks, speeds)[rank]


def idle_ranks(job: Job, ranks: int) -> int:
    """Return how many of `ranks` have no microbatch of a whole batch; 0 where costs of a stream would have to tell."""
    if job.microbatch_cost is None:
        return max(0, ranks + -job.global_batch // job.samples_per_microbatch)
    return 0 if job.streams or ranks == 1 else max(0, ranks - len(cut_batch(job, 0).microbatches))


def share_of_samples(job: Job, count: int, step: int, *, rank: int, ranks: int, speeds: Sequence[float] = ()) -> Share:
    """What `rank` of `ranks` runs of `count` samples that a loop has made for `step`: in their order, counted into
    microbatches, since the job's costs are of its own data.
    """
    microbatches = cut(list(range(count)), size=job.samples_per_microbatch)
    counts = tuple(map(len, microbatches))
    dealt = deal_by_speed([*map(float, counts)], speeds) if speeds else _dealt_by_samples(counts, ranks)
    return _share(step, microbatches, dealt, rank)


def share_of_evaluation(job: Job, *, rank: int, ranks: int) -> Share:
    microbatches = microbatches_of_evaluation(job)
    return _share(0, microbatches, _dealt_by_samples(tuple(map(len, microbatches)), ranks), rank)


@lru_cache(maxsize=64)  # hardly a batch differs from the one before
def _dealt_by_samples(counts: tuple[int, ...], ranks: int) -> list[list[int]]:
    return deal([float(count) for count in counts], ranks)


def _share(
    step: int, microbatches: list[list[int]], shares: list[list[int]], rank: int, costs: tuple[float, ...] = ()
) -> Share:
    return Share(step, microbatches, shares[rank], rounds=max(map(len, shares)), costs=costs)


def worker_count(*, cores: int, local_ranks: int, device: str) -> int:
    """Loader processes per rank: four on a GPU, but never more than the rank's share of the cores.

    On the CPU none: ranks need the cores themselves, and reading takes less than computing there.
    """
    return min(4, cores // local_ranks) if device.startswith("cuda") else 0


def _samples_by_index(job: Job, *, evaluation: bool) -> Any:
    data = job.eval_data if evaluation else job.data
    if not is_stream(data):
        return data
    first = first_evaluated(job) if evaluation else first_batch(job).batch
    return dict(zip(first.numbers, first.samples, strict=True))


def _as_read(item: Any) -> Any:
    return item


def _begin_worker(dtype: torch.dtype, _: int) -> None:
    torch.set_default_dtype(dtype)


class Loader:
    """Microbatches of consecutive shares of one dataset, in order."""

    def __init__(
        self,
        job: Job,
        *,
        evaluation: bool = False,
        samples: Sequence[Any] | None = None,
        workers: int = 0,
        pin: bool = False,
        prefetch: int | None = None,
    ) -> None:
        """samples: to read in place of the job's data."""
        self._seed, self._word = job.seed, "evaluation data" if evaluation else "data"
        data = _samples_by_index(job, evaluation=evaluation) if samples is None else samples
        self._reader = SampleReader(data, job.collate)
        self._workers, self._pin, self._prefetch = workers, pin, prefetch or 2
        self._job = job if not evaluation and samples is None and not job.streams else None
        self._step, self._epoch = -1, None

    def read(self, shares: Iterator[Share]) -> MicrobatchStream:
        """The rank's own microbatches of all `shares`, in order.

        Reading seeds the generators of the process that reads, this one unless there are workers.
        """
        items = (
            self._item(share, number, counts=counts)
            for share in shares
            for numbers, counts in ((share.own, True), (share.fillers, False))
            for number in numbers
        )
        return MicrobatchStream(self._with_workers(items) if self._workers else map(self._reader.__getitem__, items))

    def samples(self, share: Share) -> list[Any]:
        """The samples of all ranks' microbatches of `share`, in order, as they are read for training."""
        with undisturbed():
            items = [self._item(share, number) for number in range(len(share.microbatches))]
            return [sample for item in items for sample in self._reader.samples(item)]

    def _item(self, share: Share, number: int, *, counts: bool = True) -> MicrobatchItem:
        key = stream_key(self._seed, self._word, share.step, number)
        if self._job is not None and share.step != self._step:
            self._step, self._epoch = share.step, epoch_of_step(self._job, share.step)
        return MicrobatchItem(number, share.microbatches[number], key, counts, self._epoch)

    def _with_workers(self, items: Iterator[MicrobatchItem]) -> Iterator[Microbatch | SampleError]:
        loader: DataLoader[Microbatch | SampleError] = DataLoader(
            self._reader,
            batch_size=None,
            sampler=_Once(items),
            collate_fn=_as_read,
            num_workers=self._workers,
            pin_memory=self._pin,
            prefetch_factor=self._prefetch,
            worker_init_fn=partial(_begin_worker, torch.get_default_dtype()),
            generator=torch.Generator(),  # it draws a seed when it starts: not from the code around it
        )
        return iter(loader)


class MicrobatchStream(Iterator[Microbatch]):
    """Microbatches as they are read; raises `SampleError`, which names the sample, in the place of a bad one."""

    def __init__(self, results: Iterator[Microbatch | SampleError]) -> None:
        self._results = results
        self._next: Microbatch | SampleError | None = None

    def ahead(self) -> None:
        """Reads the next microbatch already: good use of a moment in which this rank waits for others."""
        if self._next is None:
            self._next = next(self._results, None)

    def __next__(self) -> Microbatch:
        result, self._next = self._next or next(self._results), None
        if isinstance(result, SampleError):
            try:
                raise result
            finally:
                del result  # this frame and the error would hold each other, and the loader: workers end with it
        return result


class KeptMicrobatches:
    """Microbatches that are read once and run several times. Code may change a batch in place: each run has a copy."""

    def __init__(self, microbatches: MicrobatchStream) -> None:
        self._source, self._kept = microbatches, list[Microbatch]()

    def read(self) -> MicrobatchStream:
        return _FirstRead(self._source, self._kept)

    def again(self) -> MicrobatchStream:
        return MicrobatchStream(one.copied() for one in self._kept)


class _FirstRead(MicrobatchStream):
    """Those of `source`, of each of which a copy goes to `kept`."""

    def __init__(self, source: MicrobatchStream, kept: list[Microbatch]) -> None:
        self._source, self._kept = source, kept

    def ahead(self) -> None:
        self._source.ahead()

    def __next__(self) -> Microbatch:
        microbatch = next(self._source)
        self._kept.append(microbatch.copied())
        return microbatch


class _Once(torch.utils.data.Sampler[Any]):
    """A sampler over an iterator, for one pass."""

    def __init__(self, items: Iterator[MicrobatchItem]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[MicrobatchItem]:
        return self._items
