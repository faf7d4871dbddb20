"""The calls of a model's blocks, each with random numbers of its own.

What a block draws follows from the microbatch, the block's name and how often the microbatch has called it, and so does
what is drawn between it and the next: nothing depends on what ran before, which may have run elsewhere.

Order: a call is taken over outside of everything that a plan does to the block: hooks that gather its parameters,
recomputation (whose second forward draws again what the first drew), compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from evenly.data.generators import reseed, seed
from evenly.data.stream import block_key
from evenly.model.blocks import Block, find_blocks

Handler = Callable[[str, int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class BlockCalls:
    """Takes over the calls of the blocks of `model` on `device`; `close` undoes it.

    handler: gets each call while something is drawn from: the block's name, how often it was called before, what runs
    it, and its arguments. By default it is run.
    """

    def __init__(self, model: nn.Module, device: str, handler: Handler | None = None) -> None:
        self._device, self._handler = device, handler or _run
        self._key: int | None = None
        self._calls: dict[str, int] = {}
        self._blocks = find_blocks(model)
        take_over(self._blocks, self._call)

    @contextmanager
    def drawing(self, key: int) -> Generator[None]:
        """Within, a forward draws from the stream `key`; wants `undisturbed`."""
        seed(key, self._device)
        self._key = key
        self._calls.clear()
        try:
            yield
        finally:
            self._key = None

    def close(self) -> None:
        """Calls run as they are again."""
        give_back(self._blocks)

    def _call(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        run = partial(_call_impl, block.module)
        if self._key is None:
            return run(*args, **kwargs)
        number = self._calls.get(block.name, 0)
        self._calls[block.name] = number + 1
        return self._handler(block.name, number, partial(self._drawn, self._key, block.name, number, run), args, kwargs)

    def _drawn(self, key: int, name: str, number: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        reseed(block_key(key, name, number, "begin"), self._device)
        result = run(*args, **kwargs)
        reseed(block_key(key, name, number, "end"), self._device)
        return result


def _run(_: str, __: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(*args, **kwargs)


# torch's private names for what a call of a module runs: what `module.compile()` would put there, and the rest.
def take_over(blocks: Iterable[Block], call: Callable[..., Any]) -> None:
    """Has `call(block, *args, **kwargs)` run in place of each call of the blocks, hooks included."""
    for block in blocks:
        block.module._compiled_call_impl = partial(call, block)  # pyright: ignore[reportPrivateUsage]


def give_back(blocks: Iterable[Block]) -> None:
    """Undoes `take_over`."""
    for block in blocks:
        block.module._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]


def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
