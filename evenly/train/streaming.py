"""The batches of a stream in a run: rank 0 reads each once, and hands every rank the microbatches that it runs.

A job's own `collate` runs on the rank that runs the microbatch: what takes long there (tokens, pictures) is shared by
all. torch's, which stacks tensors, runs on rank 0, since one large tensor is sent faster than many small ones.

Order: all ranks ask for the same batches in the same order, the next one while the sums of a step are on their way. The
messages have a group of their own. What rank 0 cannot read is raised on all ranks, in the place of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from evenly.checkpoint.plain import encode
from evenly.comm.collectives import gather_values
from evenly.comm.groups import Group
from evenly.comm.hand_out import hand_out, packed, unpacked
from evenly.comm.world import World
from evenly.data.generators import undisturbed
from evenly.data.loader import (
    CutStreamBatch,
    EvaluatedBatch,
    HeldStream,
    Microbatch,
    MicrobatchStream,
    Share,
    StreamedBatch,
    no_evaluation_samples,
)
from evenly.data.sample_reader import UncollatedMicrobatch
from evenly.data.stream_reader import StreamBatch, StreamPlace, StreamReader
from evenly.engine.executor import Batch
from evenly.engine.metrics import unlike_metrics
from evenly.engine.step_totals import StepTotals, joined_totals
from evenly.errors import EvenlyError, ResumeError, RunError, SampleError, UserError, describe
from evenly.job import Job, is_stream

if TYPE_CHECKING:
    from evenly.train.run import Run

EVALUATED_AT_ONCE = 8  # microbatches of each rank of the data axis
Fitted = Callable[[Share], Share]


class _OwnShare:
    """What this rank runs of a batch; `microbatch` makes each of its microbatches, as often as it is asked."""

    def __init__(self, share: Share, microbatch: Callable[[int], Microbatch]) -> None:
        self.share, self._microbatch = share, microbatch

    def __iter__(self) -> Iterator[Microbatch]:
        for number in self.share.own:
            yield self._microbatch(number)
        for number in self.share.fillers:
            yield replace(self._microbatch(number), counts=False)


class StreamHands:
    """Hands batches out from rank 0, which alone has them; every call of `deal` is a collective.

    collate: the job's own, or None.
    """

    def __init__(self, world: World, collate: Callable[..., Any] | None) -> None:
        self._collate = collate
        every: Group = world.group("world")
        self._group = every.open("stream", range(every.size), backend="gloo")
        self._place: int = world.group("data").position
        self._ranks: int = world.group("data").size
        self._places = gather_values(self._place, self._group)  # of all ranks on the data axis
        self.reads = self._group.position == 0

    def deal(
        self, read: Callable[[], StreamedBatch | None], fitted: Fitted, speeds: Sequence[float] = ()
    ) -> _OwnShare | None:
        """This rank's share of what `read`, called on rank 0 alone, returns; None on all ranks where that is None.

        Raises on all ranks what rank 0 raises.
        """
        own: _OwnShare | EvenlyError | None = None
        messages: list[bytes] | None = None
        if self.reads:
            own, messages = self._prepared(read, fitted, speeds)
        message = hand_out(messages, self._group)
        if messages is None:
            own = self._unpacked(message)
        if isinstance(own, EvenlyError):
            raise own
        return own

    def copies(self, make: Callable[[], Any]) -> Any:
        """What `make`, called on rank 0 alone, returns, in a copy of each rank's own; a collective.

        Raises on all ranks what rank 0 raises.
        """
        messages: list[bytes] | None = None
        if self.reads:
            messages = [_packed_result(make)] * self._group.size
        found, problem = unpacked(hand_out(messages, self._group))
        if problem is not None:
            raise problem
        return found

    def _unpacked(self, message: bytes) -> _OwnShare | EvenlyError | None:
        found = unpacked(message)
        if not isinstance(found, tuple):
            return found
        share, parts = found
        return _OwnShare(share, lambda number: self._put_together(unpacked(parts[number])))

    def _put_together(self, part: UncollatedMicrobatch | Microbatch) -> Microbatch:
        return part.collated(self._collate) if isinstance(part, UncollatedMicrobatch) else part

    def _prepared(
        self, read: Callable[[], StreamedBatch | None], fitted: Fitted, speeds: Sequence[float]
    ) -> tuple[_OwnShare | EvenlyError | None, list[bytes]]:
        try:
            with undisturbed():
                batch = read()
                if batch is None:
                    return None, [packed(None)] * len(self._places)
                shares = [fitted(share) for share in batch.shares(self._ranks, speeds)]
                others = set(self._places[1:])
                messages = {place: _packed(shares[place], batch) for place in sorted(others)}
        except EvenlyError as problem:
            return problem, [packed(problem)] * len(self._places)
        return _OwnShare(shares[self._place], batch.microbatch), [messages.get(place, b"") for place in self._places]


def _packed_result(make: Callable[[], Any]) -> bytes:
    """What `make` returns, and None; or None, and what it raises."""
    try:
        with undisturbed():
            return _packed_values((make(), None))
    except EvenlyError as problem:
        return packed((None, problem))


def _packed(share: Share, batch: StreamedBatch) -> bytes:
    return packed((share, {number: _packed_part(batch, number) for number in {*share.own, *share.fillers}}))


def _packed_part(batch: StreamedBatch, number: int) -> bytes:
    """The samples of a microbatch; put together, where the job leaves that to torch, or where they cannot be sent."""
    if batch.collate is not None:
        with suppress(SampleError):
            return _packed_values(batch.uncollated(number))
    return _packed_values(batch.microbatch(number))


def _packed_values(value: Any) -> bytes:
    try:
        return packed(value)
    except Exception as problem:
        raise SampleError(
            "handing samples of the stream to another rank",
            describe(problem),
            "let the stream and collate return tensors and plain values",
        ) from problem


class StreamFeed:
    """The training batches of a stream, one for each time that a loop asks for one. Made on all ranks, before the first
    look at the job.

    A batch is read and dealt while the one before it is trained on. Where the loop trains on others first, it is dealt
    again, for the step that it comes to. job: with a `HeldStream`. steps: length of the run.
    """

    def __init__(self, job: Job, hands: StreamHands, steps: int) -> None:
        self._job, self._hands, self._steps = job, hands, steps
        self._fitted: Fitted = lambda share: share
        self._speeds: Sequence[float] = ()
        self._reader: StreamReader | None = None
        self._resumed: StreamPlace | None = None
        self._given: _OwnShare | None = None  # the last batch that the loop got
        self._next: _OwnShare | EvenlyError | None = None  # what follows it, once it was read
        # On rank 0: the place before the batch that was given, that batch, and the one that was read after it.
        self._before = StreamPlace()
        self._given_batch: StreamBatch | None = None
        self._next_batch: StreamBatch | None = None

    def look(self) -> list[Microbatch]:
        """The first and the last microbatch of the first batch, on every rank. An error is raised on all."""
        found = self._hands.deal(self._first, lambda share: replace(share, own=[0, len(share.microbatches) - 1]))
        assert found is not None
        return [*found]

    def begin(self, fitted: Fitted, speeds: Sequence[float]) -> None:
        """How batches are dealt from now on. fitted: a share -> what is run of it. speeds: of the ranks."""
        self._fitted, self._speeds = fitted, speeds

    def batch(self, step: int) -> Batch:
        """This rank's share of the batch for `step`: the next of the stream, or that of `step` again. A collective."""
        if self._given is None or self._given.share.step != step:
            self._go_on(step)
        own = self._given
        assert own is not None
        source = _FedSource(own, lambda: self._samples(step))
        return Batch(own.share, _FedMicrobatches(own, partial(self._read_ahead, step + 1)), source)

    def place(self, steps_done: int) -> dict[str, Any] | None:
        """Where the stream is after so many steps, as values of a checkpoint; on rank 0 alone.

        A batch that the loop got for a step that is done counts as read, whatever the step was trained on.
        """
        if not self._hands.reads:
            return None
        place, following = self._before, self._given_batch or self._next_batch
        if self._given is not None and self._given_batch is not None and self._given.share.step < steps_done:
            place, following = self._given_batch.after, self._next_batch
        digest = place.digest if following is None else following.digest
        return asdict(replace(place, state=_as_value(place.state), digest=digest))

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Goes on where a checkpoint was saved; it is read to there with the next batch."""
        self._resumed = self._before = StreamPlace(**place)
        self._given = self._next = self._given_batch = self._next_batch = None

    def _go_on(self, step: int) -> None:
        if isinstance(self._next, _OwnShare) and self._next.share.step != step:
            self._next = None  # dealt for a step that was trained on others
        self._deal(step)
        if isinstance(self._next, EvenlyError):
            raise self._next
        if self._given_batch is not None:
            self._before = self._given_batch.after
        self._given, self._given_batch = self._next, self._next_batch
        self._next = self._next_batch = None

    def _read_ahead(self, step: int) -> None:
        if step < self._steps:
            self._deal(step)

    def _deal(self, step: int) -> None:
        """Has the batch after the one that was given dealt for `step`, unless it is."""
        if self._next is not None:
            return
        try:
            self._next = self._hands.deal(lambda: self._cut(step), self._fitted, self._speeds)
        except EvenlyError as problem:
            self._next = problem

    def _samples(self, step: int) -> list[Any]:
        """The samples of the batch that was given for `step`, in the order of its microbatches, on all ranks."""
        given = self._given
        if given is None or given.share.step != step:
            found, do = "the loop got another batch since", "ask for the samples before the next batch"
            raise RunError(f"the samples of the batch of step {step + 1} of a stream", found, do)
        return self._hands.copies(lambda: self._samples_given(given.share))

    def _samples_given(self, share: Share) -> list[Any]:
        assert self._given_batch is not None
        sample = dict(zip(self._given_batch.numbers, self._given_batch.samples, strict=True))
        return [sample[number] for microbatch in share.microbatches for number in microbatch]

    def _first(self) -> CutStreamBatch:
        assert isinstance(self._job.data, HeldStream)
        return CutStreamBatch(self._job, 0, self._job.data.first(self._job))

    def _cut(self, step: int) -> CutStreamBatch:
        self._next_batch = self._next_batch or self._read()
        return CutStreamBatch(self._job, step, self._next_batch)

    def _read(self) -> StreamBatch:
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            self._reader, found = _read_at(self._job, resumed)
            return found
        if self._reader is None:
            assert isinstance(self._job.data, HeldStream)
            first, self._reader = self._job.data.take(self._job)
            return first
        return self._reader.read()


def open_streams(job: Job, world: World, steps: int) -> tuple[StreamHands | None, StreamFeed | None]:
    """What hands out the streams of `job` in a run of so many `steps`, and feeds it its data; each where it has such.

    A collective, where it has streams.
    """
    if not job.streams and not any(map(is_stream, job.eval_sets.values())):
        return None, None
    hands = StreamHands(world, job.collate)
    return hands, StreamFeed(job, hands, steps) if job.streams else None


def _read_at(job: Job, place: StreamPlace) -> tuple[StreamReader, StreamBatch]:
    """A reader that has gone on at `place`, and the batch there, which must be the one that followed, if that is known.

    A stream's own state may lose something (a shuffle buffer of its own): then, and where what followed is not known
    (after the last step of a run), what was read is read again. Raises `ResumeError` where the stream is another then.
    """
    by_state = place.state is not None and place.digest != ""
    ways = [*[place] * by_state, replace(place, state=None)]
    assert isinstance(job.data, HeldStream)
    for way in ways:
        reader = StreamReader.of(replace(job, data=job.data.data))
        try:
            reader.go_to(way)
            found = reader.read()
        except Exception:
            if way is ways[-1]:
                raise
            continue
        if place.digest in ("", found.digest):
            return reader, found
    raise ResumeError(
        f"going on after {place.samples} samples of epoch {place.epoch + 1} of the stream",
        "the samples that come next are others than when the checkpoint was saved",
        "resume with the same data; let the stream draw from torch, random and numpy, which are seeded, not from a "
        "generator of its own",
    )


def _as_value(state: Any) -> Any:
    try:
        encode(state, "the state of the stream")
    except UserError:
        return None
    return state


class _FedMicrobatches(MicrobatchStream):
    """The microbatches of one step; `ahead` reads the next batch."""

    def __init__(self, own: _OwnShare, read_ahead: Callable[[], None]) -> None:
        super().__init__(iter(own))
        self._read_ahead = read_ahead

    def ahead(self) -> None:
        """Reads the batch of the next step already; all ranks call it at the same place of a step."""
        self._read_ahead()


class _FedSource:
    """What has the samples of one batch of a stream, or of some microbatches of an evaluation."""

    def __init__(self, own: _OwnShare, samples: Callable[[], list[Any]]) -> None:
        self._own, self._samples = own, samples

    def read(self, shares: Iterator[Share]) -> MicrobatchStream:
        return MicrobatchStream(iter(self._own))

    def samples(self, share: Share) -> list[Any]:
        """The samples of all ranks' microbatches, in order; a collective."""
        return self._samples()


