"""Functions of one split tensor and of numbers: decided once, replayed only where all of it is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evenly.comm.fake import fake_group
from evenly.parallel.tensor import shapes
from evenly.parallel.tensor.axis import Axis, PartParameter, SplitTensor, own_part
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.model import SplitModel
from evenly.parallel.tensor.shapes import Call, Part, decided
from evenly.torch_private import without_subclasses

T = torch.Tensor
RANKS = 2
HEADS = Layout.of(2, 1, 6, 2, RANKS)  # 6 heads of 2
PACKED = Layout.of(2, 3, 2, 2, RANKS)  # 3 x 2 heads of 2
UNEVEN = Layout.of(2, 1, 3, 4, RANKS)
WHOLE = torch.arange(2 * 5 * 12, dtype=torch.float64).view(2, 5, 12)

# By name: the decision, the function of the whole, and arguments that follow each other on one execution.
CASES: dict[str, tuple[shapes.Decide, Callable[..., Any], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "view": (shapes.view, T.view, [((2, 5, 6, 2), {}), ((10, 12), {}), ((2, 5, -1, 2), {}), (([10, 12],), {})]),
    "flatten": (shapes.flatten, T.flatten, [((0, 1), {}), ((), {"end_dim": 1}), ((), {"start_dim": 1})]),
    "unflatten": (shapes.unflatten, T.unflatten, [((2, [6, -1]), {}), ((2, (6, 2)), {}), ((1, (5, 1)), {})]),
    "unsqueeze": (shapes.unsqueeze, T.unsqueeze, [((1,), {}), ((-1,), {}), ((), {"dim": 0})]),
    "squeeze": (shapes.squeeze, T.squeeze, [((0,), {}), ((), {}), ((), {"dim": 1})]),
    "transpose": (shapes.transpose, T.transpose, [((1, 2), {}), ((0, 1), {}), ((-1, 0), {})]),
    "permute": (shapes.permute, T.permute, [((2, 0, 1), {}), (([1, 0, 2],), {}), ((), {"dims": (0, 2, 1)})]),
    "movedim": (shapes.movedim, T.movedim, [((0, 2), {}), ((2, 0), {}), (([0, 1], [1, 2]), {})]),
    "expand": (shapes.expand, T.expand, [((4, 2, 5, 12), {}), ((3, -1, -1, -1), {})]),
    "repeat": (shapes.repeat, T.repeat, [((2, 1, 1), {}), ((1, 1, 2), {}), ((2, 1, 1, 1), {})]),
    "unbind": (shapes.unbind, T.unbind, [((0,), {}), ((1,), {}), ((), {})]),
    "split": (shapes.split, T.split, [((2, 1), {}), (([1, 4], 1), {}), ((1,), {})]),
    "chunk": (shapes.chunk, T.chunk, [((3, 1), {}), ((2,), {}), ((2,), {"dim": 1})]),
}


def axis() -> Axis:
    return Axis(fake_group("tensor", RANKS, lambda *_: None))


def part_of(whole: T, layout: Layout, among: Axis) -> SplitTensor:
    return among.split(own_part(whole, layout, among.position), layout)


def counting(decide: shapes.Decide) -> tuple[shapes.Decide, list[Part]]:
    """`decide`, and the parts that it was asked about."""
    asked: list[Part] = []

    def counted(part: Part, *args: Any, **kwargs: Any) -> Call | None:
        asked.append(part)
        return decide(part, *args, **kwargs)

    return counted, asked


def check(result: Any, expected: Any) -> None:
    """That each of `result` is the part of the whole that it says it is."""
    if isinstance(expected, T):
        result, expected = (result,), (expected,)
    assert len(result) == len(expected)
    for one, whole in zip(result, expected, strict=True):
        assert type(one) is SplitTensor and one.split_as.full_shape(one.shape) == tuple(whole.shape)
        with without_subclasses():
            torch.testing.assert_close(one, own_part(whole, one.split_as, one.axis.position), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_decision_is_replayed_for_its_own_arguments_shape_and_layout_alone(name: str) -> None:
    decide, function, calls = CASES[name]
    counted, asked = counting(decide)
    execute, among = decided(counted), axis()
    tensors = [(WHOLE, HEADS), (WHOLE, UNEVEN), (WHOLE[:1].contiguous(), HEADS)]
    first: list[Part] = []
    with without_subclasses():
        for _ in range(2):
            first, asked[:] = [*asked], []
            for whole, layout in tensors:
                for args, kwargs in calls:
                    try:
                        expected = function(whole, *args, **kwargs)
                    except RuntimeError:
                        continue  # torch refuses it for this shape
                    result = execute(None, part_of(whole, layout, among), *args, **kwargs)
                    if result is not NotImplemented:
                        check(result, expected)
    assert first and not asked, "what was decided in the first round is decided again in the second"


def test_what_decides_is_asked_once_for_each_layout_shape_and_argument() -> None:
    counted, asked = counting(shapes.transpose)
    execute, among = decided(counted), axis()
    with without_subclasses():
        for layout, whole in [(HEADS, WHOLE), (PACKED, WHOLE), (HEADS, WHOLE[:1]), (HEADS, WHOLE)]:
            for dims in [(1, 2), (0, 1), (1, 2)]:
                execute(None, part_of(whole, layout, among), *dims)
    assert len(asked) == 6  # three tensors, each with two pairs of dims


def test_keywords_are_part_of_what_is_decided() -> None:
    execute, among = decided(shapes.flatten), axis()
    with without_subclasses():
        part = part_of(WHOLE, HEADS, among)
        assert tuple(execute(None, part, end_dim=1).shape) == (10, 6)
        assert tuple(execute(None, part, start_dim=1).shape) == (2, 30)
        assert tuple(execute(None, part, end_dim=1).shape) == (10, 6)


def test_a_tensor_among_the_arguments_is_asked_each_time() -> None:
    counted, asked = counting(shapes.unsqueeze)
    execute, among = decided(counted), axis()
    with without_subclasses():
        for _ in range(2):
            assert execute(None, part_of(WHOLE, HEADS, among), torch.tensor(1)) is NotImplemented
    assert asked == []


def test_arguments_that_a_decision_does_not_take_have_the_tensor_gathered() -> None:
    execute = decided(shapes.transpose)
    with without_subclasses():
        assert execute(None, part_of(WHOLE, HEADS, axis()), 1, 2, 3) is NotImplemented


def test_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "DECISIONS", 2)
    counted, asked = counting(shapes.transpose)
    execute, among = decided(counted), axis()
    with without_subclasses():
        for dims in [(0, 1), (0, 2), (1, 2), (0, 1)]:
            check(execute(None, part_of(WHOLE, HEADS, among), *dims), WHOLE.transpose(*dims))
    assert len(asked) == 4


def test_layouts_of_one_split_are_one_object_for_each_dim() -> None:
    layout = Layout.of(1, 3, 4, 2, 2)
    assert layout.at(1) is layout and layout.at(-1) is layout.at(0).at(-1) and layout.at(0).at(1) is layout
    assert layout.at(2) == Layout(2, 3, 2, 4, 2) and layout.at(2).at(layout.dim) == layout


def test_products_take_the_part_of_a_parameter_itself_and_all_else_a_view_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 6, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    plain, by_rows = copy.deepcopy(model), Layout.of(0, 1, 6, 1, RANKS)
    group = fake_group("tensor", RANKS, lambda *_: None)
    split = SplitModel(model, {"weight": by_rows, "bias": by_rows}, group)
    split.show_parameters(model)
    axis, part, viewed = split.axis, model.weight, list[T]()
    view_of = axis.view_of

    def noted(local: nn.Parameter, layout: Layout) -> SplitTensor:
        viewed.append(local)
        return view_of(local, layout)

    monkeypatch.setattr(axis, "view_of", noted)
    assert type(part) is PartParameter and tuple(part.shape) == (3, 4)  # the engine's
    with axis:
        found = model(x)
        assert not viewed and model.weight is part and tuple(part.shape) == (6, 4)
        check(found, plain(x))
        doubled = model.weight * 2
        assert viewed[-1] is part and type(doubled) is SplitTensor
        with without_subclasses():
            found.sum().backward()
    plain(x)[:, :3].sum().backward()
    assert plain.weight.grad is not None and plain.bias.grad is not None
    assert part.grad is not None and torch.allclose(part.grad, plain.weight.grad[:3], rtol=1e-12)
    assert model.bias.grad is not None and torch.allclose(model.bias.grad, plain.bias.grad[:3], rtol=1e-12)
    split.close()
