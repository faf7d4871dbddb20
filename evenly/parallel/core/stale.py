"""Tensors that a plan has left behind: what the job's code keeps of a parameter's memory past the module.

Where parameters are cut, the model gets tensors of its own. A list, a closure or a view that the job made before has
the old ones, whose numbers stay those of the start: to use one raises.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from evenly.data.nest import tensors_in
from evenly.errors import RunError
from evenly.parallel.core.memory import local
from evenly.torch_private import has_memory, memory_key

Memory = Mapping[str, "weakref.ref[torch.UntypedStorage]"]


def memory_of(model: nn.Module) -> Memory:
    """By name, the memory of the parameters of `model`, which it does not keep alive."""
    return {name: weakref.ref(p.untyped_storage()) for name, p in model.named_parameters() if p.numel()}


def mark_stale(before: Memory, models: Iterable[nn.Module]) -> None:
    """Makes all tensors in the memory `before` that is no longer any parameter's raise when they are used."""
    used = {memory_key(local(p)) for model in models for p in model.parameters()}
    if not _alive(before, used):
        return
    gc.collect()
    if left := _alive(before, used):
        gc.unfreeze()  # else those of libraries that the fork server has imported would not be shown
        for found in gc.get_objects():
            if type(found) in STALE and has_memory(found) and (name := left.get(memory_key(found))) is not None:
                found.__class__ = STALE[type(found)]
                found.name_in_model = name


def _alive(before: Memory, used: set[int]) -> dict[int, str]:
    """By key, the memory of `before` that something holds and no parameter has."""
    found: dict[int, str] = {}
    for name, reference in before.items():
        if (storage := reference()) is not None:
            key = memory_key(torch.empty(0, dtype=torch.uint8).set_(storage))  # pyright: ignore
            if key not in used:
                found[key] = name
    return found


class _Stale:
    """What the class of a stale tensor adds.

    name_in_model: of the parameter that it was, or was a view of.
    """

    name_in_model: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(one.name_in_model for one in tensors_in((args, kwargs or {})) if isinstance(one, _Stale))
        raise RunError(
            f"using {name} past its module",
            "this plan has cut the parameter, and what is used here (a list, a closure or a view made before) is no "
            "longer the model's",
            "look it up by its name in the module where it is used, or use plan zero2 or ddp",
        )


class StaleTensor(_Stale, torch.Tensor):
    """A view of what was a parameter."""


class StaleParameter(_Stale, nn.Parameter):
    """What was a parameter."""


STALE: dict[type, type] = {torch.Tensor: StaleTensor, nn.Parameter: StaleParameter}
