"""A look at buffers that the forward changes: which rule they follow, and that the forward makes no use of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.data.loader import Microbatch
from evenly.engine.executor import Executor
from evenly.errors import UserError
from evenly.parallel.core.moving_averages import Probe
from evenly.parallel.core.mutation_guard import ADVICE
from evenly.train.same_numbers import same

FORWARDS = 3  # from several values of the buffers: two give a factor, the third that there is one
NAMED = 3  # of the buffers, in a message


def find_averages(
    executor: Executor, microbatches: Sequence[Microbatch], changed: set[str], world: World
) -> dict[str, float]:
    """The factors of the buffers that a forward has `changed`, on any rank, by name.

    Raises `UserError`, on all ranks alike, where one has none, or where the forward makes use of it.
    """
    names = sorted(set().union(*gather_values(changed, world.group("files"))))
    if not names:
        return {}
    modules = dict(executor.composed.replicas[0].module.named_modules())
    places = {name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names}
    factors: dict[str, list[float | None]] = {name: [] for name in names}
    used = False
    for microbatch in microbatches:
        probe, losses = Probe(places), list[float]()
        for _ in range(FORWARDS):
            with probe.forward(), executor.composed.statistics[0].noticing():
                losses += executor.look([microbatch])[0]
        exact = world.device == "cpu"
        for saved in probe.saved:
            pairs = zip(saved, probe.saved[0], strict=False)
            used |= len(saved) != len(probe.saved[0]) or not all(same(*pair, exact=exact) for pair in pairs)
        used |= not all(same(loss, losses[0], exact=exact) for loss in losses)
        for name, factor in probe.factors().items():
            factors[name].append(factor)
    found = gather_values((used, factors), world.group("files"))
    if any(one for one, _ in found):
        seen = "on one device a microbatch sees what all before it have left"
        kept = "ranks that have parts of a model keep averages that it does not use, and nothing else"
        raise _refusal(executor, names, f"and the forward uses it: {seen if executor.plan.axes['data'] > 1 else kept}")
    if without := [n for n in names if any(None in by[n] or len({*by[n], *found[0][1][n]}) > 1 for _, by in found)]:
        raise _refusal(executor, without, "by no rule that is known: not r <- a r + b with one number a")
    return {name: float(factors[name][0] or 0.0) for name in names}


def check_averages(
    executor: Executor, microbatches: Sequence[Microbatch], factors: Mapping[str, float], world: World
) -> None:
    """Raises `UserError`, on all ranks alike, where a buffer has another factor by now."""
    found = find_averages(executor, microbatches, {*factors}, world)
    if others := [name for name, factor in factors.items() if found[name] != factor]:
        raise _refusal(
            executor, others, f"by a factor that is not always the same: {found[others[0]]}, first {factors[others[0]]}"
        )


def refuse_rounded(model: nn.Module, averages: Mapping[str, float]) -> None:
    """Raises `UserError` for moving averages that ranks would round otherwise than one device."""
    for name, buffer in model.named_buffers():
        if averages.get(name) and buffer.is_floating_point():
            raise UserError(
                "exact=bitwise on several ranks",
                f"buffer {name} is a moving average, which one device rounds after every microbatch",
                "leave exact=bitwise out, or keep the average outside of the model",
            )


def _refusal(executor: Executor, names: Sequence[str], found: str) -> UserError:
    others = f" and {len(names) - NAMED} others" if len(names) > NAMED else ""
    what = f"buffer {names[0]} changes" if len(names) == 1 else f"buffers {', '.join(names[:NAMED])}{others} change"
    has = "runs some of the microbatches" if executor.plan.axes["data"] > 1 else "has a part of the model"
    return UserError(f"a forward on several ranks, each of which {has}", f"{what} in the forward pass {found}", ADVICE)
