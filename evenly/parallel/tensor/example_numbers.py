"""Numbers for code that asks for them while it runs on fake tensors: those of the first microbatch, as far as they go.

What is computed of the batch, of constants and of buffers alone has its numbers. What a parameter takes part in has
none: where code asks for such a number (which experts a router chose), it gets one of random tensors of the right
shape. So code with a branch, a mask as index or a list of numbers takes one path that it may take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evenly.data.nest import map_tensors, tensors_in
from evenly.torch_private import without_fake_mode, without_torch_function

MOST_ELEMENTS = 2**26  # of one tensor that is drawn
CHANCE = {"rand", "rand_like", "uniform_", "bernoulli", "bernoulli_"}  # of which the mean stands for what is drawn


class ExampleNumbers:
    """The numbers of fake tensors, by tensor.

    wrap: makes the fake tensor of a real one. Whoever asks keeps the fake tensors alive.
    """

    def __init__(self, wrap: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._wrap = wrap
        self._known: dict[int, torch.Tensor] = {}

    def know(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        if real.device.type == "cpu" and type(real) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            self._known[id(fake)] = real.detach().clone()

    def follow(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """After a call that returned fake tensors: the numbers of those that have any."""
        given, made = [*tensors_in((args, [*kwargs.values()]))], [*tensors_in(result)]
        unknown = any(tensor.is_floating_point() and id(tensor) not in self._known for tensor in given)
        if unknown and all(tensor.is_floating_point() for tensor in made):
            for tensor in made:
                self._known.pop(id(tensor), None)  # changed in place
            return
        try:
            real = [*tensors_in(self._called(func, args, kwargs))]
        except Exception:  # nothing is known of it
            return
        if [tensor.shape for tensor in real] == [tensor.shape for tensor in made]:
            self._known.update((id(fake), one) for fake, one in zip(made, real, strict=True))

    def answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a call that cannot run on fake tensors, its tensors fake. Raises what the call raises."""
        back: dict[int, torch.Tensor] = {}
        given = [*tensors_in((args, [*kwargs.values()]))]
        unknown = any(tensor.is_floating_point() and id(tensor) not in self._known for tensor in given)
        gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)

        def fake(real: torch.Tensor) -> torch.Tensor:
            if id(real) in back:
                return back[id(real)]
            one = self._wrap(real)
            if real.is_floating_point() and gradient:
                one = one.requires_grad_() * 1  # no leaf
            if not (unknown and real.is_floating_point()):
                self._known[id(one)] = real
            return one

        return map_tensors(fake, self._called(func, args, kwargs, back))

    def _called(
        self, func: Callable[..., Any], args: Any, kwargs: Any, back: dict[int, torch.Tensor] | None = None
    ) -> Any:
        """What `func` returns of real numbers; back: filled with the fake tensor of each argument."""

        def real(fake: torch.Tensor) -> torch.Tensor:
            one = self._number(fake)
            if back is not None:
                back[id(one)] = fake
            return one

        with without_fake_mode(), torch.no_grad(), without_torch_function():
            result = func(*map_tensors(real, args), **map_tensors(real, kwargs))
            if getattr(func, "__name__", "") in CHANCE and isinstance(result, torch.Tensor):
                result.fill_(0.5)
            return result

    def _number(self, fake: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor: known, or random ones of its shape, zeros where it has no floating point."""
        if id(fake) in self._known:
            return self._known[id(fake)]
        if not fake.is_floating_point():
            return torch.zeros(fake.shape, dtype=fake.dtype)
        if fake.numel() > MOST_ELEMENTS:
            return torch.zeros((), dtype=fake.dtype).expand(fake.shape)
        return torch.randn(fake.shape, dtype=fake.dtype, generator=torch.Generator().manual_seed(fake.numel()))
