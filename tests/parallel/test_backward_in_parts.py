"""The backward of a stage in two parts gives what torch's backward in one gives."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenly.parallel.pipeline.backward import backward, begin_backward, non_view_alias

WIDTH = 4
Tensors = list[torch.Tensor]


class Stage:
    """A random computation on some inputs and parameters of shape (4, 4), drawn from `seed`.

    Parameters are shared, frozen, used in no place or in several; what is computed goes through views, through parts
    that are computed anew, and in some stages into a penalty on all parameters. Outputs may follow from no input, and
    inputs lead to no output.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        torch.manual_seed(seed)
        self.inputs = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(self._draw.randint(1, 3))]
        for leaf in self.inputs[: self._draw.randint(0, 3)]:
            leaf.requires_grad_()
        self.parameters = [
            nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2, requires_grad=self._draw.random() < 0.8)
            for _ in range(self._draw.randint(1, 6))
        ]
        self.outputs = self._differentiable(self._compute())
        self.gradients = [torch.randn_like(output) for output in self.outputs]

    def _compute(self) -> Tensors:
        draw = self._draw
        known = [non_view_alias(tensor) for tensor in self.inputs]
        for _ in range(draw.randint(1, 14)):
            known += self._operation(known, draw.choice(self.parameters))
        chosen = draw.sample(known, draw.randint(1, min(4, len(known))))
        if draw.random() < 0.3:
            penalty = torch.stack([p.square().sum() for p in self.parameters]).sum()
            chosen[0] = chosen[0] + penalty
        if draw.random() < 0.3:
            chosen.append(chosen[0].sum())
        return [non_view_alias(output) for output in chosen]

    def _operation(self, known: Tensors, parameter: nn.Parameter) -> Tensors:
        one, other = self._draw.choice(known), self._draw.choice(known)
        operations: list[Callable[[], Tensors]] = [
            lambda: [torch.tanh(one @ parameter)],
            lambda: [nn.functional.linear(one, parameter, parameter[0])],
            lambda: [one * other],
            lambda: [one + other],
            lambda: [one * parameter],
            lambda: [torch.sigmoid(parameter)],
            lambda: [one.mT],
            lambda: [half.repeat(2, 1) for half in one.chunk(2)],
            lambda: [torch.cat([one[:1], other[1:]])],
            lambda: [one.detach()],
            lambda: [nn.functional.layer_norm(one, [WIDTH], parameter[0], parameter[1])],
            lambda: [self._anew(one, parameter)],
        ]
        return self._draw.choice(operations)()

    def _anew(self, one: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        found = checkpoint(lambda x: torch.tanh(x @ parameter) * parameter, one, use_reentrant=False)
        assert isinstance(found, torch.Tensor)
        return found

    def _differentiable(self, outputs: Tensors) -> Tensors:
        """Some have no gradient: the next stage did not use them."""
        used = [output for output in outputs if output.requires_grad]
        return used if len(used) < 2 else [output for output in used if self._draw.random() < 0.8]

    @property
    def leaves(self) -> Tensors:
        """Inputs that require a gradient."""
        return [leaf for leaf in self.inputs if leaf.requires_grad]

    def in_parts(self) -> Callable[[], None]:
        return begin_backward(self.outputs, self.gradients, self.leaves, self.parameters)


def taken(leaves: list[torch.Tensor] | list[nn.Parameter]) -> list[torch.Tensor | None]:
    """Their gradients, which are forgotten."""
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    assert [one is None for one in found] == [one is None for one in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            assert (one - other).abs().max() <= 1e-12 * other.abs().max().clamp(min=1)


SEEDS = range(150)


def test_in_parts_as_in_one() -> None:
    seen = {"without inputs": 0, "loose": 0, "unused": 0, "several": 0}
    for seed in SEEDS:
        whole, parts = Stage(seed), Stage(seed)
        backward(whole.outputs, whole.gradients)
        expected = taken(whole.leaves), taken(whole.parameters)
        rest = parts.in_parts()
        assert all(parameter.grad is None for parameter in parts.parameters)
        assert_same(taken(parts.leaves), expected[0])
        rest()
        assert_same(taken(parts.parameters), expected[1])
        assert not any(leaf.grad is not None for leaf in parts.leaves)
        seen["without inputs"] += not parts.leaves
        seen["loose"] += None in expected[0]
        seen["unused"] += any(p.requires_grad and g is None for p, g in zip(parts.parameters, expected[1], strict=True))
        seen["several"] += len(parts.outputs) > 1
    assert min(seen.values()) > 10, seen


def test_gradients_are_added_to_what_is_there() -> None:
    for seed in SEEDS[:40]:
        parts, whole = Stage(seed), Stage(seed)
        backward(whole.outputs, whole.gradients)
        expected = [None if p.grad is None else p.grad + 1.0 for p in whole.parameters]
        for parameter in parts.parameters:
            parameter.grad = torch.ones_like(parameter)
        parts.in_parts()()
        found = [p.grad if e is not None else None for p, e in zip(parts.parameters, expected, strict=True)]
        assert_same(found, expected)


def test_the_second_part_may_wait_for_other_microbatches() -> None:
    """As in a schedule: several microbatches run their first part before the first runs its second."""
    seeds = SEEDS[40:44]
    expected: list[list[torch.Tensor | None]] = []
    for seed in seeds:
        stage = Stage(seed)
        backward(stage.outputs, stage.gradients)
        expected.append([*taken(stage.leaves), *taken(stage.parameters)])
    stages = [Stage(seed) for seed in seeds]
    rests = [stage.in_parts() for stage in stages]
    for rest in reversed(rests):
        rest()
    for stage, one in zip(stages, expected, strict=True):
        assert_same([*taken(stage.leaves), *taken(stage.parameters)], one)


def test_a_loss_has_a_gradient_of_its_own() -> None:
    x, w = torch.ones(3, requires_grad=True), nn.Parameter(torch.full((3,), 2.0))
    rest = begin_backward([(non_view_alias(x) * w).sum()], [None], [x], [w])
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3 and w.grad is None
    rest()
    assert w.grad is not None and w.grad.tolist() == [1.0] * 3


def test_a_parameter_that_is_an_output() -> None:
    """The next stage has what this one makes of a parameter alone, and the parameter itself."""
    x, w = torch.ones(3, requires_grad=True), nn.Parameter(torch.full((3,), 2.0))
    outputs = [non_view_alias(x) * w, non_view_alias(w), w.square()]
    rest = begin_backward(outputs, [torch.ones(3)] * 3, [x], [w])
    rest()
    assert w.grad is not None and w.grad.tolist() == [1.0 + 1.0 + 4.0] * 3


def test_without_inputs_the_second_part_is_the_whole_backward() -> None:
    """Of a first stage: autograd tells who watches gradients of parameters, as in one."""
    w, watched = nn.Parameter(torch.full((3,), 2.0)), list[int]()
    w.register_post_accumulate_grad_hook(lambda _: watched.append(1))
    rest = begin_backward([w.square()], [torch.ones(3)], [], [w])
    assert w.grad is None
    rest()
    assert w.grad is not None and w.grad.tolist() == [4.0] * 3 and watched == [1]


def test_nothing_to_differentiate() -> None:
    w = nn.Parameter(torch.ones(3))
    backward([], [])
    begin_backward([], [], [torch.ones(3, requires_grad=True)], [w])()
    assert w.grad is None


# ------------------------------------------------------------------------------------------------ torch's own pair
def penalised() -> tuple[torch.Tensor, list[nn.Parameter], torch.Tensor]:
    """Eight layers and a penalty on the parameters of all: the paths of any two meet in two places."""
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(8)]
    hidden = x
    for weight in weights:
        hidden = torch.tanh(hidden @ weight)
    return x, weights, hidden.sum() + torch.stack([w.square().sum() for w in weights]).sum()


def error(begin: Callable[[torch.Tensor, list[nn.Parameter], torch.Tensor], Callable[[], object]]) -> float:
    """How far from torch's backward in one the gradients are that a backward in parts leaves."""
    _, weights, loss = penalised()
    loss.backward()
    expected = taken(weights)
    x, weights, loss = penalised()
    begin(x, weights, loss)()
    pairs = zip(taken(weights), expected, strict=True)
    return max(float((g - e).abs().max()) for g, e in pairs if g is not None and e is not None)


def test_torchs_own_parts_count_a_penalty_several_times() -> None:
    """Why there are ours. In which order torch forms its groups, and so how wrong it is, changes from run to run."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    def of_torch(x: torch.Tensor, weights: list[nn.Parameter], loss: torch.Tensor) -> Callable[[], object]:
        _, groups = stage_backward_input([loss], None, [x], iter(weights))
        return lambda: stage_backward_weight(iter(weights), groups, retain_graph=True)

    def ours(x: torch.Tensor, weights: list[nn.Parameter], loss: torch.Tensor) -> Callable[[], object]:
        return begin_backward([loss], [None], [x], weights)

    assert any(error(of_torch) > 0.1 for _ in range(30))
    assert all(error(ours) < 1e-12 for _ in range(30))


# ----------------------------------------------------------------------------------------------------------- apart
def test_apart_is_the_same_memory_and_no_view() -> None:
    leaf = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    for tensor in (leaf, leaf.mT, leaf[2:, ::2], (leaf * 1).view(4, 6), leaf.sum().expand(3)):
        found = non_view_alias(tensor)
        assert torch.equal(found, tensor)
        assert (found.data_ptr(), found.stride(), found.requires_grad) == (tensor.data_ptr(), tensor.stride(), True)
        assert not found._is_view()
        (gradient,) = torch.autograd.grad(found.square().sum(), tensor, retain_graph=True)
        assert torch.equal(gradient, 2 * tensor)


def test_what_came_apart_may_be_overwritten() -> None:
    """A model whose block works in place does so to what its stage has received."""
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        leaf.mul_(2)
    found = non_view_alias(leaf).mul_(2)
    (found * 3).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [6.0] * 3


def test_without_gradients_apart_is_the_tensor_itself() -> None:
    for tensor in (torch.arange(3), torch.ones(3)):
        assert non_view_alias(tensor) is tensor
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert non_view_alias(leaf) is leaf


def test_gradients_of_parameters_are_added_where_a_sum_is() -> None:
    x, weight = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3))
    weight.grad = total = torch.ones(3)
    for _ in range(2):
        begin_backward([(x * weight).sum()], [None], [x], [weight])()
    assert weight.grad is total and total.tolist() == [3.0] * 3
