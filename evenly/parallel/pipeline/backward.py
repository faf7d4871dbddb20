"""The backward pass of one stage on one microbatch: all at once, or in two parts, the gradients of its inputs first.

In two parts. The nodes of autograd's graph that lead to an input are the *input path*. The first part runs them, and
keeps the gradients that arrive where the path of a parameter turns off (its *branch_nodes*). The second begins there,
for each group of parameters that share a branch by itself, so that hardly anything of it runs again. A branch that is
reached from another one gets what was kept, which is all that arrives there. An output that no input leads to is a
branch too, at which its own gradient arrives.

torch has such a pair (`stage_backward_input`, `stage_backward_weight`), whose groups may overlap: where parameters meet
in two places, as in a penalty on all of them, it counts gradients twice. It knows no outputs without an input either.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

Gradient = torch.Tensor | None


def backward(outputs: Sequence[torch.Tensor], gradients: Sequence[Gradient]) -> None:
    """Adds the gradients of `outputs` (None: a loss's own) to the leaves that they depend on."""
    if outputs:
        torch.autograd.backward([*outputs], [*gradients])


def begin_backward(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[Gradient],
    inputs: Sequence[torch.Tensor],
    parameters: Iterable[nn.Parameter],
) -> Callable[[], None]:
    """Adds to `inputs`, which are leaves, their gradients; returns what adds those of `parameters`."""
    given = [torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)]
    graph = _Graph([output.grad_fn for output in outputs])
    input_path = graph.above(_leaf(leaf) for leaf in inputs)
    groups = _groups(graph, input_path, parameters)
    branch_nodes = {node: _Branch() for group in groups for node in group.branch_nodes if node in input_path}
    handles = [node.register_prehook(branch.keep) for node, branch in branch_nodes.items()]
    try:
        leading = [number for number, output in enumerate(outputs) if output.grad_fn in input_path]
        if leading:
            found = torch.autograd.grad(
                [outputs[number] for number in leading],
                [*inputs],
                [given[number] for number in leading],
                retain_graph=True,
                allow_unused=True,
            )
            for leaf, gradient in zip(inputs, found, strict=True):
                _add(leaf, gradient)
    finally:
        for handle in handles:
            handle.remove()
    own = [(output, gradient) for output, gradient in zip(outputs, given, strict=True)]
    input_free_outputs = [(output, gradient) for output, gradient in own if output.grad_fn not in input_path]
    return partial(_finish, groups, branch_nodes, input_free_outputs)


@dataclass(eq=False)
class _Branch:
    """A node of the input path from which parameters branch off; `arrived` by its outputs, once it has run."""

    arrived: tuple[Gradient, ...] = ()

    def keep(self, gradients: tuple[Gradient, ...]) -> None:
        self.arrived = gradients

    def replace(self, _: tuple[Gradient, ...]) -> tuple[Gradient, ...]:
        """What arrived, in the place of a part of it."""
        return self.arrived


@dataclass(eq=False)
class _Group:
    """Parameters, by the node where their gradient arrives, that share branch_nodes."""

    parameters: dict[Any, nn.Parameter]
    branch_nodes: set[Any] = field(default_factory=set[Any])


class _Graph:
    def __init__(self, roots: Sequence[Any]) -> None:
        self.roots = {root for root in roots if root is not None}
        self.parents: dict[Any, list[Any]] = {root: [] for root in self.roots}
        left = [*self.roots]
        while left:
            node = left.pop()
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following not in self.parents:
                    self.parents[following] = []
                    left.append(following)
                self.parents[following].append(node)

    def above(self, nodes: Iterable[Any]) -> set[Any]:
        """All nodes that lead to any of these, themselves included."""
        found: set[Any] = set()
        left = [node for node in nodes if node in self.parents]
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += self.parents[node]
        return found

    def branch_nodes(self, leaf: Any, input_path: set[Any]) -> set[Any]:
        """The first nodes of the input path, and the roots, above `leaf`."""
        found: set[Any] = set()
        seen: set[Any] = set()
        left = [leaf]
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in input_path:
                found.add(node)
                continue
            if node in self.roots:
                found.add(node)
            left += self.parents[node]
        return found


def _groups(graph: _Graph, input_path: set[Any], parameters: Iterable[nn.Parameter]) -> list[_Group]:
    """The parameters that the graph leads to, in groups that have no branch in common."""
    groups: list[_Group] = []
    of: dict[Hashable, _Group] = {}
    for parameter in parameters:
        leaf = _leaf(parameter) if parameter.requires_grad else None
        if leaf is None or leaf not in graph.parents:
            continue
        group = _Group({leaf: parameter}, graph.branch_nodes(leaf, input_path))
        for other in {id(of[node]): of[node] for node in group.branch_nodes if node in of}.values():
            group.parameters |= other.parameters
            group.branch_nodes |= other.branch_nodes
            groups.remove(other)
        groups.append(group)
        of.update(dict.fromkeys(group.branch_nodes, group))
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
        arrived: list[Any] = [
            gradient for output, gradient in input_free_outputs if output.grad_fn in group.branch_nodes
        ]
        for node, branch in own.items():
            there = [number for number, gradient in enumerate(branch.arrived) if gradient is not None]
            edges += [GradientEdge(node, number) for number in there]
            arrived += [branch.arrived[number] for number in there]
        if not edges:
            continue
        handles = [node.register_prehook(branch.replace) for node, branch in own.items() if branch.arrived]
        try:
            leaves = [GradientEdge(leaf, 0) for leaf in group.parameters]
            found = torch.autograd.grad(edges, leaves, arrived, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for parameter, gradient in zip(group.parameters.values(), found, strict=True):
            _add(parameter, gradient)


def _leaf(tensor: torch.Tensor) -> Any:
    """The node where the gradient of a leaf arrives."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def _add(leaf: torch.Tensor, gradient: Gradient) -> None:
    if gradient is not None:
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


class NonViewAlias(torch.autograd.Function):
    """The same numbers in the same memory, as no view: it may be overwritten."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself to whoever computes with it."""
        apart = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return apart.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """The gradient as it came."""
        return gradients[0]


def non_view_alias(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as `NonViewAlias`, if gradients flow through it."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    result: torch.Tensor = NonViewAlias.apply(tensor)  # pyright: ignore[reportAssignmentType]
    return result
