"""What `collectives` and `operations` are made of: works under way, and tensors as backends carry them."""

from __future__ import annotations

import os
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from time import perf_counter, sleep
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from evenly.comm.groups import Group
from evenly.errors import RunError, UserError
from evenly.observe.diagnosis import disagreement
from evenly.observe.recorder import LONGEST_TEXT, call_from, call_text, here
from evenly.observe.timings import Timing
from evenly.torch_private import all_gather_single, begin_all_gather

DTYPES = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
# On the CPU a rank that waits for a collective polls it for so long, yielding its core, before it sleeps.
POLL_S = 0.002
WORTH_NUMPY = 1 << 14  # elements
FEW_BYTES = 1 << 14  # of a rank, that cross in turns as fast; gloo's own works can be polled
_TAG = 1 << 30  # of messages that collectives are made of; those of `send` have smaller ones
yield_core: Callable[[], None] = getattr(os, "sched_yield", lambda: sleep(0))
Reduction = Literal["sum", "mean", "min", "max", "product"]
P = ParamSpec("P")
T = TypeVar("T")
_TORCH = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
LOCAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
# What no backend reduces, and the type that holds its values and that they do.
_REDUCED_AS = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
REDUCED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    *_REDUCED_AS,
)
ADDED = {torch.float64, torch.float32, torch.bfloat16, torch.float16}  # as they are


