"""Attention written out computes what torch's own call does: outputs, weights, gradients, random numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from evenly.parallel.tensor.attention import multi_head_attention

L, S, B, HEADS, WIDTH = 5, 7, 3, 2, 4
E = HEADS * WIDTH
MASKS = ("none", "bool", "float", "bool by head", "float by head")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def inputs_of(kind: str, batched: bool) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of one, two or three tensors, or of other widths."""
    shape = (B,) if batched else ()
    query = draw(L, *shape, E)
    if kind == "self":
        return query, query, query
    key = draw(S, *shape, 3 if kind == "separate" else E)
    return query, key, key if kind == "memory" else draw(S, *shape, 5 if kind == "separate" else E)


def masks_of(mask: str, padding: str, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
    """Every query sees the first key."""
    rows, keys = query.shape[:-1].numel() // L, len(key)
    found: dict[str, Any] = {}
    if mask != "none":
        shape = (rows * HEADS, L, keys) if "head" in mask else (L, keys)
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False
        found["attn_mask"] = hidden if "bool" in mask else draw(*shape)
    if padding != "none":
        hidden = torch.rand(*key.shape[1:-1], keys) < 0.4
        hidden[..., 0] = False
        found["key_padding_mask"] = hidden if padding == "bool" else torch.where(hidden, -1e3, 0.3).double()
    return found


def weights_of(kind: str, bias: bool) -> tuple[list[Any], dict[str, Any]]:
    """Positional arguments after the inputs, with dropout of 0.3; separate weights by name."""
    packed = None if kind == "separate" else draw(3 * E, E)
    biases = (draw(3 * E), draw(6)) if bias else (None, None)
    named: dict[str, Any] = {}
    if kind == "separate":
        each = zip("qkv", (draw(E, E), draw(E, 3), draw(E, 5)), strict=True)
        named = {"use_separate_proj_weight": True, **{f"{name}_proj_weight": one for name, one in each}}
    return [E, HEADS, packed, biases[0], None, None, False, 0.3, draw(6, E), biases[1]], named


def results(function: Any, arguments: list[Any], named: dict[str, Any]) -> list[torch.Tensor]:
    """Of the same random numbers: outputs, weights, the next number that is drawn, gradients of all that has one."""
    tensors = [one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor) and one.requires_grad]
    tensors = [*{id(one): one for one in tensors}.values()]
    torch.manual_seed(5)
    found = [one for one in function(*arguments, **named) if one is not None]
    following = torch.rand(3)
    total = sum((one * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum() for one in found)
    gradients = torch.autograd.grad(total, tensors)
    return [*found, following, *gradients]


def differences(arguments: list[Any], named: dict[str, Any]) -> float:
    own = results(multi_head_attention, arguments, named)
    of_torch = results(F.multi_head_attention_forward, arguments, named)
    assert [one.shape for one in own] == [one.shape for one in of_torch]
    assert own[0].stride() == of_torch[0].stride()
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in zip(own, of_torch, strict=True))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("kind", ["self", "memory", "three", "separate"])
def test_it_is_torchs_own_call(kind: str, batched: bool) -> None:
    torch.manual_seed(0)
    for mask, padding, bias, training in product(MASKS, ("none", "bool", "float"), (True, False), (True, False)):
        inputs = inputs_of(kind, batched)
        masks = masks_of(mask, padding, *inputs[:2])
        arguments, named = weights_of(kind, bias)
        for way in ({"need_weights": False}, {}, {"average_attn_weights": False}):
            found = differences([*inputs, *arguments], {**named, **masks, **way, "training": training})
            assert found <= 1e-12, (mask, padding, bias, training, way)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_mask_said_to_be_causal(padding: str, need_weights: bool) -> None:
    torch.manual_seed(0)
    inputs = inputs_of("self", batched=True)
    masks = masks_of("none", padding, *inputs[:2])
    mask = torch.full((L, L), float("-inf")).double().triu(1)
    arguments, named = weights_of("self", bias=True)
    how = {**named, **masks, "attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    assert differences([*inputs, *arguments], how) <= 1e-12


def test_rows_that_see_nothing() -> None:
    """Zero from the attention in one call, no numbers where weights are asked for: as in torch."""
    torch.manual_seed(0)
    inputs = inputs_of("self", batched=True)
    arguments, named = weights_of("self", bias=True)
    hidden = torch.zeros(B, L, dtype=torch.bool)
    hidden[1] = True
    for need_weights in (True, False):
        how = {**named, "key_padding_mask": hidden, "need_weights": need_weights, "training": False}
        own, of_torch = (
            f(*inputs, *arguments, **how)[0] for f in (multi_head_attention, F.multi_head_attention_forward)
        )
        torch.testing.assert_close(own, of_torch, rtol=0, atol=1e-12, equal_nan=True)


LEFT: dict[str, dict[str, Any]] = {
    "biases": {"bias_k": torch.zeros(1, 1, E), "bias_v": torch.zeros(1, 1, E)},
    "zeros": {"add_zero_attn": True},
    "given keys": {"static_k": torch.zeros(B * HEADS, S, WIDTH)},
    "causal without a mask": {"is_causal": True},
    "a mask of numbers": {"attn_mask": torch.zeros(L, L, dtype=torch.int64)},
    "a mask that is broadcast": {"attn_mask": torch.zeros(1, L)},
    "padding of other keys": {"key_padding_mask": torch.zeros(B, S, dtype=torch.bool)},
    "other heads": {"num_heads": 3},
    "another width": {"embed_dim_to_check": E + 1},
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name: str) -> None:
    inputs = inputs_of("self", batched=True)
    names = "embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p"
    names += " out_proj_weight out_proj_bias"
    arguments = dict(zip(names.split(), weights_of("self", bias=True)[0], strict=True))
    assert multi_head_attention(*inputs, **arguments) is not NotImplemented
    assert multi_head_attention(*inputs, **{**arguments, **LEFT[name]}) is NotImplemented
