"""The data axis with parameters too cut over ranks (ZeRO 3), by torch's `fully_shard`.

Every parameter is cut along dim 0 into one *shard* per rank of a *shard group*, and so are its gradient and what the
optimizer keeps for it. A *unit* is what is gathered together, whole only while it computes: a block of the model, or
all that is in no block (the root). The root, and the last blocks if they are small, stay whole until their backward.
The gradients of every microbatch are reduced and cut as soon as they are there.

With shard groups smaller than the data axis (hybrid sharding) the groups hold the same shards, and add up the shards of
their gradients in the last backward of a step.

Exactness. With `accumulate_float64`, gradients of several microbatches and ranks are added in float64 and rounded once,
as in `gradients`: the same bits on any number of ranks. Gradients are sums, not means.

Order. Ranks meet inside the forward and the backward of every unit, so each runs as many microbatches as the others;
`Share.filled` sees to it. After an evaluation, `reshard` puts the shards back in place of the root's whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from evenly.comm.collectives import adds_here, reduce_scatter
from evenly.comm.groups import Group
from evenly.comm.transport import Pending, PolledWork
from evenly.comm.world import World
from evenly.errors import PlanError, RunError
from evenly.model.blocks import Block, find_blocks
from evenly.parallel.core.memory import HOST, MemoryCounter, local
from evenly.parallel.core.parameter_views import local_parameters
from evenly.parallel.data.gradients import (
    Gradients,
    Ownership,
    begin_numbers,
    refuse_unfrozen,
    sum_of_squares,
    trainable,
)
from evenly.parallel.data.grouping import unit_members
from evenly.parallel.data.mesh import groups_of, shard_mesh
from evenly.parallel.data.optimizer import OwnedRows
from evenly.parallel.data.partition import RowLayout
from evenly.torch_private import all_gather_single, end_sharded_forward, initialize_sharding, reduce_sharded

ORDERS = 65_521  # so many orders of units are distinguished; a prime, whose square is exact in float64 times any world


def units_of(model: nn.Module, blocks: Sequence[Block]) -> list[tuple[Block, bool]]:
    """The blocks that are units of their own, and whether each stays whole until the backward."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    by_name = {block.name: block for block in blocks}
    units = unit_members([(found, local(p).nbytes) for p, found in names.items()], by_name)
    return [(by_name[unit.block], unit.whole) for unit in units]


