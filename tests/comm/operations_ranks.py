"""What ranks run in the tests of operations: each returns what it found wrong, as text, [] where all is well.

Every rank can make the tensor of every other, so each holds the operation against a plain computation of its own.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kept_ranks import group_of_all

from evenly.comm import collectives, shared_memory
from evenly.comm.collectives import exchange, gather_to_first, sum_at_once
from evenly.comm.groups import Group
from evenly.comm.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    irecv,
    isend,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from evenly.comm.shared_memory import WORTH_BYTES, WRITES_IN_ORDER, SharedMemory, share_memory
from evenly.comm.transport import FEW_BYTES, even_sizes
from evenly.errors import EvenlyError, UserError
from evenly.observe.recorder import Recorder, read

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
ALSO_MOVED = [torch.uint16, torch.uint32, torch.float8_e4m3fn]
SHAPES = [(5, 3), (7,), (), (0, 4), (4, 0), (3, 1, 5)]


def tensor_of(position: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every type; other numbers for every rank."""
    generator = torch.Generator().manual_seed(1000 * salt + position)
    values = torch.randint(0, 4, shape, generator=generator)
    if dtype is torch.bool:
        return values > 1
    if dtype.is_complex:
        return torch.complex(values.double(), (values - 2).double()).to(dtype)
    return values.to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with strides of another order and gaps between them."""
    if tensor.ndim == 0:
        return tensor
    wide = torch.zeros(*reversed(tensor.shape), 2, dtype=tensor.dtype)
    view = wide[..., 0].permute(*reversed(range(tensor.ndim)))
    view.copy_(tensor)
    return view


def cases(few: bool, also: Sequence[torch.dtype] = ()) -> Iterator[tuple[int, torch.dtype, tuple[int, ...], Any]]:
    """(salt, dtype, shape, strides): all shapes and strides in float64, and one of each in every other dtype.

    few: two dtypes, two shapes, odd strides.
    """
    for salt, dtype in enumerate(DTYPES[:2] if few else [*DTYPES, *also]):
        for shape in SHAPES[:4:3] if few else SHAPES if salt == 0 else SHAPES[:1]:
            for form in (strided,) if few or salt > 0 else (torch.Tensor.contiguous, strided):
                yield salt, dtype, shape, form


class Findings(list[str]):
    def same(self, what: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        if found is None or expected is None:
            if found is not expected:
                self.append(f"{what}: {found} instead of {expected}")
        elif found.dtype != expected.dtype or found.shape != expected.shape:
            self.append(f"{what}: {found.dtype} {found.shape} instead of {expected.dtype} {expected.shape}")
        elif not torch.equal(_comparable(found), _comparable(expected)):
            self.append(f"{what}: {found} instead of {expected}")

    def refused(self, what: str, call: Callable[[], Any], words: str) -> None:
        try:
            call()
        except EvenlyError as error:
            if words not in str(error):
                self.append(f"{what}: said {error}")
        else:
            self.append(f"{what}: was not refused")


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.dtype in ALSO_MOVED else tensor


def reduced(tensors: list[torch.Tensor], reduction: str) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        if reduction in ("sum", "mean"):
            total = total + tensor
        elif reduction == "product":
            total = total * tensor
        else:
            total = torch.maximum(total, tensor) if reduction == "max" else torch.minimum(total, tensor)
    if reduction != "mean":
        return total
    if total.is_complex():  # by parts: complex division rounds otherwise
        return torch.view_as_complex(torch.view_as_real(total) / len(tensors))
    return total / len(tensors)


def reductions_of(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["sum", "mean"]
    if dtype is torch.bool:
        return ["min", "max", "product"]
    return ["sum", "min", "max", "product", *(["mean"] if dtype.is_floating_point else [])]


# ------------------------------------------------------------------------------------------------- contract
def contract() -> list[str]:
    """Every operation in the group of all ranks."""
    with group_of_all() as group:
        return [*moving(group), *reducing(group), *pieces(group), *refusals(group)]


def contract_of_subgroups() -> list[str]:
    """The same within groups of a group, nested, and of a mesh; ranks outside are refused."""
    findings = Findings()
    with group_of_all() as group:
        last = group.size - 1
        some = group.open("some", [last, *range(0, last, 2)])
        inner = some.open("inner", range(min(2, some.size)))
        if some.rank is None:
            findings.refused("outside", lambda: all_reduce(torch.ones(2), some), "is not in it")
        else:
            findings += moving(some, few=True) + reducing(some, few=True) + pieces(some)
        if inner.rank is not None:
            findings += reducing(inner, few=True) + pieces(inner)
        if group.size % 2 == 0:
            mesh = group.mesh({"a": group.size // 2, "b": 2})
            expected = {"a": range(group.position % 2, group.size, 2), "b": [group.position // 2 * 2]}
            if mesh["a"].ranks != tuple(expected["a"]) or mesh["b"].ranks[0] != expected["b"][0]:
                findings.append(f"mesh of {group.position}: {mesh['a'].ranks}, {mesh['b'].ranks}")
            findings += pieces(mesh["a"]) + pieces(mesh["b"])
        some.close()
        some.close()
        if some.rank is not None and some.size > 1:
            findings.refused("closed", lambda: all_reduce(torch.ones(2), some), "is closed")
    return findings


def moving(group: Group, *, few: bool = False) -> Findings:
    findings, own = Findings(), group.position
    after, before = (own + 1) % group.size, (own - 1) % group.size
    for salt, dtype, shape, form in cases(few, ALSO_MOVED):
        what = f"{dtype} {shape} {form.__name__}"
        mine, theirs = (tensor_of(p, shape, dtype, salt) for p in (own, before))
        if group.size > 1:
            landing = form(torch.zeros_like(mine))
            coming, going = irecv(landing, before, group, tag=3), isend(form(mine), after, group, tag=3)
            going.wait()
            findings.same(f"irecv {what}", coming.wait(), theirs)
            findings.same(f"landing {what}", landing, theirs)
        source = salt % group.size
        given = form(mine.clone())
        findings.same(f"broadcast {what}", broadcast(given, source, group), tensor_of(source, shape, dtype, salt))
        findings.same(f"broadcast in place {what}", given, tensor_of(source, shape, dtype, salt))
    if group.size > 1:  # one after the other, in pairs
        numbers = torch.arange(3.0) + own
        if own == 0:
            send(numbers, 1, group)
            recv(numbers, 1, group)
        elif own == 1:
            first = recv(torch.zeros(3), 0, group)
            send(first + 1, 0, group)
        findings.same("send and recv", numbers, torch.arange(3.0) + (1 if own == 0 else own))
    barrier(group)
    return findings


def reducing(group: Group, *, few: bool = False) -> Findings:
    findings, own = Findings(), group.position
    for salt, dtype, shape, form in cases(few):
        for reduction in reductions_of(dtype):
            what = f"{reduction} {dtype} {shape} {form.__name__}"
            all_of_them = [tensor_of(p, shape, dtype, salt) for p in range(group.size)]
            expected = reduced(all_of_them, reduction)
            given = form(all_of_them[own].clone())
            result = all_reduce.begin(given, group, reduction).wait()  # pyright: ignore
            findings.same(f"all_reduce {what}", result, expected)
            findings.same(f"all_reduce in place {what}", given, expected)
            if reduction == "sum":
                given = form(all_of_them[own].clone())
                findings.same(f"sum_at_once {what}", sum_at_once(given, group), expected)
                findings.same(f"sum_at_once in place {what}", given, expected)
            to, given = salt % group.size, form(all_of_them[own].clone())
            reduce(given, to, group, reduction)  # pyright: ignore
            findings.same(f"reduce {what}", given, expected if own == to else all_of_them[own])
            if len(shape) > 1:
                findings += _reduce_scattered(group, form, all_of_them, expected, reduction, what)
    return findings


def _reduce_scattered(
    group: Group, form: Any, all_of_them: list[torch.Tensor], expected: torch.Tensor, reduction: str, what: str
) -> Findings:
    findings, own = Findings(), group.position
    for dim in (0, -1):
        length = expected.shape[dim]
        for sizes in (None, [length, *[0] * (group.size - 1)]):
            piece = expected.split(sizes or even_sizes(length, group.size), dim)[own]
            given = form(all_of_them[own].clone())
            found = reduce_scatter(given, group, reduction, dim=dim, sizes=sizes)  # pyright: ignore
            findings.same(f"reduce_scatter {what} dim {dim} sizes {sizes}", found, piece)
            findings.same(f"reduce_scatter input {what}", given, all_of_them[own])
    if reduction == "sum" and expected.dtype in (torch.float32, torch.bfloat16):
        thirds = [tensor / 3 for tensor in all_of_them]
        finer = reduced([tensor.double() for tensor in thirds], "sum")
        piece = finer.split(even_sizes(expected.shape[0], group.size))[own]
        into = torch.full_like(piece, torch.nan)
        found = reduce_scatter(form(thirds[own]), group, into=into)
        findings.same(f"reduce_scatter into float64 {what}", found, piece)
        findings.same(f"what reduce_scatter was to fill {what}", into, piece)
        reduce_scatter(form(thirds[own]), group, into=into, adding=True)
        findings.same(f"what reduce_scatter was to add to {what}", into, 2 * piece)
    even = torch.cat([expected] * group.size)
    found = reduce_scatter(torch.cat([all_of_them[own]] * group.size), group, reduction)  # pyright: ignore
    findings.same(f"reduce_scatter even {what}", found, even.split(expected.shape[0] or 1)[0])
    return findings


def pieces(group: Group) -> Findings:
    """Joins and cuts: even, uneven and empty pieces, along the first and the last dim."""
    findings, own, size = Findings(), group.position, group.size
    for salt, dtype in enumerate([torch.float64, torch.bool, torch.bfloat16, torch.complex64]):
        for dim in (0, -1):
            for lengths in ([2] * size, [(3 * p) % 4 for p in range(size)], [0] * (size - 1) + [3]):
                what = f"{dtype} dim {dim} lengths {lengths}"
                all_of_them = [
                    tensor_of(p, (length, 3) if dim == 0 else (3, length), dtype, salt)
                    for p, length in enumerate(lengths)
                ]
                whole = torch.cat(all_of_them, dim)
                for sizes in (None, lengths):
                    mine = strided(all_of_them[own])
                    findings.same(f"all_gather {what}", all_gather(mine, group, dim=dim, sizes=sizes), whole)
                    gathered = gather.begin(mine, size - 1, group, dim=dim, sizes=sizes).wait()
                    findings.same(f"gather {what}", gathered, whole if own == size - 1 else None)
                source = salt % size
                given = strided(whole) if own == source else None
                findings.same(
                    f"scatter {what}", scatter(given, source, group, dim=dim, sizes=lengths), all_of_them[own]
                )
                even = whole.split(even_sizes(whole.shape[dim], size), dim)[own]
                findings.same(f"scatter even {what}", scatter(given, source, group, dim=dim), even)
    for dim in (0, 1):
        for received in (False, True):
            counts = [[(p + 2 * q) % 3 for q in range(size)] for p in range(size)]  # from p to q
            sent = [
                [tensor_of(p, (n, 2) if dim == 0 else (2, n), torch.int16, q) for q, n in enumerate(row)]
                for p, row in enumerate(counts)
            ]
            found = all_to_all(
                torch.cat(sent[own], dim),
                group,
                dim=dim,
                sizes=counts[own],
                received=[counts[p][own] for p in range(size)] if received else None,
            )
            findings.same(f"all_to_all dim {dim}", found, torch.cat([sent[p][own] for p in range(size)], dim))
    rows = [tensor_of(p, (p % 3, size + 1), torch.float32, 9) for p in range(size)]
    found = all_to_all(rows[own], group, dim=1, join=0)
    mine = torch.cat(rows).split(even_sizes(size + 1, size), 1)[own]
    findings.same("all_to_all to another dim", found, mine)
    return findings


def refusals(group: Group) -> Findings:
    """Mistakes that one rank sees alone, before anything is sent."""
    findings, one = Findings(), torch.ones(2)
    findings.refused("a sum of booleans", lambda: all_reduce(one.bool(), group), "sum of booleans")
    findings.refused("a mean of integers", lambda: all_reduce(one.int(), group, "mean"), "mean of integers")
    findings.refused("a largest complex", lambda: all_reduce(one.to(torch.complex64), group, "max"), "no meaning")
    findings.refused("an unknown reduction", lambda: all_reduce(one, group, "median"), "no such")  # pyright: ignore
    findings.refused("a sparse tensor", lambda: all_reduce(one.to_sparse(), group), "sparse")
    findings.refused("a source outside", lambda: broadcast(one, group.size, group), "not one of its positions")
    findings.refused("no such dim", lambda: all_gather(one, group, dim=1, sizes=[2] * group.size), "give a dim")
    findings.refused("a piece into another shape", lambda: reduce_scatter(one, group, into=torch.ones(5)), "has shape")
    findings.refused("sizes that do not add up", lambda: reduce_scatter(one, group, sizes=[5] * group.size), "add up")
    findings.refused("another length", lambda: all_gather(one, group, sizes=[1] * group.size), "every rank's piece")
    wrong = None if group.position == 0 else one
    findings.refused("scatter of nothing", lambda: scatter(wrong, 0, group), "None elsewhere")
    for positions in ([group.size], [0, 0], []):
        findings.refused(
            f"open {positions}",
            lambda p=positions: group.open("bad", p),
            "positions" if positions == [group.size] else "once",
        )
    findings.refused("a mesh of another size", lambda: group.mesh({"a": group.size + 1}), "multiply")
    if any("not one of" in finding for finding in findings):
        raise UserError(*findings)
    return findings


def checked() -> list[str]:
    """In a checked group, what ranks ask for is compared; all of them raise the same."""
    findings = Findings()
    with group_of_all() as every:
        group = every.open("checked", range(every.size))
        group.checked, one = True, group.position == 1
        findings += moving(group, few=True) + pieces(group)
        cases: dict[str, tuple[Callable[[], Any], str]] = {
            "shape": (lambda: all_reduce(torch.ones(5 if one else 3), group), "rank 1: all_reduce of float32 [5], sum"),
            "dtype": (
                lambda: all_reduce(torch.ones(3, dtype=torch.float64 if one else None), group),
                "ranks 0, 2: all_reduce of float32 [3], sum at",
            ),
            "operation": (
                lambda: barrier(group) if one else all_reduce(torch.ones(3), group),
                "rank 1: barrier at checked",
            ),
            "reduction": (
                lambda: all_reduce(torch.ones(3), group, "max" if one else "min"),
                "rank 1: all_reduce of float32 [3], max",
            ),
            "root": (lambda: broadcast(torch.ones(3), int(one), group), "rank 1: broadcast of float32 [3], from 1"),
            "rest of the shape": (
                lambda: all_gather(torch.ones(2, 5 if one else 3), group),
                "rank 1: all_gather of float32 [*, 5], along 0",
            ),
        }
        for what, (call, words) in cases.items():
            findings.refused(what, call, words)
        findings.same("and goes on", all_reduce(torch.ones(2), group), torch.full((2,), float(group.size)))
    return findings


def gathered_to_first(at_once: int) -> list[str]:
    """Values of other sizes on each rank, in pieces of `at_once` bytes."""
    found = Findings()
    before, collectives.AT_ONCE = collectives.AT_ONCE, at_once
    try:
        with group_of_all() as group:
            mine = {group.position: torch.arange(7.0 * group.position), "text": ["x" * group.position]}
            values = gather_to_first(mine, group)
            if len(values) != (0 if group.position else group.size):
                found.append(f"{len(values)} values")
    finally:
        collectives.AT_ONCE = before
    for position, value in enumerate(values):
        found.same(f"of position {position}", value[position], torch.arange(7.0 * position))
        if value["text"] != ["x" * position]:
            found.append(f"text of position {position}: {value['text']}")
    return found


# ------------------------------------------------------------------------------------------------- shared memory
def shared_sums(machine: str) -> list[str]:
    """Sums in shared memory, one after the other, of all lengths; in each another rank comes late."""
    findings, place_bytes = Findings(), 2 * WORTH_BYTES
    with mock.patch.object(shared_memory, "PLACE_BYTES", place_bytes), group_of_all() as group:
        group.shared = memory_on(machine, group)
        over_gloo = machine not in WRITES_IN_ORDER
        if group.shared is None or (group.shared.marks is None) != over_gloo:
            findings.append("the ranks share no memory, or meet in the other way")
        for turn in range(24):
            dtype = (torch.float32, torch.float64)[turn % 2]
            few = WORTH_BYTES // dtype.itemsize
            place = place_bytes // dtype.itemsize
            length = (few, few - 1, few + 3, place, 2 * place + 5)[turn % 5]
            of_ranks = [drawn(length, dtype, (turn, position)) for position in range(group.size)]
            given = of_ranks[group.position].clone().view(-1, 1)
            if turn % group.size == group.position:
                time.sleep(0.004)
            found = sum_at_once(given, group)
            expected = reduced(of_ranks, "sum").view(-1, 1)
            if over_gloo and length * dtype.itemsize < WORTH_BYTES:  # by gloo, in an order of its own
                torch.testing.assert_close(found, expected)
            else:
                findings.same(f"turn {turn}", found, expected)
            findings.same(f"turn {turn} in place", given, found)
    return findings


def memory_on(machine: str, group: Group) -> SharedMemory | None:
    """The memory that ranks of such a machine share."""
    with mock.patch.object(platform, "machine", lambda: machine):
        return share_memory(group)


def drawn(length: int, dtype: torch.dtype, seeds: tuple[int, int]) -> torch.Tensor:
    """Numbers whose sums depend on the order of adding."""
    generator = torch.Generator().manual_seed(100 * seeds[0] + seeds[1])
    return torch.randn(length, generator=generator, dtype=dtype)


def lengths_that_differ(machine: str) -> list[str]:
    """A sum of tensors of two lengths is refused on all ranks."""
    findings = Findings()
    with group_of_all() as group:
        group.shared = memory_on(machine, group)
        length = WORTH_BYTES * (1 + group.position)
        findings.refused("lengths", lambda: sum_at_once(torch.ones(length), group), "another length")
    return findings


def strides_that_differ() -> list[str]:
    """Ranks whose results lie in memory in other orders meet in one way: each has its strides from its own kernels."""
    findings, shape = Findings(), (4, 8, 32, 32)
    with group_of_all() as group:
        group.shared = share_memory(group)
        order = torch.channels_last if group.position == 0 else torch.contiguous_format
        numbers = torch.arange(4 * 8 * 32 * 32, dtype=torch.float32).view(shape)
        given = numbers.clone(memory_format=order)
        findings.same("strides", sum_at_once(given, group), group.size * numbers)
        findings.same("in place", given, group.size * numbers)
    return findings


def memory_that_one_rank_does_not_see(hidden: str) -> list[str]:
    """No rank uses what the last does not see, or in whose place it sees another's memory."""
    findings, opened = Findings(), shared_memory._open  # pyright: ignore[reportPrivateUsage]

    def opened_by_last(offer: Any, size: int) -> Any:
        return None if hidden == "missing" else opened(offer._replace(token=b"of another"), size)

    with group_of_all() as group:
        last = group.position == group.size - 1
        with mock.patch.object(shared_memory, "_open", opened_by_last if last else opened):
            group.shared = share_memory(group)
        if group.shared is not None:
            findings.append("memory is shared all the same")
        total = sum_at_once(torch.ones(WORTH_BYTES), group)
        findings.same("by gloo", total, torch.full((WORTH_BYTES,), float(group.size)))
    return findings


