"""What ranks run in the tests of pairs and of the ring; each returns what it found wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from operations_ranks import Findings, group_of_all

from evenly.comm import pairs
from evenly.comm.groups import Group
from evenly.comm.operations import all_reduce
from evenly.comm.ring import Ran, ring_all_reduce, steps_of
from evenly.comm.transport import even_sizes


def adjoint(seed: int) -> list[str]:
    """<f(x), y> = <x, f'(y)>, both summed over what the ranks hold, a shared tensor counted once; and f'' is f."""
    findings = Findings()
    with group_of_all() as group:
        for case in range(24 // group.size):
            for name, (function, shape, shared_in, shared_out) in _functions(
                group, random.Random(100 * seed + case)
            ).items():
                x = _values(shape, 2 * case, group, shared=shared_in).requires_grad_()
                result = function(x)
                y = _values(tuple(result.shape), 2 * case + 1, group, shared=shared_out).requires_grad_()
                (gradient,) = torch.autograd.grad(result, x, y, create_graph=True)
                forward = _inner(result.detach(), y.detach(), group, shared=shared_out)
                backward = _inner(x.detach(), gradient.detach(), group, shared=shared_in)
                if not abs(forward - backward) <= 1e-12 * max(1.0, abs(forward)):
                    findings.append(f"{name} {shape}: {forward} forward, {backward} backward")
                (again,) = torch.autograd.grad(gradient, y, x.detach())
                findings.same(f"{name} {shape} twice", again, result.detach())
    return findings


def _functions(
    group: Group, rng: random.Random
) -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any, bool, bool]]:
    """name -> (function, shape of this rank's input, whether input and output are shared)."""
    whole = [rng.randint(1, 5) for _ in range(rng.randint(2, 4))]
    cut, join = rng.sample(range(len(whole)), 2)
    sizes = [rng.randint(0, 3) for _ in range(group.size)]
    lengths = [rng.randint(0, 3) for _ in range(group.size)]

    def shape(**changed: int) -> tuple[int, ...]:
        dims = list(whole)
        for dim, length in changed.items():
            dims[{"cut": cut, "join": join}[dim]] = length
        return tuple(dims)

    own, given = group.position, rng.random() < 0.5
    either = sizes if given else None
    return {
        "copy": (lambda x: pairs.copy(x, group), shape(), True, False),
        "reduce": (lambda x: pairs.reduce(x, group), shape(), False, True),
        "copy in place": (lambda x: pairs.copy(x, group, in_place=True) * 1.0, shape(), True, False),
        "reduce in place": (lambda x: pairs.reduce(x * 1.0, group, in_place=True), shape(), False, True),
        "split": (lambda x: pairs.split(x, group, cut, sizes), shape(cut=sum(sizes)), True, False),
        "split evenly": (lambda x: pairs.split(x, group, cut), shape(), True, False),
        "join": (lambda x: pairs.join(x, group, cut, either), shape(cut=sizes[own]), False, True),
        "gather": (lambda x: pairs.gather(x, group, cut, either), shape(cut=sizes[own]), False, False),
        "reduce_scatter": (lambda x: pairs.reduce_scatter(x, group, cut, sizes), shape(cut=sum(sizes)), False, False),
        "exchange": (
            lambda x: pairs.exchange(
                x, group, cut=cut, join=join, sizes=sizes, lengths=lengths if given else None
            ),
            shape(cut=sum(sizes), join=lengths[own]),
            False,
            False,
        ),
    }  # fmt: skip


def _values(shape: tuple[int, ...], salt: int, group: Group, *, shared: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + (0 if shared else 1 + group.position))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _inner(a: torch.Tensor, b: torch.Tensor, group: Group, *, shared: bool) -> float:
    own = (a * b).sum()
    return float(own if shared else all_reduce(own, group))


# ------------------------------------------------------------------------------------------------------- ring
def ring() -> list[str]:
    findings = Findings()
    with group_of_all() as group:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for shape in ((7,), (group.size * 8, 3), (1,), (0,), (300_001,), (3, 5, 7)):
                inputs = [_rough(p, shape, dtype) for p in range(group.size)]
                seen: list[Ran] = []
                found = ring_all_reduce(inputs[group.position].clone(), group, watch=seen.append)
                findings.same(f"ring {dtype} {shape}", found, _in_order(inputs))
                chunks = even_sizes(found.numel(), group.size)
                sent, width = sum(ran.sent_bytes for ran in seen), found.element_size()
                if sent != bytes_sent(group.position, [width * n for n in chunks]):
                    findings.append(f"ring {shape}: sent {sent} bytes")
                even = found.numel() % group.size == 0
                if even and sent != 2 * (group.size - 1) * found.numel() * width // group.size:
                    findings.append(f"ring {shape}: sent {sent} bytes of {found.numel() * width}")
                if len(seen) != 2 * (group.size - 1):
                    findings.append(f"ring {shape}: {len(seen)} steps")
    return findings


def _rough(position: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values whose sum depends on the order of adding."""
    generator = torch.Generator().manual_seed(position)
    return (torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 4, shape, generator=generator)).to(
        dtype
    )


def _in_order(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum of all ranks' tensors, each chunk added in its own order."""
    ranks, shape = len(inputs), inputs[0].shape
    pieces = [tensor.reshape(-1).split(even_sizes(tensor.numel(), ranks)) for tensor in inputs]
    chunks = []
    for chunk in range(ranks):
        first, *others = order_of(chunk, ranks)
        total = pieces[first][chunk].clone()
        for position in others:
            total = total + pieces[position][chunk]
        chunks.append(total)
    return torch.cat(chunks).view(shape)


def order_of(chunk: int, ranks: int) -> list[int]:
    """The positions in the order in which a chunk is summed: it starts at its own and goes round once."""
    return [(chunk + step) % ranks for step in range(ranks)]


def bytes_sent(position: int, chunk_bytes: Sequence[int]) -> int:
    """What the rank at `position` sends in all; 2 (p - 1) / p of the tensor where chunks are equal."""
    return sum(chunk_bytes[step.sent] for step in steps_of(position, len(chunk_bytes)))