def evaluate_stream(run: Run, job: Job, hands: StreamHands) -> tuple[StepTotals, Share]:
    """Evaluates the one set of `job`, a stream, from its begin to its end, some microbatches of each rank at a time."""
    at_once = EVALUATED_AT_ONCE * run.world.group("data").size
    reader, totals, shares = StreamReader.of_evaluation(job), list[StepTotals](), list[Share]()
    first = 0

    def read() -> EvaluatedBatch | None:
        found = [one for one in (reader.read_in_epoch() for _ in range(at_once)) if one is not None]
        return EvaluatedBatch(job, first, found) if found else None

    while (own := hands.deal(read, run.fitted)) is not None:
        totals.append(run.executor.evaluate(Batch(own.share, MicrobatchStream(iter(own)), _FedSource(own, list))))
        shares.append(own.share)
        first += len(own.share.microbatches)
    if not totals:
        raise no_evaluation_samples()
    _check_names(totals, shares)
    return joined_totals(totals), replace(
        shares[0], microbatches=[*chain.from_iterable(share.microbatches for share in shares)]
    )


def _check_names(totals: Sequence[StepTotals], shares: Sequence[Share]) -> None:
    """Raises `RunError` where microbatches that were evaluated one after the other have other metrics."""
    names = sorted(totals[0].metrics)
    for found, share in zip(totals, shares, strict=True):
        if sorted(found.metrics) != names:
            raise unlike_metrics(0, names, share.first, sorted(found.metrics))
