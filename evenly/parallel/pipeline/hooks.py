"""The user's hooks on modules: where they run when a model is run in stages.

Those on a module between blocks, or in a block, run with its code. Those on a block itself run with the code of the
block, also where a stage skips that and runs it through on remote tensors: what they collect is then there on every
stage, to be received where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from evenly.torch_private import forward_hooks

ENGINES = ("evenly", "torch.distributed")  # whose hooks run only where a block really does


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether the user has put any on `modules` or on what they consist of."""
    return any(any(_users_hooks(part)) for module in modules for part in module.modules())


def run_with_hooks(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs `forward` between the user's hooks of `module`, as a call of the module does."""
    before, after = _users_hooks(module)
    for hook, takes_kwargs in before:
        changed = hook(module, args, kwargs) if takes_kwargs else hook(module, args)
        if changed is not None and takes_kwargs:
            args, kwargs = changed
        elif changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    result = forward(*args, **kwargs)
    for hook, takes_kwargs in after:
        changed = hook(module, args, kwargs, result) if takes_kwargs else hook(module, args, result)
        result = result if changed is None else changed
    return result


def _users_hooks(module: nn.Module) -> tuple[list[tuple[Any, bool]], list[tuple[Any, bool]]]:
    before, after = forward_hooks(module)
    return [one for one in before if _is_users(one[0])], [one for one in after if _is_users(one[0])]


def _is_users(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    source: str = getattr(hook, "__module__", None) or ""
    return not any(source == engine or source.startswith(f"{engine}.") for engine in ENGINES)
