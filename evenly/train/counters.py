"""Numbers in attributes of a model that count its forwards, which no plan knows of.

What they have counted is another number on each device that gets a share of the microbatches, and a look before the
first step is no part of the training: it leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.data.loader import Microbatch
from evenly.engine.executor import Executor
from evenly.errors import EvenlyError, UserError
from evenly.parallel.core.attributes import numbers
from evenly.train.look_gradients import Figures, LeafGradients, gradients_differ
from evenly.train.same_numbers import same

JUMPS = (1, 10, 100, 10**3, 10**4, 10**5)  # by which they are moved on, to see what follows from them
NAMED = 3  # of them, in a message


class Counters:
    """Those of `models`, before their first forward."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._before = self._numbers()
        self._names: list[list[str]] = [[] for _ in models]
        self._known: list[str] = []  # of all ranks

    def find(self, executor: Executor, microbatch: Microbatch, world: World) -> None:
        """Finds those that go on with every forward, after some have run, by running `microbatch` twice.

        What only follows from the microbatch is the same again, and what a first forward has set stays.
        """
        moved = any(_changed(*pair) for pair in zip(self._before, self._numbers(), strict=True))
        if not any(gather_values(moved, world.group("files"))):
            return
        executor.look([microbatch])
        once = self._numbers()
        executor.look([microbatch])
        self._names = [_changed(*pair) for pair in zip(once, self._numbers(), strict=True)]
        found = {name for names in self._names for name in names}
        self._known = sorted(set().union(*gather_values(found, world.group("files"))))

    def check(self, executor: Executor, microbatch: Microbatch, world: World, *, gradients: bool) -> None:
        """Raises `UserError`, on all ranks alike, where the loss of a microbatch follows from what is counted.

        gradients: whether they are looked at too, which may follow from it where the loss does not.
        """
        if not self._known:
            return
        leaves, found = LeafGradients(self._models), list[tuple[list[float], Figures]]()
        for jump in (0, *JUMPS):
            self._set(jump)
            try:
                found.append(leaves.of(executor, microbatch) if gradients else (executor.look([microbatch])[0][:1], []))
            except EvenlyError:
                raise
            except Exception as problem:  # an index past the end of a schedule, say
                raise self._refusal() from problem
        losses, of_gradients = found[0]
        exact = world.device == "cpu"
        differ = any(
            gradients_differ(of_gradients, others)
            or not all(same(*pair, exact=exact) for pair in zip(losses, loss, strict=True))
            for loss, others in found[1:]
        )
        if any(gather_values(differ, world.group("files"))):
            raise self._refusal()

    def put_back(self) -> None:
        """Gives them the numbers that they had before."""
        self._set(0)

    def _set(self, jump: int) -> None:
        for model, before, names in zip(self._models, self._before, self._names, strict=True):
            modules = dict(model.named_modules())
            for full_name in names:
                prefix, _, name = full_name.rpartition(".")
                if full_name in before or jump:
                    setattr(modules[prefix], name, before.get(full_name, 0) + jump)
                elif name in vars(modules[prefix]):
                    delattr(modules[prefix], name)

    def _refusal(self) -> UserError:
        more = f" and {len(self._known) - NAMED} more" * (len(self._known) > NAMED)
        return UserError(
            "sharing microbatches between devices",
            f"the model counts its forwards ({', '.join(self._known[:NAMED])}{more}), of which each device runs a "
            "share, and its loss or the gradients follow from the count",
            "let it follow from the step, which an own loop or a hook (on_step) knows, or run on one device",
        )

    def _numbers(self) -> list[dict[str, float]]:
        return [numbers(model.named_modules()) for model in self._models]


def _changed(before: dict[str, float], now: dict[str, float]) -> list[str]:
    return [name for name, number in now.items() if number != before.get(name)]
