"""The backward pass of one stage on one microbatch: all at once, or in two parts, the gradients of its inputs first.

In two parts: the autograd nodes between the outputs and an input are the *input path*. The first part runs them and
captures the gradients at the nodes where parameters branch off (*branch nodes*). The second part starts from those, one
group of parameters that share branch nodes at a time, so that hardly any node runs twice. Where one branch node is
reached from another, its captured gradient replaces the partial one. An output that does not depend on any input is a
branch node too, with its own gradient.

The groups of torch's own pair (`stage_backward_input`, `stage_backward_weight`) may overlap: where parameters join in
two places, as in a penalty on all of them, it counts gradients twice. It does not support outputs without an input.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from evenly.data.generators import positions
from evenly.errors import RunError
from evenly.torch_private import version

Gradient = torch.Tensor | None


def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[Gradient]) -> None:
    """Accumulates the gradients of `outputs` into the leaves they depend on; gradient None: the output is the loss."""
    if outputs:
        torch.autograd.backward([*outputs], [*gradients])


class StageBackward:
    """Around each backward of a stage of `model`, on `device`, and outside of `context`: what no backward may do there.

    It may not draw: on one device a microbatch's backward goes on where its forward has left the generators, and each
    stage where the one after it has; those are of other ranks, and here another microbatch may have drawn since. Nor
    may it change a buffer, which other stages have too. Raises `RunError`.
    """

    def __init__(self, ranks: int, device: str, model: nn.Module, context: AbstractContextManager[object]) -> None:
        self._ranks, self._device, self._context = ranks, device, context
        self._buffers = [*model.named_buffers()]
        self._positions: Any = None
        self._versions: list[int] = []

    def __enter__(self) -> None:
        self._positions = positions(self._device)
        self._versions = [version(buffer) for _, buffer in self._buffers]
        self._context.__enter__()

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, problem, trace)
        if problem is not None:
            return
        if positions(self._device) != self._positions:
            raise self._refusal(
                "the backward draws random numbers (in hooks of gradients, or in backward functions of the job's own), "
                "and in stages it would draw others than on one device",
                "draw them in the forward and keep them for the backward",
            )
        for before, (name, buffer) in zip(self._versions, self._buffers, strict=True):
            if version(buffer) != before:
                raise self._refusal(
                    f"a backward changes buffer {name}, which would be another on each rank",
                    "keep what backwards find out of the model's buffers",
                )

    def _refusal(self, found: str, do: str) -> RunError:
        asked = f"computing gradients under pipeline={self._ranks}"
        return RunError(asked, found, f"{do}, or use a plan without pipeline")


def begin_backward(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[Gradient],
    inputs: Sequence[torch.Tensor],
    parameters: Iterable[nn.Parameter],
) -> Callable[[], None]:
    """Accumulates the gradients of `inputs` (leaves); returns a function that accumulates those of `parameters`."""
    if not inputs:  # of the first stage: nobody waits for the first part
        return partial(backward, outputs, gradients)
    output_gradients = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
    graph = _Graph([output.grad_fn for output in outputs])
    input_path = graph.ancestors(_leaf(leaf) for leaf in inputs)
    groups = _groups(graph, input_path, parameters)
    branch_nodes = {node: _Branch() for group in groups for node in group.branch_nodes if node in input_path}
    handles = [node.register_prehook(branch.capture) for node, branch in branch_nodes.items()]
    try:
        dependent = [number for number, output in enumerate(outputs) if output.grad_fn in input_path]
        if dependent:
            found = torch.autograd.grad(
                [outputs[number] for number in dependent],
                [*inputs],
                [output_gradients[number] for number in dependent],
                retain_graph=True,
                allow_unused=True,
            )
            for leaf, gradient in zip(inputs, found, strict=True):
                _add(leaf, gradient)
    finally:
        for handle in handles:
            handle.remove()
    pairs = zip(outputs, output_gradients, strict=True)
    input_free_outputs = [(output, gradient) for output, gradient in pairs if output.grad_fn not in input_path]
    return partial(_finish, groups, branch_nodes, input_free_outputs)


@dataclass(eq=False)
class _Branch:
    """A branch node; `captured` are the gradients of its outputs, once it has run."""

    captured: tuple[Gradient, ...] = ()

    def capture(self, gradients: tuple[Gradient, ...]) -> None:
        self.captured = gradients

    def replace(self, _: tuple[Gradient, ...]) -> tuple[Gradient, ...]:
        """Replaces a partial gradient by the captured one."""
        return self.captured


@dataclass(eq=False)
class _Group:
    """Parameters that share branch nodes, by their AccumulateGrad node."""

    parameters: dict[Any, nn.Parameter]
    branch_nodes: set[Any] = field(default_factory=set[Any])


class _Graph:
    def __init__(self, roots: Sequence[Any]) -> None:
        self.roots = {root for root in roots if root is not None}
        self.parents: dict[Any, list[Any]] = {root: [] for root in self.roots}
        stack = [*self.roots]
        while stack:
            node = stack.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following not in self.parents:
                    self.parents[following] = []
                    stack.append(following)
                self.parents[following].append(node)

    def ancestors(self, nodes: Iterable[Any]) -> set[Any]:
        found: set[Any] = set()
        stack = [node for node in nodes if node in self.parents]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += self.parents[node]
        return found

    def branch_nodes(self, leaf: Any, input_path: set[Any]) -> set[Any]:
        found: set[Any] = set()
        seen: set[Any] = set()
        stack = [leaf]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in input_path:
                found.add(node)
                continue
            if node in self.roots:
                found.add(node)
            stack += self.parents[node]
        return found


def _groups(graph: _Graph, input_path: set[Any], parameters: Iterable[nn.Parameter]) -> list[_Group]:
    groups: list[_Group] = []
    group_of: dict[Hashable, _Group] = {}
    for parameter in parameters:
        leaf = _leaf(parameter) if parameter.requires_grad else None
        if leaf is None or leaf not in graph.parents:
            continue
        group = _Group({leaf: parameter}, graph.branch_nodes(leaf, input_path))
        for other in {id(group_of[node]): group_of[node] for node in group.branch_nodes if node in group_of}.values():
            group.parameters |= other.parameters
            group.branch_nodes |= other.branch_nodes
            groups.remove(other)
        groups.append(group)
        group_of.update(dict.fromkeys(group.branch_nodes, group))
    return groups


def _finish(
    groups: Sequence[_Group],
    branch_nodes: dict[Any, _Branch],
    input_free_outputs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Adds the gradients to the parameters."""
    for group in groups:
        own = {node: branch_nodes[node] for node in group.branch_nodes if node in branch_nodes}
        edges: list[Any] = [output for output, _ in input_free_outputs if output.grad_fn in group.branch_nodes]
        captured: list[Any] = [
            gradient for output, gradient in input_free_outputs if output.grad_fn in group.branch_nodes
        ]
        for node, branch in own.items():
            indices = [number for number, gradient in enumerate(branch.captured) if gradient is not None]
            edges += [GradientEdge(node, number) for number in indices]
            captured += [branch.captured[number] for number in indices]
        if not edges:
            continue
        handles = [node.register_prehook(branch.replace) for node, branch in own.items() if branch.captured]
        try:
            leaves = [GradientEdge(leaf, 0) for leaf in group.parameters]
            found = torch.autograd.grad(edges, leaves, captured, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for parameter, gradient in zip(group.parameters.values(), found, strict=True):
            _add(parameter, gradient, in_place=True)


def _leaf(tensor: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _add(leaf: torch.Tensor, gradient: Gradient, *, in_place: bool = False) -> None:
    """in_place: whether what is in `grad` is a sum that nothing else shares, as autograd takes it to be."""
    if gradient is None:
        return
    if in_place and leaf.grad is not None:
        leaf.grad.add_(gradient)
    else:
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


class NonViewAlias(torch.autograd.Function):
    """An alias of the same memory that autograd does not see as a view, so that it may be modified in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def non_view_alias(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as `NonViewAlias`, if gradients flow through it."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    result: torch.Tensor = NonViewAlias.apply(tensor)  # pyright: ignore[reportAssignmentType]
    return result
