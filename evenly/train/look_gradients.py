"""A look at what backwards run of the job's own, hooks of gradients and backward functions: none may remember anything.

Where microbatches are shared between ranks, or replicas, what one of them leaves behind for the next backward is
another on each. Most jobs have none of either, and their backwards are not run before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.checkpoint import CheckpointFunction

from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.data.loader import Microbatch
from evenly.engine.executor import Executor
from evenly.errors import UserError
from evenly.parallel.core.mutation_guard import fingerprint
from evenly.parallel.data.gradients import Gradients
from evenly.plan import Plan
from evenly.torch_private import gradient_hooks, without_subclasses

OWN = 1e-5  # of the norm of a gradient, by which its figures may differ: some kernels add in an order of chance
OTHERS = 1e-6  # the same, of the largest norm: a gradient may be zero but for its rounding

Figures = list[tuple[float, float]]  # of the gradient of each leaf, its norm and its sum, which tells its sign


class BackwardLook:
    """What `Executor.look` is given the outputs of forwards for: sees whether backwards run code of the job's own.

    is_reentrant: whether a checkpoint runs a backward within the backward, which torch refuses to return gradients of.
    """

    def __init__(self) -> None:
        self.finds_code = self.is_reentrant = False
        own = [one for one in _functions() if one is BackwardHookFunction or not _is_known(one.__module__)]
        self._own = {f"{one.__name__}Backward" for one in own}  # the names of their nodes

    @contextmanager
    def watching(self) -> Generator[None]:
        """Within, hooks count that a forward gives to tensors."""
        register: Any = torch.Tensor.register_hook

        def noted(tensor: torch.Tensor, hook: Any) -> Any:
            self.finds_code |= not _is_known(getattr(hook, "__module__", type(hook).__module__))
            return register(tensor, hook)

        torch.Tensor.register_hook = noted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            torch.Tensor.register_hook = register

    def see(self, outputs: Sequence[torch.Tensor]) -> None:
        """Looks at what `outputs` were computed by."""
        for node in _graph(outputs):
            kind = type(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self.finds_code |= any(not isinstance(_owner(hook), Gradients) for hook in gradient_hooks(leaf))
            elif issubclass(kind, torch.autograd.function.BackwardCFunction):
                self.finds_code |= kind.__name__ in self._own
                self.is_reentrant |= kind.__name__ == f"{CheckpointFunction.__name__}Backward"


class LeafGradients:
    """What `Executor.look` is given the outputs of forwards for: computes gradients of all leaves.

    changed: the buffers of `models` that backwards have changed, by name.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._found: Figures = []
        self.changed: list[str] = []

    def of(self, executor: Executor, microbatch: Microbatch, replica: int = 0) -> tuple[list[float], Figures]:
        """The loss of a microbatch on a replica, where this rank computes it, and figures of the gradients."""
        self._found = []
        losses, _ = executor.look([microbatch], self._see, replica)
        return losses[:1], self._found

    def _see(self, outputs: Sequence[torch.Tensor]) -> None:
        before = self._buffers()
        with without_subclasses():
            leaves = [leaf for node in _graph(outputs) if (leaf := getattr(node, "variable", None)) is not None]
            grads = [leaf.grad for leaf in leaves]
            handles = [leaf.register_hook(self._note) for leaf in leaves]  # after those of the job's own
        try:
            if leaves:
                ones = [torch.ones_like(output) for output in outputs]
                torch.autograd.grad([*outputs], leaves, ones, allow_unused=True)
        finally:
            with without_subclasses():
                for leaf, handle, grad in zip(leaves, handles, grads, strict=True):
                    handle.remove()
                    leaf.grad = grad  # a backward function may have written another
        now = self._buffers()
        self.changed += [name for name in before if now[name] != before[name]]

    def _note(self, gradient: torch.Tensor) -> torch.Tensor:
        own = gradient.detach()
        norm, total = torch.linalg.vector_norm(own, dtype=torch.float64), own.sum(dtype=torch.float64)
        self._found.append((float(norm), float(total)))
        return gradient.new_zeros(()).expand_as(gradient)  # the gradients of all leaves would take memory together

    def _buffers(self) -> dict[str, int]:
        named = [one for model in self._models for one in model.named_buffers()]
        return {name: fingerprint(b) for name, b in named if not b.is_meta and b.layout is torch.strided}


def check_gradients(
    plan: Plan,
    executor: Executor,
    microbatches: tuple[Microbatch, Microbatch],
    world: World,
    look: BackwardLook,
    *,
    known: Container[str],
) -> None:
    """Raises `UserError`, on all ranks alike, where the first of two has other gradients after the other, or elsewhere.

    look: at their forwards. known: buffers that forwards change, as repeated ones in a backward do too. Of two ranks of
    the data axis, and of two replicas, one begins with the other.
    """
    first, other = microbatches
    replicas, everyone = executor.composed.replicas[:2], world.group("files")
    if plan.data.size * len(replicas) == 1:
        return
    found_by_rank = gather_values((look.finds_code, look.is_reentrant), everyone)
    if not any(code for code, _ in found_by_rank) or any(reentrant for _, reentrant in found_by_rank):
        return
    data = world.group("data")
    gradients = LeafGradients([replica.module for replica in replicas])
    found: list[Figures] = []
    for number in range(len(replicas)):
        order = [other, first, first] if (data.position + number) % 2 else [first, other, first]
        for microbatch in order:
            _, of_this = gradients.of(executor, microbatch, number)
            found += [of_this] if microbatch is first else []
    everywhere = [one for rank in gather_values(found, data) for one in rank]
    differ = any(gradients_differ(everywhere[0], one) for one in everywhere)
    by_rank = gather_values((differ, [name for name in gradients.changed if name not in known]), everyone)
    changed = next((names[0] for _, names in by_rank if names), "")
    if changed or any(one for one, _ in by_rank):
        raise UserError(
            f"plan {plan}",
            f"a backward changes buffer {changed}, which would be another on each rank"
            if changed
            else "the gradients of a microbatch are others after another microbatch: a hook of gradients, or a "
            "backward function of the job's own, remembers something",
            "let it follow from the gradient and what the forward has kept alone, or run on one device",
        )


def gradients_differ(ones: Figures, others: Figures) -> bool:
    if len(ones) != len(others):
        return True
    largest = max((norm for norm, _ in ones if math.isfinite(norm)), default=0.0)
    return any(
        math.isnan(one) != math.isnan(other) or abs(one - other) > OWN * pair[0] + OTHERS * largest
        for pair, its in zip(ones, others, strict=True)
        for one, other in zip(pair, its, strict=True)
    )


def _graph(outputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = {None, *waiting}
    while waiting:
        node = waiting.pop()
        yield node
        new = [one for one, _ in node.next_functions if one not in seen]
        seen.update(new)
        waiting += dict.fromkeys(new)


def _functions(kind: type[Any] = torch.autograd.Function) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _functions(one)


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "evenly")


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", None)
