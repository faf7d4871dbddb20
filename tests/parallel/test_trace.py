"""A trace holds what the code called, disturbs nothing, and is refused in words."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced import Attention, own, transformer

from evenly.errors import PlanError
from evenly.parallel.tensor.splits import derive
from evenly.parallel.tensor.trace import OPAQUE, CallTrace, Ref, trace
from evenly.torch_private import fake_mode


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 5, bias=False)
        self.register_buffer("scale", torch.ones(6))
        self.offset = torch.full((5,), 0.5)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(x)) * self.scale
        return self.second(F.dropout(h, 0.1, self.training)) + self.offset


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def functions(traced: CallTrace) -> list[str]:
    return [call.function for call in traced.calls]


def test_calls_in_order_with_their_module_tensors_and_settings() -> None:
    traced = trace(Small(), square, torch.randn(3, 5))
    assert functions(traced) == ["linear", "gelu", "mul", "dropout", "linear", "add", "square", "sum"]
    assert [call.module for call in traced.calls] == ["first", "", "", "", "second", "", "", ""]
    assert traced.parameters == {"first.weight": 0, "first.bias": 1, "second.weight": 2}
    first, dropped = traced.calls[0], traced.calls[3]
    assert first.arguments[1:] == (Ref(0), Ref(1))
    assert dropped.arguments == (Ref(traced.calls[2].outputs[0]),)
    assert dropped.keywords == {"p": 0.1, "training": True, "inplace": False}
    values = [traced.values[index] for index in first.inputs]
    assert [value.source for value in values] == ["batch", "parameter", "parameter"]
    assert [value.requires_grad for value in values] == [False, True, True]
    assert [traced.values[index].source for index in traced.calls[2].inputs] == ["call", "buffer"]
    assert [traced.values[index].source for index in traced.calls[5].inputs] == ["call", "constant"]
    out = traced.values[first.outputs[0]]
    assert (out.shape, out.dtype, out.requires_grad, out.bytes) == ((3, 6), torch.float32, True, 72)
    assert first.place == "linear in first"


def test_ties_are_one_value() -> None:
    model = Small()
    model.second.weight = nn.Parameter(torch.zeros(6, 5))
    model.first.weight = model.second.weight
    traced = trace(model, lambda m, x: m.second.weight.sum(), torch.zeros(1))
    assert traced.parameters == {"first.weight": 0, "first.bias": 1, "second.weight": 0}
    assert traced.calls[0].inputs == [0]


def test_changes_in_place_and_lists_of_tensors() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        x = torch.cat([batch["x"], batch["y"][0]])
        x[0] = 1
        x += 1
        return x.sum()

    traced = trace(nn.Identity(), loss, {"x": torch.zeros(2), "y": [torch.zeros(3)]})
    assert functions(traced) == ["cat", "__setitem__", "add_", "sum"]
    cat, item, add, _ = traced.calls
    assert cat.arguments == ((Ref(0), Ref(1)),)
    assert item.outputs == add.outputs == cat.outputs


def test_no_memory_is_needed_for_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 10**9), nn.Linear(10**9, 10**6))
    traced = trace(model, square, torch.zeros(2, 5))
    assert traced.values[traced.calls[1].outputs[0]].shape == (2, 10**6)


def test_tensors_of_the_private_mode_hold_no_numbers() -> None:
    with fake_mode():
        tensor = torch.empty(10**6, 10**6)
    assert tensor.device.type == "cpu"
    assert type(tensor).__name__ == "FakeTensor"


def test_neither_the_model_nor_random_states_change() -> None:
    class Drawing(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.random(), np.random.rand(), torch.rand(3)
            self.scale.add_(1)
            self.seen = x
            return super().forward(x)

    model, x = Drawing().eval(), torch.randn(3, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    with torch.no_grad():
        traced = trace(model, square, x)
    assert "add_" in functions(traced) and traced.values[traced.calls[-1].outputs[0]].requires_grad
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert not model.training and not hasattr(model, "seen")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_recomputed_blocks_are_traced_once() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()

    assert functions(trace(Small(), loss, torch.zeros(3, 5))).count("linear") == 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_models_of_transformers(name: str, attention: str) -> None:
    traced = trace(*transformer(name, attention))
    used = {index for call in traced.calls for index in call.inputs}
    assert {*traced.parameters.values()} <= used
    assert ("scaled_dot_product_attention" in functions(traced)) == (attention == "sdpa")
    assert "dropout" in functions(traced) or name == "llama"


def attended(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x, x, x, need_weights=False)[0].sum()


def test_attention_of_torchs_module_is_seen_from_within() -> None:
    """But for what is put behind the keys: that stays one call."""
    traced = trace(nn.MultiheadAttention(8, 2), attended, torch.zeros(5, 3, 8))
    found = functions(traced)
    assert "scaled_dot_product_attention" in found and "multi_head_attention_forward" not in found
    assert traced.calls[0].inputs[1] == traced.parameters["in_proj_weight"]
    behind = trace(nn.MultiheadAttention(8, 2, add_bias_kv=True), attended, torch.zeros(5, 3, 8))
    assert functions(behind) == ["multi_head_attention_forward", "sum"]


def test_masks_are_not_looked_at_to_find_whether_they_are_causal() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1)
    for model, call in ((encoder, lambda m, x: m(x, mask).sum()), (decoder, lambda m, x: m(x, x, mask).sum())):
        traced = trace(model, call, torch.zeros(5, 3, 8))
        (attention, *_) = [call for call in traced.calls if call.function == "scaled_dot_product_attention"]
        assert traced.values[attention.inputs[3]].shape == (5, 5)
    assert nn.modules.transformer._detect_is_causal_mask(mask)  # after the trace as before it


# ------------------------------------------------------------------------------------------------------------- refusals


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def behind_the_scenes(x: torch.Tensor) -> torch.Tensor:
    """As compiled code computes."""
    with torch._C.DisableTorchFunction():
        return x + 1


class Odd(nn.Module):
    """Calls `forward` with what a layer of its own makes."""

    def __init__(self, forward: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.call = nn.Linear(5, 5), forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.inner(x))


def traced_with(forward: Callable[[torch.Tensor], Any]) -> CallTrace:
    return trace(nn.Sequential(Odd(forward)), lambda model, x: model(x).sum(), torch.randn(3, 5))


@pytest.mark.parametrize(
    ("forward", "last"),
    [
        (lambda h: h * h.max().item(), "mul"),
        (lambda h: (h if h.sum() > 0 else -h).exp(), "exp"),
        (lambda h: h[h > 0].exp(), "exp"),
        (lambda h: h[torch.nonzero(h)[:, 0]].exp(), "exp"),
        (lambda h: torch.tensor(h.detach().numpy()).exp() + h, "add"),
        (lambda h: torch.stack([h[n].exp() for n in h.argmax(0).tolist()]), "stack"),
    ],
)
def test_code_that_asks_for_numbers_is_followed_to_its_end(forward: Callable[[torch.Tensor], Any], last: str) -> None:
    traced = traced_with(forward)
    assert not traced.ended and [call.function for call in traced.calls][-2:] == [last, "sum"]
    assert traced.values[traced.calls[-1].outputs[0]].requires_grad


def test_numbers_of_the_batch_are_its_own() -> None:
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x[0, 1] = 7
        assert (x > 5).sum().item() == 1 and x.argmax().tolist() == 1
        return model(x[x[:, 1] == 7]).sum()

    batch = torch.zeros(3, 5)
    traced = trace(nn.Linear(5, 5), forward, batch)
    assert not traced.ended and not batch.any()
    (product,) = [call for call in traced.calls if call.function == "linear"]
    assert traced.values[product.inputs[0]].shape == (1, 5)


@functools.lru_cache
def ramp(length: int) -> torch.Tensor:
    return torch.arange(length)


def test_no_cache_of_the_model_keeps_what_has_no_numbers() -> None:
    traced_with(lambda h: h * ramp(5))
    assert ramp(5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("unseen", [behind_the_scenes, torch.func.vmap(torch.exp)], ids=["compiled", "mapped"])
def test_what_no_function_of_torch_made_is_one_call_that_nothing_is_split_by(unseen: Any) -> None:
    traced = traced_with(lambda h: F.relu(unseen(h)))
    opaque, followed = (next(c for c in traced.calls if c.function == name) for name in (OPAQUE, "relu"))
    linear = next(call for call in traced.calls if call.function == "linear")
    assert opaque.inputs == [*linear.outputs] and not traced.ended and followed
    assert derive(traced).forbidden["0.inner.weight"][0] == f"{OPAQUE} in 0"


def test_a_trace_ends_where_code_fails_and_says_where() -> None:
    traced = traced_with(lambda h: h @ h)
    assert [call.function for call in traced.calls] == ["linear"]
    found = traced.ended
    assert re.search(r"same reduction dim.* \(in the call of matmul in 0 \(test_trace.py:\d+\)\)", found)
    attention = nn.MultiheadAttention(6, 2)
    found = traced_with(
        lambda h: F.multi_head_attention_forward(
            h, h, h, 5, 1, attention.in_proj_weight, None, None, None, False, 0.0, attention.out_proj.weight, None
        )[0]
    ).ended
    assert re.search(r" \(in the call of linear in 0 \(test_trace.py:\d+\)\)", found)
    assert re.search(r"KeyError: 'not there'.* \(test_trace.py:\d+\)", traced_with(lambda h: {}["not there"]).ended)


def test_code_that_fails_before_its_first_layer_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        trace(nn.Linear(5, 5), lambda model, x: model(x["not there"]), torch.randn(3, 5))
    assert "tensor=N" in caught.value.asked and "ddp, zero3" in caught.value.do


def test_calls_whose_backward_is_not_seen_are_marked() -> None:
    """What a function with a backward of its own computes is seen, but not its backward."""
    traced = trace(nn.Linear(5, 5), lambda m, x: Doubled.apply(m(x)).sum(), torch.randn(3, 5))
    assert [(call.function, call.hidden) for call in traced.calls] == [("linear", False), ("mul", True), ("sum", False)]


def test_a_head_used_by_its_weight() -> None:
    traced = trace(*own(Attention(32, 4, 8)))
    turned = next(call for call in traced.calls if call.function == "T")
    assert turned.inputs == [traced.parameters["tok.weight"]]