# ------------------------------------------------------------------------------------------------ when it is under way
def timed(folder: Path) -> list[str]:
    """What is noted of operations that are complete before anybody waits, and of one that is waited for at once."""
    with group_of_all() as group:
        path = folder / str(group.position)
        group.recorder = recorder = Recorder(path, group.position)
        recorder.time_operations()
        few, many = torch.ones(3), torch.ones(group.size, FEW_BYTES)
        begun = {
            "all_reduce": all_reduce.begin(few, group, label="few"),
            "exchange": exchange.begin(many, group),
            "all_gather": all_gather.begin(many, group, sizes=[group.size] * group.size),
        }
        wrong = [f"{name} is over before it is waited for" for name in begun if not inside(path, name)]
        until_s = time.monotonic() + 60
        timings = [one.timing for one in begun.values() if one.timing is not None]
        while time.monotonic() < until_s and any(one.complete_s is None for one in timings):
            time.sleep(0.01)
        for pending in begun.values():
            pending.wait()
        sum_at_once(few, group)
        found = recorder.timed()
        recorder.close()
        group.recorder = None
        at_once = found.pop()
        names = [(one.operation, one.axis, one.label) for one in found]
        wrong += [] if names == [(name, group.name, "few" * (name == "all_reduce")) for name in begun] else [str(names)]
        hidden = [one.under_way() for one in found]
        wrong += [f"{one} was waited for" for one in hidden if one is None or one.waited_from_s < one.end_s]
        waited = at_once.under_way()
        wrong += [] if waited is not None and waited.waited_from_s == waited.begin_s < waited.end_s else [str(waited)]
        all_reduce(few, group)
        return wrong + ["an operation is timed after the end"] * (recorder.timed() != [])


def inside(path: Path, operation: str) -> bool:
    """Whether the record has this rank in the operation."""
    record = read(path)
    assert record is not None
    return [entry.left_s for entry in record.entries if entry.call.operation == operation] == [None]
