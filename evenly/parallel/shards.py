"""The data axis with the state of training cut over ranks (ZeRO), by torch's `fully_shard`.

Every parameter is cut along dim 0 into one *shard* per rank of a *shard group*, and so are its gradient and what the
optimizer keeps for it. A *unit* is what is gathered together: a block of the model, or all that is in no block (the
root). The stages differ in when a unit is whole:

    zero=1   parameters from the first forward of a step to its last backward, gradients until they are reduced once
    zero=2   parameters as before; the gradients of a microbatch are reduced and cut as soon as they are there
    zero=3   parameters too only while their unit computes

With shard groups smaller than the data axis (hybrid sharding) the groups hold the same shards, and add up the shards of
their gradients in the last backward of a step.

Exactness. With `wide`, gradients of several microbatches and ranks are added in float64 and rounded once, as in
`gradients`: the same bits on any number of ranks. (zero=1 then reduces every microbatch, as zero=2 does: torch does not
mix gradients that it has kept in float64 with those of parameters that were not used.) Gradients are sums, not means.

Order. Ranks meet inside the forward and the backward of every unit, so each runs as many microbatches as the others;
`Share.filled` sees to it. After an evaluation, `rest` puts the shards back in place of whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from evenly.cluster.world import World
from evenly.comm.groups import Group
from evenly.comm.operations import Pending, all_reduce
from evenly.errors import PlanError, UserError
from evenly.model.blocks import Block, find_blocks
from evenly.parallel.memory import MemoryCounter, local


def units_of(model: nn.Module) -> list[Block]:
    """The blocks of `model` that share no parameter with anything outside them; the rest is the root's."""
    blocks = find_blocks(model)
    owners: dict[int, int] = {}
    for parameter in chain.from_iterable(module.parameters(recurse=False) for module in model.modules()):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    def own(block: Block) -> bool:
        inside: dict[int, int] = {}
        for parameter in chain.from_iterable(module.parameters(recurse=False) for module in block.module.modules()):
            inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        return bool(inside) and all(owners[key] == count for key, count in inside.items())

    return [block for block in blocks if own(block)]


class ShardedGradients:
    """Cuts `model`, in place, and adds its gradients over the microbatches of a step and over ranks.

    A step is as in `gradients.GradientSum`. zero: the stage. shard: size of the shard groups. `shares` is the share of
    the parameters' elements that is really cut.
    """

    def __init__(self, model: nn.Module, *, world: World, zero: int, shard: int, wide: bool) -> None:
        named = list(model.named_parameters())
        if not any(parameter.requires_grad for _, parameter in named):
            raise UserError("training this model", "none of its parameters requires a gradient", "unfreeze some")
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise PlanError(
                f"plan zero={zero} with torch {torch.__version__}",
                "its fully_shard goes wrong where a parameter is used on some ranks only",
                "use torch 2.13 or newer, or plan ddp",
            )
        self._world, self._group, self._zero = world, world.group("data"), zero
        self._once = zero == 1 and not wide  # reduced once per step, not once per microbatch
        units = units_of(model)
        for unit in units:
            _check_dtypes(unit.name, unit.module)
        _check_dtypes("", model)
        self._shards = self._cut(model, [unit.module for unit in units], shard=shard, wide=wide)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            _add_as_sums(unit)
        self._named = list(model.named_parameters())
        self._numbers = {name: number for number, (name, _) in enumerate(self._named)}
        self._used = [False] * len(self._named)
        self._hooked: set[int] = set()
        prefixes = {id(module): name for name, module in model.named_modules()}
        self._handles: list[Any] = [
            unit.register_forward_pre_hook(self._watch(prefixes[id(unit)])) for unit in self._units
        ]
        self._pending: Pending[torch.Tensor] | None = None
        cut = sum(p.numel() for _, p in self._named if local(p).numel() < p.numel())
        self.share = cut / sum(p.numel() for _, p in self._named)

    def _cut(self, model: nn.Module, units: Sequence[nn.Module], *, shard: int, wide: bool) -> Group:
        """Cuts every unit, innermost first; returns the shard group."""
        device, size = torch.device(self._world.device), self._world.size
        mesh = init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if wide else None)
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=self._zero == 3)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        return Group.of(mesh["shard"].get_group(), "shard", str(device), self._group.recorder)

    # ------------------------------------------------------------------------------------------- a step
    def begin(self, *, numbers: int = 0) -> None:
        """Forgets the gradients of the step before."""
        self._used = [False] * len(self._named)
        for _, parameter in self._named:
            parameter.grad = None
        self._expect(last=False)

    def expect_last(self) -> None:
        """The next backward is this rank's last of the step: the one that reduces over all ranks."""
        self._expect(last=True)

    def _expect(self, *, last: bool) -> None:
        root = self._units[0]
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or not self._once)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or self._zero == 3)

    def send(self, numbers: Sequence[float] | torch.Tensor = ()) -> None:
        """Sends `numbers` (float64), to be summed over ranks; the gradients are on their way since the backward."""
        flags = torch.tensor([float(used) for used in self._used], dtype=torch.float64)
        values = torch.as_tensor(numbers, dtype=torch.float64)
        tail = torch.cat([flags.to(values.device), values]).to(self._world.device)
        self._pending = all_reduce.begin(tail, self._group, label="losses and weights")

    def receive(self) -> list[float]:
        """Waits for the numbers; returns their sums. A parameter that no rank used has no gradient."""
        assert self._pending is not None
        values: list[float] = self._pending.wait().tolist()
        for (_, parameter), flag in zip(self._named, values, strict=False):
            if flag == 0:
                parameter.grad = None
        return values[len(self._named) :]

    def divide(self, divisor: float) -> None:
        """Divides every gradient."""
        for gradient in self._gradients():
            gradient.div_(divisor)

    def norm(self) -> torch.Tensor:
        """Norm of the whole gradient, a scalar in float64, the same on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for gradient in self._gradients():
            total += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        return all_reduce(total, self._shards, label="norm of the gradient").sqrt()

    def scale(self, factor: float) -> None:
        """Multiplies every gradient by `factor`."""
        for gradient in self._gradients():
            gradient.mul_(factor)

    def rest(self) -> None:
        """Puts the shards back where parameters are whole."""
        for unit in self._units:
            unit.reshard()

    def claim(self, counter: MemoryCounter, number: int = 0) -> None:
        """Has `counter` count the shards of the gradients as of device `number`."""
        counter.claim(self._gradients(), "gradients", number)

    def close(self) -> None:
        """Takes our hooks off."""
        for handle in self._handles:
            handle.remove()

    def _gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for _, p in self._named if p.grad is not None]

    # ------------------------------------------------------------------------------- which parameters are used
    def _watch(self, prefix: str) -> Callable[[nn.Module, Any], None]:
        """Before a unit's forward, when its parameters are whole: hooks that note which get a gradient."""

        def watch(unit: nn.Module, _: Any) -> None:
            for name, parameter in unit.named_parameters(prefix):
                if parameter.requires_grad and not isinstance(parameter, DTensor) and id(parameter) not in self._hooked:
                    self._hooked.add(id(parameter))
                    parameter.register_post_accumulate_grad_hook(self._note(self._numbers[name]))

        return watch

    def _note(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            self._used[number] = True

        return note


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