class _Work(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...

    def get_future(self) -> Any: ...


class Pending(Generic[T]):
    """An operation that is under way: works of torch, and what remains to be done after them.

    polled: whether `wait` polls the works for a moment; torch does not report the end of messages between two ranks.
    """

    def __init__(
        self, group: Group, serial: int, works: Sequence[_Work], finish: Callable[[], T], *, polled: bool = True
    ) -> None:
        self._group, self._serial = group, serial
        self.timing = timing_of(group, serial)
        if works and self.timing is not None:
            works = watched(works, self.timing, messages=not polled)
        self._works, self._finish = works, finish
        self._polls = polled and group.device.type == "cpu"
        self._result: list[T] = []

    def wait(self) -> T:
        """Returns its result once it is done; may be called again."""
        if not self._result:
            wait_for(self._works, self._group, self._serial, polled=self._polls)
            self._result.append(self._finish())
        return self._result[0]


def wait_for(works: Sequence[_Work], group: Group, serial: int, *, polled: bool) -> None:
    """Waits until `works` are done, and notes the end of the operation `serial`, if it has a number."""
    recorder = group.recorder
    began_s = perf_counter() if recorder is not None else 0.0
    for work in works:
        if polled:  # to wake a thread takes up to milliseconds on a virtual machine, longer than to add a few numbers
            until_s = perf_counter() + POLL_S
            while not work.is_completed() and perf_counter() < until_s:
                yield_core()  # to other threads, the backend's among them
        work.wait()
    if recorder is not None:
        recorder.waited_s += perf_counter() - began_s
        if serial:
            recorder.leave(serial, began_s)


def is_timed(group: Group) -> bool:
    """Whether it is noted when operations of `group` are under way. Works of GPUs are done behind their hosts."""
    if group.recorder is None or group.recorder.timings is None:
        return False
    return group.size > 1 and group.device.type == "cpu"


def timing_of(group: Group, serial: int) -> Timing | None:
    timings = None if group.recorder is None else group.recorder.timings  # read once: any thread may end them
    return None if timings is None else timings.get(serial)


def watched(works: Sequence[_Work], timing: Timing, *, messages: bool) -> Sequence[_Work]:
    """What to wait for in place of `works`, which notes when they are complete, whoever waits.

    messages: whether they are between two ranks, of which torch says nothing before somebody waits: a thread does.
    """
    if messages:
        return [_WatchedMessages(works, timing)]
    for work in works:
        work.get_future().add_done_callback(partial(_complete, timing))
    return works


def _complete(timing: Timing, *_: Any) -> None:
    timing.complete_s = perf_counter()


class _WatchedMessages:
    """Works for which a thread of its own waits."""

    def __init__(self, works: Sequence[_Work], timing: Timing) -> None:
        self._works, self._timing = works, timing
        self._done, self._problem = Event(), list[BaseException]()
        # `Thread.start` waits for the thread, which here is to take nothing of the time that it measures.
        start_new_thread(self._watch, ())

    def _watch(self) -> None:
        try:
            for work in self._works:
                work.wait()
            _complete(self._timing)
        except BaseException as problem:  # raised where the main thread waits
            self._problem.append(problem)
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._problem:
            raise self._problem[0]

    def get_future(self) -> Any:
        raise NotImplementedError


class WorkOfMessages(dist.Work):
    """Works of the CPU, those of the operation `serial`, as one work of torch's; polled: as in `Pending`."""

    def __init__(self, works: Sequence[_Work], group: Group, serial: int, *, polled: bool) -> None:
        super().__init__()
        self._pending = Pending(group, serial, works, lambda: True, polled=polled)

    def wait(self, *_: Any, **__: Any) -> bool:
        """Returns once all are done."""
        return self._pending.wait()


def enter(
    group: Group,
    operation: str,
    tensor: torch.Tensor | None,
    *,
    free: tuple[int, ...] = (),
    detail: str = "",
    label: str = "",
    collective: bool = True,
) -> int:
    """Notes the beginning of an operation, checks it if the group does; the recorder's serial, 0 without one."""
    if group.rank is None or group.closed:
        group.check_talks()
    if tensor is not None and tensor.device.type != group.device.type:
        raise UserError(
            f"{operation} of a tensor on {tensor.device}",
            f"group {group.label} talks about tensors on {group.device.type}",
            "move the tensor there",
        )
    group.operations += collective
    recorder = group.recorder
    if recorder is None and not group.checked:
        return 0
    shape = None if tensor is None else _known_shape(tensor, free) if free else tensor.shape
    dtype = "" if tensor is None else _DTYPE_NAMES[tensor.dtype]
    text = call_text(operation, group.label, dtype, shape, detail, label, here())
    serial = 0
    if recorder is not None:
        serial = recorder.enter(group.operations if collective else 0, text)
        timings = recorder.timings  # read once: any thread may end them
        if timings is not None and is_timed(group):
            timings[serial] = Timing(operation, group.name, label, perf_counter())
    if group.checked and collective and group.size > 1:
        check_call(text, group)
    return serial


def _known_shape(tensor: torch.Tensor, free: tuple[int, ...]) -> tuple[int | None, ...]:
    if not free:
        return tuple(tensor.shape)
    lengths: list[int | None] = list(tensor.shape)
    for dim in free:
        if not -tensor.ndim <= dim < tensor.ndim:
            raise UserError(f"pieces along dim {dim}", f"the tensor has {tensor.ndim} dims", "give a dim it has")
        lengths[dim] = None
    return tuple(lengths)


def detail_of(words: str, sizes: Sequence[int] | None) -> str:
    return words if sizes is None else f"{words} in {list(sizes)}"


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself where its memory is dense and in order, else a copy that is."""
    if tensor.layout is not torch.strided:
        raise UserError("talk about a tensor", f"its layout is {tensor.layout}", "make it dense first")
    return tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is dense and in order, and holds its numbers as they are, which no gradient is asked of."""
    return tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def put_back(landing: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if landing.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(landing)
    return tensor


def delivered(result: torch.Tensor, into: torch.Tensor | None, adding: bool) -> torch.Tensor:
    if into is None:
        return result
    return into.add_(result) if adding else put_back(result, into)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, 1D."""
    return tensor.view(-1).view(torch.uint8)


def works_of(work: Any) -> list[_Work]:
    return [] if work is None else [work]


def post_send(carried: torch.Tensor, to: int, group: Group, tag: int = 0) -> _Work:
    work = dist.isend(carried, group=group.handle, group_dst=to, tag=tag)
    assert work is not None  # this rank is in the group
    return work


def post_recv(landing: torch.Tensor, source: int, group: Group, tag: int = 0) -> _Work:
    work = dist.irecv(landing, group=group.handle, group_src=source, tag=tag)
    assert work is not None  # this rank is in the group
    return work


def carried_as(tensor: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """What is reduced in the place of `tensor`: contiguous, of a type that backends reduce; itself if it can."""
    dtype = tensor.dtype
    if reduction == "sum" and dtype in ADDED:
        return contiguous(tensor)
    asked = f"{reduction} of {dtype} over ranks"
    if reduction not in _TORCH and reduction != "mean":
        raise UserError(asked, "there is no such reduction", "use sum, mean, min, max or product")
    if dtype.is_complex and reduction in ("sum", "mean"):
        return torch.view_as_real(contiguous(tensor))
    if dtype not in REDUCED:
        raise UserError(asked, "it has no meaning or no backend makes it", "convert the tensor first")
    if dtype is torch.bool and reduction in ("sum", "mean"):
        raise UserError(asked, "a sum of booleans is not one", "convert it to an integer, or take max for `any`")
    if reduction == "mean" and not dtype.is_floating_point:
        raise UserError(asked, "a mean of integers is not one", "convert it to a floating type")
    carried = contiguous(tensor)
    return carried.to(_REDUCED_AS[dtype]) if dtype in _REDUCED_AS else carried


def torch_reduction(reduction: Reduction) -> Any:
    return _TORCH["sum" if reduction == "mean" else reduction]  # gloo has no mean


def reduced_back(carried: torch.Tensor, tensor: torch.Tensor, ranks: int, reduction: Reduction) -> torch.Tensor:
    if reduction == "mean":
        carried.div_(ranks)
    if tensor.is_complex():
        carried = torch.view_as_complex(carried.contiguous())
    return put_back(carried, tensor)


def added_up(pieces: Sequence[torch.Tensor], into: torch.Tensor, adding: bool) -> torch.Tensor:
    """In the order of positions, whatever came first."""
    flat = into.view(-1)
    if not adding:
        flat.copy_(pieces[0])
    for piece in pieces if adding else pieces[1:]:
        add(flat, piece)
    return into


def reduced_here(pieces: Sequence[torch.Tensor], dtype: torch.dtype, reduction: Reduction) -> torch.Tensor:
    """In the order of positions, whatever came first; in memory of its own."""
    total = pieces[0].to(dtype, copy=True)
    for piece in pieces[1:]:
        if reduction in ("sum", "mean"):
            add(total, piece)
        else:
            total = LOCAL[reduction](total, piece)
    return total


def with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    lengths = list(shape)
    lengths[dim] = length
    return lengths


def cut_pieces(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(tensor.detach().split(list(sizes), dim))


def sizes_of_cut(tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None, group: Group) -> list[int]:
    _known_shape(tensor, (dim,))
    length = tensor.shape[dim]
    if sizes is None:
        return even_sizes(length, group.size)
    if len(sizes) != group.size or sum(sizes) != length or min(sizes) < 0:
        raise UserError(
            f"{group.size} pieces of a tensor of length {length} along dim {dim}",
            f"sizes {list(sizes)}",
            "give one size per rank, that add up to the length",
        )
    return list(sizes)


def sizes_of_join(tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None, group: Group) -> list[int]:
    _known_shape(tensor, (dim,))
    length = tensor.shape[dim]
    if sizes is None:
        return exchange_numbers([length] * group.size, group)
    if len(sizes) != group.size or sizes[group.position] != length:
        raise UserError(
            f"join pieces along dim {dim}, that of position {group.position} of length {length}",
            f"sizes {list(sizes)}",
            "give the length of every rank's piece, by position",
        )
    return list(sizes)


def exchange_numbers(numbers: Sequence[int], group: Group) -> list[int]:
    """Number i goes to position i; returns those that came, by position."""
    if group.size == 1:
        return list(numbers)
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=group.device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group.handle)
    return [int(number) for number in theirs.tolist()]


def exchange_packed(
    sent: torch.Tensor, counts: Sequence[int], expected: Sequence[int], group: Group, *, few: bool = False
) -> tuple[torch.Tensor, Sequence[_Work], bool]:
    """Piece i of `sent`, 1D, goes to position i. Lengths in elements.

    few: whether all ranks know that no rank sends more than `FEW_BYTES`.
    Returns what the received pieces fill, packed likewise, the works that do it, and whether they can be polled.
    """
    width, landing = sent.element_size(), sent.new_empty(sum(expected))
    there, back = ([width * count for count in one] for one in (counts, expected))
    messages = group.device.type == "cpu" and not few
    if messages:
        works = post_exchange(as_bytes(sent).split(there), as_bytes(landing).split(back), group)
    else:  # the group's own method, as in `all_reduce`
        works = [group.handle.alltoall_base(as_bytes(landing), as_bytes(sent), back, there)]
    return landing, works, not messages


def post_exchange(going: Sequence[torch.Tensor], coming: Sequence[torch.Tensor], group: Group) -> list[_Work]:
    """The works that send `going[i]` to position i and receive `coming[i]` from there, over gloo: bytes, 1D.

    A rank posts all that it receives before it sends. gloo's own all_to_all and all_gather send first: their word that
    a rank is ready to receive queues behind its own data, and what two ranks have for each other crosses a network
    in turns, in up to twice the time.
    """
    own, ranks = group.position, group.size
    if going[own].data_ptr() != coming[own].data_ptr():
        coming[own].copy_(going[own])
    sources = ((own - step) % ranks for step in range(1, ranks))
    targets = ((own + step) % ranks for step in range(1, ranks))
    works: list[_Work] = [group.handle.recv([coming[one]], one, _TAG) for one in sources if coming[one].numel()]
    works += [group.handle.send([going[one]], one, _TAG) for one in targets if going[one].numel()]
    return works


def post_all_gather(own: torch.Tensor, whole: torch.Tensor, group: Group) -> tuple[list[_Work], bool]:
    """The works that gather all ranks' `own` in `whole`: bytes, 1D, as many on each. And whether they can be polled."""
    if group.device.type == "cpu" and own.numel() > FEW_BYTES:
        return post_exchange([own] * group.size, whole.split(own.numel()), group), False
    return works_of(begin_all_gather(group.handle, whole, own) if own.numel() else None), True


def even_sizes(length: int, parts: int) -> list[int]:
    """Lengths of `parts` pieces of `length`, as even as can be, the longer ones first."""
    least, longer = divmod(length, parts)
    return [least + (part < longer) for part in range(parts)]


def add(total: torch.Tensor, more: torch.Tensor) -> None:
    """total += more, in the type of `total`. torch first makes a copy of `more` in the wider type, numpy converts as it
    goes; of few numbers the copy costs less than the way to numpy.
    """
    wider = more.dtype is torch.float32 and total.dtype is torch.float64
    if wider and not more.is_cuda and more.numel() >= WORTH_NUMPY:
        with np.errstate(invalid="ignore"):  # a gradient that overflowed is found by its norm
            np.add(total.numpy(), more.numpy(), out=total.numpy())
    else:
        total.add_(more)


def check_call(text: bytes, group: Group) -> None:
    """Raises the same `RunError` on every rank where the ranks of `group` do not ask for the same.

    text: of this rank's call.
    """
    padded = text + b" " * (LONGEST_TEXT - len(text))
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(group.device)
    all_texts = torch.empty(group.size * LONGEST_TEXT, dtype=torch.uint8, device=group.device)
    all_gather_single(all_texts, mine, group=group.handle)
    texts = all_texts.cpu().view(group.size, LONGEST_TEXT)
    if bool((texts == texts[group.position]).all()):
        return
    calls = {rank: call_from(bytes(row.tolist())) for rank, row in zip(group.ranks, texts, strict=True)}
    if words := disagreement(calls):
        raise RunError(
            f"operation #{group.operations} of group {group.label} on all its ranks",
            f"they ask for different things: {words}",
            "let every rank call the same operations with the same shapes, in the same order",
        )
