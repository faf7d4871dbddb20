"""Made-up numbers, for code that finds its way by numbers and so does not run on fake tensors.

Experts that were hit, lengths of a list, a check for NaN: what a block does inside does not show at its border, whose
shapes are all that other stages need to know of it. An *example* tensor has such numbers. None may enter what a stage
computes: outside of `examples` every function of one raises.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from evenly.errors import PlanError
from evenly.model.fake import DeferredTensor
from evenly.parallel.pipeline.memory_layout import laid_out, packed_size

Note = Callable[[Any], object]


@dataclass(frozen=True)
class _Rules:
    """What `examples` was given."""

    remotes: bool
    note_inputs: Note
    note_saved: Note


_rules: list[_Rules] = []  # of the `examples` that are entered


class ExampleTensor(torch.Tensor):
    """A tensor with made-up numbers, and whatever is computed from one."""

    arrived = False  # as of a `DeferredTensor`: it has no numbers of the job

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DeferredTensor) for kind in types):
            return NotImplemented  # it gets its numbers first
        if not _rules:
            raise PlanError(
                "running a stage of the model by itself",
                f"{getattr(func, '__name__', func)} needs what a block of another stage computes and does not return",
                "return it from the block, or use a plan without pipeline (ddp, zero3, tp)",
            )
        _rules[-1].note_inputs((args, kwargs))
        return super().__torch_function__(func, types, args, kwargs or {})

    def __format__(self, spec: str) -> str:
        """As of a plain tensor: the number, where there is one."""
        return format(self.as_subclass(torch.Tensor), spec)


@contextmanager
def examples(
    *, remotes: bool = False, note_inputs: Note = lambda _: None, note_saved: Note = lambda _: None
) -> Generator[None]:
    """Within, example tensors compute; nothing is kept for a backward.

    remotes: whether remote tensors compute as examples too. note_inputs: called with the arguments of every function of
    an example tensor. note_saved: called with each tensor that a backward would need.
    """
    _rules.append(_Rules(remotes, note_inputs, note_saved))
    try:
        with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda nothing: nothing):  # pyright: ignore
            yield
    finally:
        _rules.pop()


def remotes_are_examples() -> bool:
    return bool(_rules) and _rules[-1].remotes


def example_of(fake: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape, strides and dtype of `fake`: normal numbers, zeros for integers, True."""
    number = 1.0 if fake.dtype is torch.bool else 0.0
    numbers = torch.full((packed_size(fake.shape, fake.stride()),), number, dtype=fake.dtype, device=fake.device)
    if fake.is_floating_point():
        numbers.normal_(generator=torch.Generator(fake.device).manual_seed(0))
    made = laid_out(numbers, fake.shape, fake.stride())
    return made.requires_grad_(fake.requires_grad).clone().as_subclass(ExampleTensor)  # no leaf: may be overwritten


def example_weight(fake: torch.Tensor) -> torch.Tensor:
    """As `example_of`, all of one number, which takes no memory; products with it stay in range."""
    number = 1.0 / fake.shape[-1] if fake.dim() > 1 and fake.shape[-1] else 1.0
    number = number if fake.is_floating_point() or fake.is_complex() else 0.0
    made = torch.full((), number, dtype=fake.dtype, device=fake.device).expand(fake.shape)
    return made.requires_grad_(fake.requires_grad).as_subclass(ExampleTensor)
