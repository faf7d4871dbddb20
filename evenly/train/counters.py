"""What counts the forwards of a job outside of its state, which no plan knows of.

What they have counted is another number on each device that gets a share of the microbatches, and a look before the
first step is no part of the training: it leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.data.loader import Microbatch
from evenly.engine.assemble import roots_of
from evenly.engine.executor import Executor
from evenly.errors import EvenlyError, UserError
from evenly.model.blocks import Block, find_blocks
from evenly.parallel.core.places import ValuePlace, places
from evenly.train.look_gradients import Figures, LeafGradients, gradients_differ
from evenly.train.same_numbers import same

JUMPS = (1, 10, 100, 10**3, 10**4, 10**5)  # by which they are moved on, to see what follows from them
NAMED = 3  # of them, in a message


class Counters:
    """Those that the models of `executor` and its loss reach, before their first forward."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._models = [replica.module for replica in executor.composed.replicas]
        self._roots = roots_of(executor.job, self._models)
        self._before = places(self._roots)
        self._names: list[str] = []
        self._known: list[str] = []  # of all ranks
        self._is_split = len(self._models) * executor.plan.data.size > 1  # counted on some devices each

    def find(self, microbatch: Microbatch, world: World) -> None:
        """Finds those that go on with every forward, after some have run, by running `microbatch` twice.

        What only follows from the microbatch is the same again, and what a first forward has set stays. Under
        `pipeline` each stage runs the code around the blocks, and counts the same, but blocks of its own.
        """
        moved = any(place.differs(self._before.get(name)) for name, place in places(self._roots).items())
        if not any(gather_values(moved, world.group("files"))):
            return
        self._executor.look([microbatch])
        once = places(self._roots)
        counted_in_blocks: set[str] = set()
        blocks = find_blocks(self._models[0]) if self._executor.plan.pipeline.active else []
        with _noting_counts(blocks, self._roots, counted_in_blocks):
            self._executor.look([microbatch])
        again = places(self._roots)
        self._names = [
            name for name, place in again.items() if place.differs(once.get(name)) and (name in once or place.drop)
        ]
        split = not counted_in_blocks.isdisjoint(self._names)
        by_rank = gather_values((self._names, split), world.group("files"))
        self._known = sorted(set[str]().union(*(names for names, _ in by_rank)))
        self._is_split |= any(split for _, split in by_rank)

    def check(self, microbatch: Microbatch, world: World, *, gradients: bool) -> None:
        """Raises `UserError`, on all ranks alike, where the loss of a microbatch follows from what is counted.

        gradients: whether they are looked at too, which may follow from it where the loss does not.
        """
        if not (self._known and self._is_split):
            return
        executor, found = self._executor, list[tuple[list[float], Figures]]()
        leaves = LeafGradients(self._models)
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
        if not self._names:
            return
        now = places(self._roots)
        for name in self._names:
            before, place = self._before.get(name), now.get(name)
            if place is not None and before is not None and place.is_like(before):
                place.put(before, jump)
            elif place is not None and jump:
                place.put(place, jump)
            elif place is not None and before is None and place.drop is not None:
                place.drop()

    def _refusal(self) -> UserError:
        more = f" and {len(self._known) - NAMED} more" * (len(self._known) > NAMED)
        return UserError(
            f"plan {self._executor.plan}",
            f"the job counts its forwards, or those of its blocks ({', '.join(self._known[:NAMED])}{more}), of which "
            "each device runs a share, and its loss or the gradients follow from the count",
            "let it follow from the step, which an own loop or a hook (on_step) knows, or run on one device",
        )


@contextmanager
def _noting_counts(blocks: Sequence[Block], roots: Sequence[tuple[str, Any]], noted: set[str]) -> Generator[None]:
    """Notes within which places each of `blocks` changes that are not its own."""
    prefixes = {id(block.module): f"{block.name}." for block in blocks}
    before: list[dict[str, ValuePlace]] = []

    def begin(module: nn.Module, *_: Any) -> None:
        if id(module) in prefixes:
            before.append(places(roots))

    def end(module: nn.Module, *_: Any) -> None:
        if (prefix := prefixes.get(id(module))) is not None:
            known, now = before.pop(), places(roots).items()
            noted.update(name for name, place in now if not name.startswith(prefix) and place.differs(known.get(name)))

    handles = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
