"""The calls of a model's blocks, each with random numbers of its own.

What a block draws follows from the microbatch, the block's name and how often the microbatch has called it, and so does
what is drawn between it and the next: nothing depends on what ran before, which may have run elsewhere.

A model that checkpoints blocks by itself calls them again in the backward. torch has then restored the generator of the
first call's beginning, whose seed tells which call is repeated: it draws again what the first drew.

Order: a call is taken over outside of everything that a plan does to the block: hooks that gather its parameters,
recomputation (whose second forward draws again what the first drew), compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from evenly.data.generators import last_seed, reseeding, seed_past_torch
from evenly.data.stream import block_key
from evenly.errors import PlanError, RunError
from evenly.model.blocks import Block
from evenly.torch_private import COMPILED, in_backward, unwrap_call, wrap_call

# Calls that ran, by block and the seed before them -> (key of the microbatch, number of the call).
Begun = dict[tuple[str, int], tuple[int, int]]
CALLS_KEPT = 1 << 14  # more than a step has that a backward could repeat


class ForwardEnded(Exception):
    """Ends a forward pass on purpose, before the model's code has come to its end."""


@dataclass(eq=False, slots=True)  # not frozen: a small step feels what making one of each call takes
class BlockCall:
    """One call of a block; nobody changes it.

    number: how often the microbatch called it before.
    """

    block: Block
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _run: Callable[..., Any]
    _reseed: Callable[[int, str, int, Literal["begin", "end"]], None]
    _key: int
    _begun: Begun
    _at: tuple[str, int]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._begun[self._at] = self._key, self.number
        self.begin()
        result = self._run(*args, **kwargs)
        self.skip()
        return result

    def begin(self) -> None:
        """Draws what the block draws from here on."""
        self._reseed(self._key, self.block.name, self.number, "begin")

    def skip(self) -> None:
        """Draws what comes after the block as if it had run."""
        self._reseed(self._key, self.block.name, self.number, "end")


def several_stages_together(place: str) -> RunError:
    """The error for a model whose own checkpointing goes across the border of a stage."""
    return RunError(
        f"computing {place} again in the backward of a stage",
        "the model's own checkpointing computes parts of several stages together",
        "have it checkpoint each block by itself, or leave that to the plan (recompute=full)",
    )


class BlockCalls:
    """Takes over the calls of `blocks` on `device`; `close` undoes it.

    handler: gets each call of a forward that is `drawing`, and returns what the block would; by default it is run.
    """

    def __init__(self, blocks: Sequence[Block], device: str, handler: Callable[[BlockCall], Any] | None = None) -> None:
        self._reseed_torch, self._handler = reseeding(device), handler
        self._key: int | None = None
        self._calls: dict[str, int] = {}
        self._begun: Begun = {}
        self._taken = [(block.module, wrap_call(block.module, partial(self._call, block))) for block in blocks]

    @contextmanager
    def drawing(self, key: int) -> Generator[None]:
        """Within, a forward draws from the stream `key`; wants `undisturbed`."""
        self._reseed_torch(key)
        seed_past_torch(key)
        self._key = key
        self._calls.clear()
        if len(self._begun) > CALLS_KEPT:
            self._begun.clear()
        try:
            yield
        finally:
            self._key = None

    def forget(self) -> None:
        """No backward will repeat a call that ran before this."""
        self._begun.clear()

    def close(self) -> None:
        """Calls run as they are again."""
        for module, before in self._taken:
            unwrap_call(module, before)

    def _call(self, block: Block, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key, name, before = self._key, block.name, last_seed()
        if in_backward() or key is None:
            return self._repeat(name, before, run, *args, **kwargs)
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        if self._handler is not None:
            return self._handler(
                BlockCall(block, number, args, kwargs, run, self._reseed, key, self._begun, (name, before))
            )
        self._begun[name, before] = key, number
        self._reseed(key, name, number, "begin")  # as `BlockCall.run`, without making one: a small step feels it
        result = run(*args, **kwargs)
        self._reseed(key, name, number, "end")
        return result

    def _repeat(self, name: str, before: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a call outside of a forward: with the numbers of the one that it repeats, if it repeats any."""
        repeated = self._begun.get((name, before)) if in_backward() else None
        if repeated is None and in_backward() and self._handler is not None:
            if any(begun == name for begun, _ in self._begun):
                raise RunError(
                    f"computing {name} again in the backward of a stage",
                    "the model's own checkpointing does not restore random numbers (preserve_rng_state=False), and by "
                    "them a stage knows the call that is repeated",
                    "leave preserve_rng_state at True, or leave checkpointing to the plan (recompute=full)",
                )
            raise several_stages_together(name)
        if repeated is None:
            return run(*args, **kwargs)
        self._reseed(repeated[0], name, repeated[1], "begin")
        result = run(*args, **kwargs)
        self._reseed(repeated[0], name, repeated[1], "end")
        return result

    def _reseed(self, key: int, name: str, number: int, edge: Literal["begin", "end"]) -> None:
        self._reseed_torch(block_key(key, name, number, edge))


Forward = Callable[..., Any]
Change = Callable[[Block, Forward], Forward]  # what runs in place of a block's forward
OWN = "evenly_own_forward"  # an attribute of what runs in place of a forward


def own_forward(module: nn.Module) -> Forward:
    """The forward that a module has without what `WrappedForwards` has put around it, and as it is written."""
    return getattr(module, COMPILED, getattr(module.forward, OWN, module.forward))


class WrappedForwards:
    """Runs the forward of `blocks` through `changes`, innermost first, in place; `close` undoes it.

    asked: the plan's words for that. Raises `PlanError` where there are no blocks.
    """

    def __init__(self, blocks: Sequence[Block], changes: Sequence[Change], *, asked: str) -> None:
        # A module may have a forward of its own, as compiled ones do, or the one of its class.
        self._before = [(block.module, vars(block.module).get("forward")) for block in blocks]
        if not self._before:
            raise PlanError(
                asked, "the model has no repeated blocks", f"leave out {asked}, or put its layers into a ModuleList"
            )
        for block in blocks:
            own, forward = own_forward(block.module), block.module.forward
            for change in changes:
                forward = change(block, forward)
            if forward != block.module.forward:
                block.module.forward = forward
                setattr(forward, OWN, own)

    def close(self) -> None:
        """Gives the blocks their own forward back; safe to call twice."""
        for module, forward in self._before:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward
