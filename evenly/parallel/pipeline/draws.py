"""Random numbers that a model's code draws between its blocks, while a run on fake tensors finds its stages."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from evenly.data.nest import tensors_in
from evenly.model.fake import DeferredTensor
from evenly.parallel.pipeline.example_tensor import ExampleTensor
from evenly.parallel.pipeline.remote_tensor import DrawWatch, draw_as
from evenly.torch_private import is_fake

NUMBERS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "equal", "allclose"}
READS = NUMBERS | {"__dlpack__", "__repr__", "untyped_storage", "tensor_split"}


class Draws(TorchFunctionMode):
    """Within, what is drawn for fake tensors is drawn for real too, so that what comes after it is as in training.

    between:   whether the code is between two blocks; set by the run.
    remote:    whether tensors of other stages were drawn for since the last block.
    mixed:     whether numbers for other tensors came after such a draw.
    by_chance: whether numbers drawn, not for tensors computed by the model, may decide what it calls: some are read.
    reads:     whether the code asked for numbers of a tensor, which may decide too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.between, self.remote, self.mixed, self.by_chance = True, False, False, False
        self.reads = self._noted = self._drawn = False

    def note(self) -> Literal[False]:
        """Called for a function of remote tensors that draws; False, since `Draws` draws itself."""
        self._noted = True
        return False

    def at_block(self, *, between: bool) -> None:
        """Called where a block begins, and where it has ended: a stream of its own begins."""
        self.between, self.remote = between, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.between:
            return func(*args, **kwargs)
        self.reads |= (reads := getattr(func, "__name__", "") in READS)
        self._noted, state = False, torch.default_generator.get_state()
        with DrawWatch() as watch:
            results = func(*args, **kwargs)
        real = not torch.equal(state, torch.default_generator.get_state())
        given = [*tensors_in((args, kwargs))]
        if self._noted or (watch.draws and not real and any(is_fake(type(tensor)) for tensor in given)):
            draw_as(func, args, kwargs)
            self.remote = self.remote or any(isinstance(tensor, DeferredTensor) for tensor in given)
        elif real:
            self.mixed = self.mixed or self.remote
            self._drawn = self._drawn or not any(isinstance(tensor, ExampleTensor) for tensor in given)
        self.by_chance = self.by_chance or (self._drawn and (reads or watch.reads))
        return results
