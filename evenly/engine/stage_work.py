"""A pass's microbatches as the stages of a pipeline ask for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from evenly.data.generators import drawn_past_torch
from evenly.data.loader import Microbatch
from evenly.data.nest import tensors_by_path
from evenly.errors import RunError


@dataclass(frozen=True)
class StageWork:
    """The microbatches, and what is done with each.

    compute: the forward of a stage; the scalar to differentiate, or None. It may end by the stage's own exception.
    left:    after it, however it ended. before: a backward, told whether it is the last of the step.
    """

    microbatches: Sequence[Microbatch]
    compute: Callable[[Microbatch], torch.Tensor | None]
    remaining: Callable[[Microbatch], None]
    before: Callable[[bool], None]
    after_backward: Callable[[], None]

    def shape_key(self, microbatch: int) -> Hashable:
        """The shapes and types of its tensors."""
        found = self.microbatches[microbatch]
        tensors = tensors_by_path(found.batch)
        return (found.samples, *((path, tuple(tensor.shape), tensor.dtype) for path, tensor in tensors))

    def before_backward(self, *, last: bool) -> None:
        """As `before`."""
        self.before(last)

    def forward(self, microbatch: int) -> torch.Tensor | None:
        """As `compute`."""
        found = self.microbatches[microbatch]
        try:
            return self.compute(found)
        finally:
            if drawn_past_torch():
                raise RunError(
                    "running the model in stages",
                    "its forward draws from Python's or numpy's generator, and stages would draw other numbers",
                    "draw from torch, or use a plan without pipeline",
                )
            self.remaining(found)


def filled_up(microbatches: Sequence[Microbatch], number: int) -> list[Microbatch]:
    """As many as `number`: the last of them again and again, without counting it."""
    filler = [replace(microbatches[-1], counts=False)] if microbatches else []
    return [*microbatches, *filler * (number - len(microbatches))]