class ShardedGradients(Gradients):
    """Cuts `model`, in place, and adds its gradients over the microbatches of a step and over ranks.

    shard: size of the shard groups. offload: whether shards live in the host's memory, gradients too. `share` is the
    share of the parameters' elements that is really cut. parts: which of its parameters are parts of larger ones.
    blocks: of the model, if they are known. in_parts: whether a backward computes the gradients of inputs first and
    those of parameters later: parameters then stay whole from a step's first forward to its end, and so do gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        shard: int,
        accumulate_float64: bool,
        offload: bool = False,
        parts: Ownership | None = None,
        blocks: Sequence[Block] | None = None,
        in_parts: bool = False,
    ) -> None:
        trainable(model, some=parts is None or parts.stages is None)
        _refuse_what_cannot_shard(model)
        self._world, self._group, self._offload, self._parts = world, world.group("data"), offload, parts
        self._model, self._in_parts = model, in_parts
        units = units_of(model, find_blocks(model) if blocks is None else blocks)
        for unit, _ in units:
            _check_dtypes(unit.name, unit.module)
        _check_dtypes("", model)
        self._shards, across = self._cut(model, units, shard=shard, accumulate_float64=accumulate_float64)
        self._counts_squares = across is None or across.position == 0  # the other groups have the same shards
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # In parts, gradients of several microbatches are added up before they are reduced.
        sent_in = None if in_parts else next((p.dtype for p in model.parameters() if p.requires_grad), None)
        for unit in self._units:
            _add_as_sums(unit)
            if adds_here(self._shards) and self._shards.size > 1:
                unit.set_custom_reduce_scatter(cast(Any, _AddedHere(self._shards, sent_in)))
                unit.set_custom_all_gather(cast(Any, _GatheredAhead()))
        for unit, following in pairwise(self._units):
            unit.set_modules_to_forward_prefetch([following])
        self._named = list(model.named_parameters())
        self._frozen = [(name, p) for name, p in self._named if not p.requires_grad]
        self._numbers = {name: number for number, (name, _) in enumerate(self._named)}
        self._used = [False] * len(self._named)
        self._hooked: set[int] = set()
        self._gathered = 0  # which units this rank has run in the step, and in which order, as one number
        prefixes = {id(module): name for name, module in model.named_modules()}
        self._handles: list[Any] = [
            unit.register_forward_pre_hook(self._watch(_own_modules(unit, prefixes[id(unit)]), number))
            for number, unit in enumerate(self._units)
        ]
        self._pending: Pending[torch.Tensor] | None = None
        self._mine: dict[str, torch.Tensor] = {}  # what this rank has of the gradients, once they are added up
        self._squares = 0.0  # of all gradients of the step; where parts are parts of larger ones `norm` asks for it
        cut = sum(p.numel() for _, p in self._named if local(p).numel() < p.numel())
        self.share = cut / max(1, sum(p.numel() for _, p in self._named))
        position, ranks = self._shards.position, self._shards.size
        self.cuts = [OwnedRows(name, p, p, RowLayout.of(p.shape, ranks).own(position)) for name, p in self._named]

    def _cut(
        self, model: nn.Module, units: Sequence[tuple[Block, bool]], *, shard: int, accumulate_float64: bool
    ) -> tuple[Group, Group | None]:
        """Cuts every unit, innermost first; returns the shard group, and that of the ranks with the same shards."""
        mesh = shard_mesh(self._world, shard)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if accumulate_float64 else None)
        on_gpu = self._world.device.startswith("cuda")
        how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if self._offload:
            how["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        for unit, whole in units:
            # In parts, the gradients of parameters are found by the parameters that the forward computed with.
            fully_shard(unit.module, reshard_after_forward=not (whole or self._in_parts), **how)
        fully_shard(model, reshard_after_forward=False, **how)
        return groups_of(mesh, self._group)

    # ------------------------------------------------------------------------------------------- a step
    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        self._used = [False] * len(self._named)
        self._gathered = 0
        self._mine.clear()
        for _, parameter in self._named:
            parameter.grad = None
        self._expect(last=False)

    def expect_last(self) -> None:
        """The next backward is the one that reduces over all ranks; in parts, it is no backward that does."""
        if not self._in_parts:
            self._expect(last=True)

    def _expect(self, *, last: bool) -> None:
        root = self._units[0]
        root.set_is_last_backward(last)
        root.set_requires_all_reduce(last)
        if self._in_parts:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)

    def prepare(self) -> None:
        """What the first forward would do, while parameters are shown as they are."""
        initialize_sharding(self._model)

    def stage_ended(self, outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What ends the forward of the model, where it ends by an exception with these outputs."""
        return end_sharded_forward(self._model, outputs)

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        """The gradients are on their way since the backward, if it did not compute them in parts."""
        if self._in_parts:
            self._reduce()
        refuse_unfrozen(self._frozen)
        flags = (float(used) for used in self._used)
        order = (float(self._gathered), float(self._gathered**2))
        self._mine = self._reduced()
        squares = sum_of_squares(self._mine.values() if self._counts_squares else ()) if self._parts is None else None
        self._pending = begin_numbers((*order, *flags), numbers, self._group, squares)

    def finish_reduce(self) -> list[float]:
        assert self._pending is not None
        order, squared, *values = self._pending.wait().tolist()
        # Of equal numbers, and of no others, the squares add up to the square of the sum over how many they are.
        if int(squared) * self._group.size != int(order) ** 2:
            raise RunError(
                "a step with zero=3",
                "ranks have run other blocks than each other, or in another order, and gathered one's parameters for "
                "another's",
                "let the model run the same blocks for every microbatch (no layerdrop), or use plan zero2 or ddp",
            )
        for (name, parameter), flag in zip(self._named, values, strict=False):
            if flag == 0:
                parameter.grad = None
                self._mine.pop(name, None)
        if self._parts is None:
            self._squares = values.pop()
        return values[len(self._named) :]

    def used(self) -> set[str]:
        return {name for (name, _), used in zip(self._named, self._used, strict=True) if used}

    def mark_used(self, names: Container[str]) -> None:
        for number, (name, _) in enumerate(self._named):
            self._used[number] = self._used[number] or name in names

    def collect(self) -> None:
        """Notes which parameters have a gradient; `fully_shard` takes them up by itself, or in `start_reduce`."""
        if self._in_parts:
            for name, parameter in local_parameters(self._model.named_modules()):
                if name in self._numbers and parameter.grad is not None and not isinstance(parameter, DTensor):
                    self._used[self._numbers[name]] = True

    def _reduce(self) -> None:
        """Reduces and cuts all gradients, as the end of the last backward would."""
        self._expect(last=True)
        reduce_sharded(self._model)

    def norm(self) -> torch.Tensor:
        if self._parts is not None:
            return self._parts.norm(self.named_gradients(), self._shards)
        return torch.tensor(self._squares, dtype=torch.float64).sqrt()

    def divide(self, divisor: float) -> None:
        for gradient in self._mine.values():
            gradient.div_(divisor)

    def scale(self, factor: float) -> None:
        for gradient in self._mine.values():
            gradient.mul_(factor)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((name, self._mine.get(name)) for name, _ in self._named)

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        counter.track(self._reduced().values(), "gradients", HOST if self._offload else number)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _reduced(self) -> dict[str, torch.Tensor]:
        """By name of the parameter, what `fully_shard` has left of its gradient so far."""
        return {name: local(p.grad) for name, p in self._named if p.grad is not None}

    # ------------------------------------------------------------------------------- which parameters are used
    def _watch(self, modules: Sequence[tuple[str, nn.Module]], number: int) -> Callable[[nn.Module, Any], None]:
        """Before a unit's forward, when its parameters are whole: hooks that note which get a gradient."""

        def watch(*_: Any) -> None:
            self._gathered = (self._gathered * 31 + number + 1) % ORDERS
            for name, parameter in local_parameters(modules):
                if id(parameter) not in self._hooked and parameter.requires_grad and not isinstance(parameter, DTensor):
                    self._hooked.add(id(parameter))
                    parameter.register_post_accumulate_grad_hook(self._note(self._numbers[name]))

        return watch

    def _note(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            if self.counting or self._in_parts:
                self._used[number] = True
            elif parameter.grad is not None:
                # Of a loss times zero it need not be: not where the model's own code divides in its backward, or draws.
                parameter.grad.zero_()

        return note


class _InNewMemory:
    """The collectives of `fully_shard`, with messages in new memory."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _GatheredAhead(_InNewMemory):
    """Its all_gather, which waits on the CPU where the result is needed, and not before."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        work = all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        return None if work is None else PolledWork(work)


class _AddedHere(_InNewMemory):
    """Its reduce_scatter, where ours moves less.

    sent_in: the type of gradients, in which they are sent; None where they come in the type that they are added in.
    """

    def __init__(self, group: Group, sent_in: torch.dtype | None) -> None:
        self._group, self._sent_in = group, sent_in
        self._given = False  # whether memory for what is sent has been asked for; then comes that for the result

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        given, self._given = self._given, True
        return super().allocate(size, dtype=dtype if given or self._sent_in is None else self._sent_in, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._given = False
        reduce_scatter(input_tensor, self._group, into=output_tensor)


def _refuse_what_cannot_shard(model: nn.Module) -> None:
    """Raises `PlanError` for a torch or a model with which fully_shard goes wrong."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise PlanError(
            f"plan zero=3 with torch {torch.__version__}",
            "its fully_shard goes wrong where a parameter is used on some ranks only",
            "use torch 2.13 or newer, or plan zero2",
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise PlanError(
                "sharding the model over ranks",
                f"parameter {name} has no dims, and fully_shard cuts along the first",
                "give it shape (1,), or use plan zero2",
            )


def _own_modules(unit: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """What is in `unit` and in no unit within it, with names; prefix: the unit's own."""
    within = [one for one in unit.modules() if one is not unit and isinstance(one, FSDPModule)]
    inner = {id(module) for one in within for module in one.modules()}
    return [(name, module) for name, module in unit.named_modules(prefix=prefix) if id(module) not in inner]


def _add_as_sums(unit: FSDPModule) -> None:
    """Sums instead of means, and zeros for what this rank did not use: the others may have used it."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    unit.set_reduce_scatter_unused_params(True)


def _check_dtypes(name: str, module: nn.Module) -> None:
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        raise PlanError(
            f"cutting {name or 'the model'} over ranks",
            f"its parameters have several dtypes: {', '.join(sorted(dtypes))}",
            "give them one dtype, and state the precision of computing in the plan (precision=bfloat16)",
        )
