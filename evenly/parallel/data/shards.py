"""The data axis with parameters, gradients and optimizer state sharded (ZeRO 3), by torch's `fully_shard`.

Every parameter, its gradient and its optimizer state are cut along dim 0 into one *shard* per rank of a *shard group*.
A *unit* is what is gathered together, only while it computes: a block of the model, or everything outside of blocks
(the root). The root, and the last blocks if they are small, stay gathered until their backward. The gradients of every
microbatch are reduce-scattered as soon as they are computed.

With shard groups smaller than the data axis (hybrid sharding) the groups hold the same shards, and all-reduce the
shards of their gradients in the last backward of a step.

Exactness. With `accumulate_float64`, sums over microbatches and ranks are exact and rounded once, as in `gradients`:
the same bits on any number of ranks. `fully_shard` itself would add microbatches and replicas up in float64, with
rounding; `ExactReduceScatter` leaves it nothing but zeros to add. Gradients are sums, not means.

Order. The forward and the backward of every unit contain collectives, so all ranks must run equally many microbatches;
`Share.filled` adds fillers. After an evaluation, `reshard` frees the gathered parameters of the root. Where ranks may
run different units (`survey`), all units are gathered at the begin of a step and reduced at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from evenly.comm.collectives import adds_here, all_reduce
from evenly.comm.exact_reduce import exact_norm
from evenly.comm.groups import Group
from evenly.comm.transport import Pending
from evenly.comm.world import World
from evenly.data.alone import all_ranks
from evenly.errors import PlanError, RunError
from evenly.model.blocks import Block, find_blocks
from evenly.parallel.core.argument_containers import ArgumentContainers
from evenly.parallel.core.memory import HOST, MemoryCounter, local
from evenly.parallel.core.parameter_views import local_parameters, viewed_tensors
from evenly.parallel.data.gathered_guard import GatheredGuard
from evenly.parallel.data.gradients import Gradients, begin_numbers, refuse_unfrozen, trainable
from evenly.parallel.data.grouping import unit_members
from evenly.parallel.data.last_outputs import LastOutputs
from evenly.parallel.data.mesh import groups_of, shard_mesh
from evenly.parallel.data.optimizer import OwnedRows
from evenly.parallel.data.ownership import Ownership
from evenly.parallel.data.row_layout import RowLayout
from evenly.parallel.data.scalars import ScalarSums
from evenly.parallel.data.shard_collectives import AsyncAllGather, ExactReduceScatter, SumReduceScatter
from evenly.parallel.data.squares import sum_of_squares
from evenly.parallel.data.unit_order import order_may_differ
from evenly.torch_private import (
    end_sharded_forward,
    gradient_hooks,
    hide_sharding,
    initialize_sharding,
    keep_unused_inputs,
    reduce_sharded,
)

ORDER_PRIME = 65_521  # modulus of the hash of the order of units; its square times any world size is exact in float64


def units_of(model: nn.Module, blocks: Sequence[Block]) -> list[tuple[Block, bool]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    by_name = {block.name: block for block in blocks}
    units = unit_members([(found, local(p).nbytes) for p, found in names.items()], by_name)
    return [(by_name[unit.block], unit.whole) for unit in units]


class ShardedGradients(Gradients):
    """Shards `model`, in place, and sums its gradients over the microbatches of a step and over ranks.

    shard: size of the shard groups. offload: whether shards and their gradients are in host memory. blocks: of the
    model, if they are known. ownership: what this rank has of the model, where it is not all. split_backward: whether
    gradients of parameters are computed after those of inputs; parameters and gradients then stay gathered from the
    first forward of a step to its end. `share`: fraction of the parameters' elements that is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        world: World,
        shard: int,
        accumulate_float64: bool,
        offload: bool = False,
        ownership: Ownership | None = None,
        blocks: Sequence[Block] | None = None,
        split_backward: bool = False,
    ) -> None:
        trainable(model, required=ownership is None or ownership.pipeline_group is None)
        _check_can_shard(model, scalars=ownership is None, ranks=world.size)
        turned = _lay_out_in_order(model)
        self._world, self._group, self._offload, self._ownership = world, world.group("data"), offload, ownership
        self._model, self._split_backward = model, split_backward
        # Whether parameters stay gathered, and gradients are accumulated, until the end of a step.
        self._reduces_at_end, self._surveyed, self._gathers_at_once = split_backward, split_backward, False
        units = units_of(model, find_blocks(model) if blocks is None else blocks)
        _check_dtypes(model, [unit for unit, _ in units])
        self._gradient_hooks = {name: hooks for name, p in model.named_parameters() if (hooks := gradient_hooks(p))}
        self._shards, self._across = self._cut(model, units, shard=shard, accumulate_float64=accumulate_float64)
        # Other groups have the same shards.
        self._counts_squares = self._across is None or self._across.position == 0
        self._accumulates_float64 = accumulate_float64
        self._exact: list[ExactReduceScatter] = []  # of each unit, with exact=bitwise
        self._guard = GatheredGuard(model)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        _set_up_units(self._units, self._shards, turned)
        self._set_reduce_scatter()
        self._named = list(model.named_parameters())
        self._frozen = [(name, p) for name, p in self._named if not p.requires_grad]
        self._numbers = {name: number for number, (name, _) in enumerate(self._named)}
        self._used = [False] * len(self._named)
        self._hooked: dict[int, list[Any]] = {}  # by id of a gathered parameter, the handles of its hooks
        prefixes = {id(module): name for name, module in model.named_modules()}
        own = {unit: _own_modules(unit, prefixes[id(unit)]) for unit in self._units}
        self._watches = [self._before_unit(own[unit], number) for number, unit in enumerate(self._units)]
        self._handles: list[Any] = [handle for unit in self._units for handle in ArgumentContainers(unit).handles]
        for unit, watch in zip(self._units, self._watches, strict=True):
            self._handles += self._guard.watch(unit, own[unit], watch)
        self.outputs = LastOutputs(model)
        self._scalars = ScalarSums(self._named, self._group, self._use, exact=accumulate_float64)
        self._handles += [self.outputs.handle, *self._scalars.handles]
        self._pending: Pending[torch.Tensor] | None = None
        self._sums: dict[str, torch.Tensor] = {}  # by name, the reduced shards of gradients
        self._squares = 0.0  # of all gradients of the step; unless `ownership` computes the norm
        cut = sum(p.numel() for _, p in self._named if local(p).numel() < p.numel())
        self.share = cut / max(1, sum(p.numel() for _, p in self._named))
        self.cuts = _own_rows(self._named, self._shards)

    @all_ranks()
    def _cut(
        self, model: nn.Module, units: Sequence[tuple[Block, bool]], *, shard: int, accumulate_float64: bool
    ) -> tuple[Group, Group | None]:
        """Shards every unit, innermost first; returns the shard group, and the group of ranks with the same shards."""
        keep_unused_inputs()
        mesh = shard_mesh(self._world, shard)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if accumulate_float64 else None)
        on_gpu = self._world.device.startswith("cuda")
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        if whole := {p for p in model.parameters() if p.numel() == 0 or p.dim() == 0}:  # nothing to cut
            options["ignored_params"] = whole
            for parameter in whole:
                parameter.data = parameter.data.to(self._world.device)
        if self._offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
        for unit, keep_gathered in units:
            # A split backward finds gradients through the gathered parameters that the forward used.
            fully_shard(unit.module, reshard_after_forward=not (keep_gathered or self._split_backward), **options)
        fully_shard(model, reshard_after_forward=False, **options)
        hide_sharding(model)
        return groups_of(mesh, self._group)

    def _set_reduce_scatter(self) -> None:
        """Has gradients sent in their own dtype, or in that of the sum where those of several microbatches are."""
        own = next((p.dtype for p in self._model.parameters() if p.requires_grad), None)
        send_dtype = None if self._reduces_at_end else own
        for number, unit in enumerate(self._units):
            if self._accumulates_float64:
                self._exact.append(ExactReduceScatter(self._shards, self._across, send_dtype))
                unit.set_custom_reduce_scatter(cast(Any, self._exact[number]))
            elif adds_here(self._shards) and self._shards.size > 1:
                unit.set_custom_reduce_scatter(cast(Any, SumReduceScatter(self._shards, send_dtype)))

    # ------------------------------------------------------------------------------------------- a step
    def survey(self, forward: Callable[[], object]) -> None:
        """Runs the forward of the first microbatch once more, before it, and gathers at once if units may differ."""
        if self._surveyed or self._group.size == 1:
            return
        self._surveyed = True
        prefixes = {id(module): name for name, module in self._model.named_modules()}
        units = [(prefixes[id(unit)], cast(nn.Module, unit)) for unit in self._units[1:]]
        initialize_sharding(self._model)  # the loss may call parts of the model, and not the model itself
        differs = order_may_differ(units, self._group, forward)
        self._units[0].reset_iter_state()
        if not differs:
            return
        if self._accumulates_float64:
            raise PlanError(
                "exact=bitwise under zero=3",
                "which blocks run may depend on the microbatch, and gradients of several are added up at once then",
                "use plan zero2 exact=bitwise, or leave exact=bitwise out",
            )
        self._reduces_at_end = self._gathers_at_once = True
        self._unhook()
        self._set_reduce_scatter()
        for unit in self._units:
            unit.set_reshard_after_forward(False)
            unit.set_modules_to_forward_prefetch([])
        self._expect(last=False)
        self.gather()

    def gather(self) -> None:
        """Gathers all units, in their order, if ranks may run different ones."""
        if self._gathers_at_once:
            initialize_sharding(self._model)
            for unit, watch in zip(self._units, self._watches, strict=True):
                unit.unshard()
                watch()  # not every block need be run by a call of it

    def begin(self, *, numbers: int = 0, rounds: int = 1) -> None:
        self._used = [False] * len(self._named)
        self.unit_order = 0
        self._scalars.begin()
        self._sums.clear()
        for reduction in self._exact:
            reduction.begin()
        for _, parameter in self._named:
            parameter.grad = None
        self._expect(last=False)
        self.gather()

    def expect_last(self) -> None:
        """Lets the next backward reduce over all ranks; with a split backward `start_reduce` does that."""
        if not self._reduces_at_end:
            self._expect(last=True)

    def _expect(self, *, last: bool) -> None:
        for reduction in self._exact:
            reduction.last = last
        root = self._units[0]
        root.set_is_last_backward(last)
        root.set_requires_all_reduce(last)
        if self._reduces_at_end:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)

    def prepare(self) -> None:
        """Does the lazy initialization of the first forward while the model has its own parameters, without views."""
        initialize_sharding(self._model)

    def end_stage_forward(self, outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Runs the post-forward of a stage that ended by an exception with `outputs`; returns them."""
        return end_sharded_forward(self._model, outputs)

    def start_reduce(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        """Gradients are in flight since the backward, unless they are reduced at the end."""
        if self._reduces_at_end:  # reduce-scatters all gradients, as the end of the last backward would
            self._expect(last=True)
            reduce_sharded(self._model)
        refuse_unfrozen(self._frozen)
        self._scalars.reduce()
        mine = self.used()
        flags = (float(name in mine) for name, _ in self._named)
        order = (float(self.unit_order), float(self.unit_order**2))
        self._sums = self._reduced()
        squares = self._own_squares() if self._ownership is None else None
        self._pending = begin_numbers((*order, *flags), numbers, self._group, squares)

    def finish_reduce(self) -> list[float]:
        self._guard.stepped = True
        assert self._pending is not None
        order, squared, *values = self._pending.wait().tolist()
        # n * sum(x^2) == (sum x)^2 holds if and only if all n numbers are equal.
        if int(squared) * self._group.size != int(order) ** 2:
            raise RunError(
                "a step with zero=3",
                "ranks ran different blocks, or in a different order, and gathered the parameters of the wrong blocks",
                "let the model run the same blocks for every microbatch (no layerdrop), or use plan zero2 or ddp",
            )
        for (name, parameter), flag in zip(self._named, values, strict=False):
            if flag == 0:
                _refuse_written(name, parameter.grad if name not in self.dropped else None)
                parameter.grad = None
                self._sums.pop(name, None)
        if self._ownership is None:
            self._squares = values.pop()
        return values[len(self._named) :]

    def used(self) -> set[str]:
        return {name for (name, _), used in zip(self._named, self._used, strict=True) if used} - self.dropped

    def mark_used(self, names: Container[str]) -> None:
        for number, (name, _) in enumerate(self._named):
            self._used[number] = self._used[number] or name in names

    def collect(self) -> None:
        """Notes which parameters have a gradient; `fully_shard` reduces them itself, or in `start_reduce`."""
        if self._split_backward:
            for name, parameter in local_parameters(self._model.named_modules()):
                if name in self._numbers and parameter.grad is not None and not isinstance(parameter, DTensor):
                    self._used[self._numbers[name]] = True

    def add(self, earlier: Mapping[str, torch.Tensor]) -> None:
        _add_by_name(self._sums, self._named, earlier)
        if self._ownership is None:
            squares = self._own_squares().to(self._group.device)
            self._squares = float(all_reduce(squares, self._group, label="norm of the gradient"))

    def _own_squares(self) -> torch.Tensor:
        return sum_of_squares(self._scalars.counted(self._sums) if self._counts_squares else ())

    def norm(self) -> torch.Tensor:
        if self._ownership is not None:
            return self._ownership.norm(self.named_gradients(), self._shards)
        return torch.tensor(self._squares, dtype=torch.float64).sqrt()

    def exact_norm(self) -> float:
        return exact_norm(self._scalars.counted(self._sums) if self._counts_squares else (), self._group)

    def divide(self, divisor: float) -> None:
        for gradient in self._sums.values():
            gradient.div_(divisor)

    def scale(self, factor: float) -> None:
        for gradient in self._sums.values():
            gradient.mul_(factor)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((name, self._sums.get(name)) for name, _ in self._named)

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def track(self, counter: MemoryCounter, number: int = 0) -> None:
        counter.track(self._reduced().values(), "gradients", HOST if self._offload else number)

    def close(self) -> None:
        _remove(self._handles)
        self._unhook()  # the garbage collector could never free the model

    def _unhook(self) -> None:
        _remove(chain.from_iterable(self._hooked.values()))
        self._hooked.clear()

    def _reduced(self) -> dict[str, torch.Tensor]:
        return {name: local(p.grad) for name, p in self._named if p.grad is not None and name not in self.dropped}

    # ------------------------------------------------------------------------------- which parameters are used
    def _before_unit(self, modules: Sequence[tuple[str, nn.Module]], number: int) -> Callable[..., None]:
        def watch(*_: Any) -> None:
            if not self._gathers_at_once:
                self.unit_order = (self.unit_order * 31 + number + 1) % ORDER_PRIME
            for name, parameter in local_parameters(modules):
                if isinstance(parameter, DTensor):
                    continue
                self._guard.note(name, parameter)
                if id(parameter) not in self._hooked and parameter.requires_grad and parameter.dim():
                    hooks = [*self._gradient_hooks.get(name, ()), *([self._without_filler] * self._gathers_at_once)]
                    note = parameter.register_post_accumulate_grad_hook(self._note(self._numbers[name]))
                    self._hooked[id(parameter)] = [note, *map(parameter.register_hook, hooks)]

        return watch

    def _use(self, number: int) -> bool:
        """Notes that a parameter got a gradient; whether that counts."""
        self._used[number] = self._used[number] or self.counting
        return self.counting

    def _note(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return  # what it would have gone to was not used
            if self.counting or self._split_backward:
                self._used[number] = True
            elif not self._gathers_at_once:
                parameter.grad.zero_()  # of a filler, whose loss is zero; the gradient may still be NaN, or random

        return note

    def _without_filler(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Zeros for a filler's gradient, before it is added to those of other microbatches."""
        return None if self.counting or gradient is None else torch.zeros_like(gradient)


def _refuse_written(name: str, gradient: torch.Tensor | None) -> None:
    """Raises `RunError` where a parameter that got no gradient from autograd has one."""
    if gradient is not None and local(gradient).any():
        raise RunError(
            f"gradient of {name}",
            "a backward writes it to `grad` itself, and the parameter is no argument of its function",
            "let the function take the parameter and return its gradient, or use plan zero2 or ddp",
        )


def _check_can_shard(model: nn.Module, *, scalars: bool, ranks: int) -> None:
    """Raises `PlanError` for a version of torch or a model that fully_shard handles wrongly on so many ranks.

    scalars: whether parameters without dims may be whole on all ranks.
    """
    if ranks > 1 and not _reduces_unused():
        raise PlanError(
            f"plan zero=3 with torch {torch.__version__}",
            "its fully_shard goes wrong where a parameter is used on some ranks only",
            "use torch 2.13 or newer, or plan zero2",
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and not scalars:
            raise PlanError(
                "sharding the model over ranks",
                f"parameter {name} has no dims, and fully_shard cuts along the first",
                "give it shape (1,), or use plan zero2",
            )


def _reduces_unused() -> bool:
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


Turned = list[tuple[nn.Module, dict[str, list[int]]]]  # of modules, the parameters that lie in another order of dims


def _lay_out_in_order(model: nn.Module) -> Turned:
    """Has every parameter in memory in the order of its dims, the only one that `fully_shard` knows (channels last).

    Returns where others were, and the order of their dims: the model's code finds them so once they are gathered, since
    dropout draws in the order of memory, and what a function returns follows the layout of what it is given.
    """
    found = [p for p in model.parameters() if not p.is_contiguous()]
    turned = {id(p): sorted(range(p.dim()), key=p.stride, reverse=True) for p in found}
    places = [(module, module.named_parameters(recurse=False, remove_duplicate=False)) for module in model.modules()]
    orders = [(module, {name: turned[id(p)] for name, p in own if id(p) in turned}) for module, own in places]
    for parameter in found:
        parameter.data = parameter.detach().contiguous()
    return [(module, mine) for module, mine in orders if mine]


def _as_it_was(orders: Mapping[str, Sequence[int]], name: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A gathered parameter with its dims in memory in their order; None for any other."""
    if name not in orders or parameter is None or isinstance(parameter, DTensor):
        return None
    order = orders[name]
    back = sorted(range(len(order)), key=order.__getitem__)
    return parameter.permute(*order).contiguous().permute(*back)


def _own_modules(unit: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """(name, module) for the modules of `unit` that are in no inner unit; prefix: name of the unit."""
    within = [one for one in unit.modules() if one is not unit and isinstance(one, FSDPModule)]
    inner = {id(module) for one in within for module in one.modules()}
    return [(name, module) for name, module in unit.named_modules(prefix=prefix) if id(module) not in inner]


def _set_up_units(units: Sequence[FSDPModule], shards: Group, turned: Turned) -> None:
    """Makes `units` sum gradients instead of averaging, with zeros for parameters that this rank did not use, gather
    one ahead, and show parameters that were `turned` as they were.
    """
    for module, orders in turned:
        viewed_tensors(module, "_parameters").add_view(partial(_as_it_was, orders))
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        if _reduces_unused():
            unit.set_reduce_scatter_unused_params(True)
        if adds_here(shards) and shards.size > 1:
            unit.set_custom_all_gather(cast(Any, AsyncAllGather(shards)))
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def _check_dtypes(model: nn.Module, units: Sequence[Block]) -> None:
    """Raises `PlanError` where what is gathered together has several dtypes."""
    for name, module in (*((unit.name, unit.module) for unit in units), ("", model)):
        dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise PlanError(
                f"cutting {name or 'the model'} over ranks",
                f"its parameters have several dtypes: {', '.join(sorted(dtypes))}",
                "give them one dtype, and state the precision of computing in the plan (precision=bfloat16)",
            )


def _own_rows(named: Iterable[tuple[str, nn.Parameter]], shards: Group) -> list[OwnedRows]:
    return [
        OwnedRows(name, p, p, RowLayout.of(p.shape, shards.size).own(shards.position))
        for name, p in named
        if isinstance(p, DTensor)
    ]


def _add_by_name(
    sums: dict[str, torch.Tensor], named: Iterable[tuple[str, nn.Parameter]], earlier: Mapping[str, torch.Tensor]
) -> None:
    """Adds gradients of earlier passes to those of the last, in place; some parameters have none in the last."""
    for name, parameter in named:
        if name in sums and name in earlier:
            sums[name].add_(earlier[name])
        elif name in earlier:
            sums[name] = earlier[name]
            if not isinstance(parameter, DTensor):
                parameter.grad = earlier[name]


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
