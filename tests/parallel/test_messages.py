"""What stages send each other, and what several of them hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks, group_of_all

import evenly.parallel.pipeline.messages as messages
from evenly.comm.groups import Group
from evenly.errors import RunError
from evenly.parallel.pipeline.memory_layout import gradient_strides, laid_out, packed, packed_size
from evenly.parallel.pipeline.messages import Payload, StageChannel
from evenly.parallel.pipeline.result_forms import (
    DTYPES,
    MAX_DIMS,
    META_NUMBERS,
    ResultForms,
    TensorMeta,
    decoded_forms,
    encoded_forms,
    form_of,
)
from evenly.parallel.pipeline.ties import Ties

SHAPES: list[tuple[int, ...] | None] = [None, (), (0,), (3,), (2, 0, 5), (1, 2, 3, 4, 5, 6, 7, 8)]


# ----------------------------------------------------------------------------------------------------------- forms
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_is_the_inverse_of_encode(dtype: torch.dtype) -> None:
    for shape, requires_grad in product(SHAPES, (False, True)):
        strides = tuple(range(len(shape or ())))[::-1]
        form = TensorMeta(shape, strides, dtype, requires_grad)
        numbers = form.encode()
        assert len(numbers) == META_NUMBERS and all(type(number) is int for number in numbers)
        assert TensorMeta.decode(numbers) == form


def test_the_form_of_a_tensor() -> None:
    assert TensorMeta.of(None) == TensorMeta(None, (), torch.float32, False)
    assert TensorMeta.of(torch.ones(3, 2, dtype=torch.float64, requires_grad=True).mT) == TensorMeta(
        (2, 3), (1, 2), torch.float64, True
    )
    assert TensorMeta.of(torch.tensor(True)) == TensorMeta((), (), torch.bool, False)


def test_more_dims_than_a_message_has_are_refused() -> None:
    with pytest.raises(RunError, match=f"use at most {MAX_DIMS}"):
        TensorMeta.of(torch.ones([1] * (MAX_DIMS + 1))).encode()


# ---------------------------------------------------------------------------------------------------------- layouts
LAYOUTS = {
    "scalar": torch.tensor(3.0),
    "nothing": torch.ones(4, 0, 3).permute(2, 0, 1),
    "contiguous": torch.arange(24.0).view(2, 3, 4),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "channels last": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "one channel": torch.arange(12.0).view(1, 1, 3, 4).to(memory_format=torch.channels_last),
    "sliced": torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2],
    "expanded": torch.arange(6.0).view(2, 1, 3).expand(2, 5, 3).mT,
    "expanded of one": torch.tensor(7.0).expand(3, 2),
    "windows": torch.arange(9.0).unfold(0, 3, 2),
    "overlapping": torch.arange(9.0).unfold(0, 4, 1),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_laid_out_is_the_inverse_of_packed(name: str) -> None:
    tensor = LAYOUTS[name]
    numbers = packed(tensor)
    found = laid_out(numbers, tensor.shape, tensor.stride())
    assert numbers.shape == (packed_size(tensor.shape, tensor.stride()),) and numbers.is_contiguous()
    assert not numbers.is_conj() and torch.equal(found, tensor) and found.stride() == tensor.stride()
    shared = found.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr()
    assert shared == (name not in ("sliced", "windows", "overlapping"))


def test_a_gradient_has_the_layout_of_its_tensor() -> None:
    turned = torch.ones(2, 3).mT
    assert gradient_strides(turned) == (1, 3)
    gradient = torch.arange(6.0).view(3, 2)
    assert torch.equal(laid_out(packed(gradient, (1, 3)), (3, 2), (1, 3)), gradient)
    for name in ("sliced", "expanded", "overlapping"):
        assert gradient_strides(LAYOUTS[name]) == torch.empty(LAYOUTS[name].shape).stride()


# ----------------------------------------------------------------------------------------------------------- forms
def test_forms_come_out_of_their_numbers() -> None:
    results = [
        torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True).mT,
        (torch.ones(4), {"mask": torch.ones(2, 0, dtype=torch.bool)}, 7, None),
        "nothing",
        torch.ones([1] * (MAX_DIMS + 1)),
    ]
    forms = [form_of(result, {"x": results[0], "y": results[0]}) for result in results]
    assert [form and [meta.shape for meta in form.metas] for form in forms] == [[(3, 2)], [(4,), (2, 0)], [], None]
    assert [form and form.arguments for form in forms] == [(1,), (-1, -1), (), None]
    assert decoded_forms(encoded_forms(forms)) == forms and decoded_forms([]) == []


# -------------------------------------------------------------------------------------------------------- messages
def numbers(*shape: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> torch.Tensor:
    """0, 1, 2 and so on, the last dim moving slowest: not contiguous if there are two."""
    made = torch.arange(torch.Size(shape).numel()).view(shape[::-1]).permute([*range(len(shape))][::-1])
    return made.to(dtype).requires_grad_(grad)


PAYLOADS: list[tuple[str, list[Callable[[], torch.Tensor | None]]]] = [
    ("a", [lambda: numbers(2, 3, grad=True), lambda: None, lambda: numbers(2, dtype=torch.int64)]),
    ("a", [lambda: numbers(2, 3, grad=True) + 1, lambda: None, lambda: numbers(2, dtype=torch.int64) + 1]),
    ("b", [lambda: numbers(4, 3, grad=True), lambda: numbers(1, dtype=torch.bool), lambda: None]),
    ("a", [lambda: numbers(2, 3, grad=True) + 2, lambda: None, lambda: numbers(2, dtype=torch.int64)]),
    ("c", [lambda: numbers(0, 5), lambda: torch.tensor(7.0).expand(3), lambda: numbers(dtype=torch.bfloat16)]),
]


def payload(number: int) -> tuple[str, Payload]:
    shape_key, made = PAYLOADS[number]
    return shape_key, [one() for one in made]


def forms_of(number: int) -> ResultForms:
    """What blocks have returned, which depends on the microbatch."""
    return [form_of(numbers(number + 1, 2), ()), None] if number else []


def conversation() -> tuple[list[str], dict[str, int]]:
    """What the second rank finds wrong, in forward and backward; and how often each rank sends how many numbers."""
    wrong: list[str] = []
    sent: Counter[str] = Counter()
    begin = messages.send.begin

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = {1 + 3 * META_NUMBERS: "metadata", 3 + META_NUMBERS: "forms"}
        sent[sizes.get(tensor.numel(), "tensors") if tensor.dtype is torch.int64 else "tensors"] += 1
        return begin(tensor, *args, **kwargs)

    with group_of_all() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages.send, "begin", counted)
        channel = StageChannel(group, 2)
        for number in range(len(PAYLOADS)):
            shape_key, tensors = payload(number)
            if group.position == 0:
                stated = channel.sends_forms(1, shape_key)
                channel.send(tensors, 1, stage=1, microbatch=number, shape_key=shape_key, forms=forms_of(number))
                wrong += [f"microbatch {number}: tells is {stated}"] if channel.sends_forms(1, shape_key) else []
                wrong += gradients_received(channel, number, tensors)
            else:
                known = channel.expects(1, shape_key)
                if known != (shape_key in [PAYLOADS[n][0] for n in range(number)]):
                    wrong.append(f"microbatch {number}: expected is {known}")
                arriving = channel.begin_recv(0, tensors=3, stage=1, microbatch=number, shape_key=shape_key)
                wrong += differences(arriving.wait(), tensors)
                if arriving.forms != ([] if known else forms_of(number)):
                    wrong.append(f"microbatch {number}: forms {arriving.forms}")
                gradients_sent(channel, number, arriving.wait())
        channel.finish()
    return wrong, dict(sent)


def differences(found: Payload, expected: Payload) -> list[str]:
    wrong = [f"{f} instead of {e}" for f, e in zip(found, expected, strict=True) if (f is None) != (e is None)]
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            if not torch.equal(one.detach(), other.detach()) or one.dtype != other.dtype:
                wrong.append(f"{one} instead of {other}")
            if one.stride() != other.stride():
                wrong.append(f"strides {one.stride()} instead of {other.stride()}")
            if one.requires_grad != other.requires_grad or not one.is_leaf:
                wrong.append(f"requires_grad {one.requires_grad}, leaf {one.is_leaf}")
    return wrong


def gradients_sent(channel: StageChannel, number: int, inputs: Payload) -> None:
    """Of every second microbatch none was used; the others get one that is transposed in memory."""
    for one in inputs:
        if one is not None and one.requires_grad and number % 2 == 0:
            one.grad = torch.full(one.shape[::-1], number or 3.0, dtype=one.dtype).mT
    channel.send_gradients(inputs, 0, stage=1, microbatch=number)


def gradients_received(channel: StageChannel, number: int, outputs: Payload) -> list[str]:
    found: list[Any] = [*channel.begin_recv_gradients(outputs, 1, stage=1, microbatch=number).wait()]
    wrong: list[str] = []
    for gradient, output in zip(found, outputs, strict=True):
        expected = output is not None and output.requires_grad and number % 2 == 0
        right = gradient is not None and gradient.equal(torch.full_like(output, number or 3.0))
        right = right and gradient.stride() == output.stride()
        if not (right if expected else gradient is None):
            wrong.append(f"microbatch {number}: gradient {gradient}")
    return wrong


def test_tensors_go_forward_and_their_gradients_back(ranks: KeptRanks) -> None:
    (wrong, sent), (also_wrong, sent_back) = ranks.run(conversation)
    assert wrong == also_wrong == []
    assert sent == {"metadata": 3, "tensors": 11, "forms": 2}  # of three shapes of microbatches
    assert sent_back == {"tensors": 4}


def shapes_that_change() -> str:
    """What the sender of another shape is stated, for a microbatch whose own shapes are the same."""
    with group_of_all() as group:
        channel = StageChannel(group, 2)
        if group.position == 1:
            for number in range(2):
                channel.begin_recv(0, tensors=1, stage=1, microbatch=number, shape_key="same").wait()
            return ""
        for number in range(2):
            channel.send([torch.ones(3)], 1, stage=1, microbatch=number, shape_key="same")
        channel.finish()
        for other in (
            torch.ones(6)[::2],
            torch.ones(4),
            torch.ones(3, dtype=torch.float64),
            torch.ones(3, requires_grad=True),
            None,
        ):
            with pytest.raises(
                RunError, match="a microbatch of the same shapes gave other shapes or strides before"
            ) as caught:
                channel.send([other], 1, stage=1, microbatch=2, shape_key="same")
        return str(caught.value)


def test_shapes_within_the_model_follow_from_those_of_the_microbatch(ranks: KeptRanks) -> None:
    said, _ = ranks.run(shapes_that_change)
    assert "let shapes within the model follow from those of the batch" in said


# ------------------------------------------------------------------------------------------------------------ ties
OWNERS = {"one": [0], "ends": [0, 2], "all": [0, 1, 2], "late": [1, 2], "second": [1]}


def gradient_of(name: str, rank: int) -> torch.Tensor | None:
    """Of what this rank holds: other numbers for each, of which the order of adding shows; transposed."""
    if rank not in OWNERS[name]:
        return None
    return (torch.arange(6.0, dtype=torch.float64).view(2, 3) / 3 + 10.0**rank / 7).mT


def tied() -> dict[str, Any]:
    with group_of_all() as group:
        mine, ties = group.position, Ties(OWNERS, group)
        held = {name: gradient_of(name, mine) for name in OWNERS if mine in OWNERS[name]}
        gradients = {**held, "missing": None}
        ties.sum(gradients.items())
        flags = ties.flags(["ends", "one"] if mine == 0 else ["ends", "late"] if mine == 2 else ["second"])
        return {
            "names": (ties.names, ties.everywhere, sorted(ties.counted_elsewhere)),
            "flags": flags,
            "gradients": {name: one for name, one in gradients.items() if one is not None},
        }


def test_what_several_stages_hold_is_added_up_with_the_same_bits(ranks: KeptRanks) -> None:
    found = ranks.run(tied, size=3)
    assert [one["names"][:2] for one in found] == [(["all", "ends", "late"], ["all"])] * 3
    assert [one["names"][2] for one in found] == [[], ["all"], ["all", "ends", "late"]]  # each has one who counts it
    for name, owners in OWNERS.items():
        parts = [part for rank in owners if (part := gradient_of(name, rank)) is not None]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        assert [torch.equal(found[rank]["gradients"][name], total) for rank in owners] == [True] * len(owners)


def test_what_any_stage_has_used_all_that_hold_it_have() -> None:
    ties = Ties(OWNERS, Group("pipeline", [0, 1, 2], own=1, handle=None, device=torch.device("cpu")))
    assert ties.flags({"late", "second"}) == [0.0, 0.0, 1.0]
    assert ties.used([0.0, 2.0, 1.0]) == {"ends", "late"}
    assert ties.used(ties.flags(())) == set()


def untied() -> int:
    """Messages that are sent where nobody holds the same, or has a gradient of it."""
    sent: list[int] = []
    with group_of_all() as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr("evenly.parallel.pipeline.ties.send.begin", lambda *_, **__: sent.append(1))
        Ties({"a": [0], "b": [1]}, group).sum([("a", torch.ones(2)), ("b", torch.ones(2))])
        Ties({"a": [0, 1]}, group).sum([("a", None)])
    return len(sent)


def test_what_one_rank_holds_alone_is_not_sent(ranks: KeptRanks) -> None:
    assert ranks.run(untied) == [0, 0]
