"""What can be split in models of many kinds, parameter by parameter, and whether the numbers agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from traced import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Attention,
    Case,
    Convolutions,
    Gated,
    Grouped,
    LanguageModel,
    PackedAttention,
    ResidualMLP,
    class_loss,
    next_token_loss,
    own,
    points,
    tokens,
    transformer,
)

import evenly
from evenly.parallel.tensor.graph import Graph
from evenly.parallel.tensor.ops import OPS
from evenly.parallel.tensor.splits import Derivation, SplitGroup, derive
from evenly.parallel.tensor.trace import trace

SIZE = HEADS * WIDTH
Shown = list[tuple[str, int, int, int, int]]  # name, dim, outer, units, inner


def shown(group: SplitGroup) -> Shown:
    return [(one.name, one.dim, one.outer, one.units, one.inner) for one in group.parameters]


def groups(case: Case) -> list[Shown]:
    return [shown(group) for group in derive(trace(*case)).groups]


def linear(name: str, *, units: int, inner: int = 1, outer: int = 1) -> Shown:
    """A column-split layer with a bias."""
    return [(f"{name}.weight", 0, outer, units, inner), (f"{name}.bias", 0, outer, units, inner)]


def row(name: str, *, units: int, inner: int = 1, outer: int = 1) -> Shown:
    return [(f"{name}.weight", 1, outer, units, inner)]


VOCABULARY_GROUP = [("tok.weight", 0, 1, VOCABULARY, 1)]
MLP_GROUP = [*linear("block.mlp.0", units=40), *row("block.mlp.2", units=40)]


# ------------------------------------------------------------------------------------------------------ own models


def attention_groups(heads: int, width: int) -> list[Shown]:
    by_head = [part for name in "qkv" for part in linear(f"block.attention.{name}", units=heads, inner=width)]
    return [
        by_head + row("block.attention.o", units=heads, inner=width),
        linear("block.attention.v", outer=heads, units=width) + row("block.attention.o", outer=heads, units=width),
    ]


@pytest.mark.parametrize(("heads", "width"), [(4, 8), (3, 5)])
def test_hard_coded_heads(heads: int, width: int) -> None:
    found = groups(own(Attention(SIZE, heads, width)))
    assert found == [VOCABULARY_GROUP, *attention_groups(heads, width), MLP_GROUP]


@pytest.mark.parametrize("how", ["chunk", "view"])
def test_packed_attention(how: str) -> None:
    packed = linear("block.attention.qkv", outer=3, units=HEADS, inner=WIDTH)
    assert groups(own(PackedAttention(SIZE, how))) == [
        VOCABULARY_GROUP,
        packed + row("block.attention.o", units=HEADS, inner=WIDTH),
        MLP_GROUP,
    ]


@pytest.mark.parametrize("how", ["repeat", "gqa"])
def test_grouped_heads_are_split_by_group_within_groups_and_across(how: str) -> None:
    q, k, v, o = (f"block.attention.{name}" for name in "qkvo")
    assert groups(own(Grouped(SIZE, 2, how))) == [
        VOCABULARY_GROUP,
        linear(q, units=2, inner=16)
        + row(o, units=2, inner=16)
        + linear(k, units=2, inner=8)
        + linear(v, units=2, inner=8),
        linear(q, outer=2, units=2, inner=8) + row(o, outer=2, units=2, inner=8),
        row(o, outer=4, units=8) + linear(v, outer=2, units=8),
        MLP_GROUP,
        linear(q, units=4, inner=8) + row(o, units=4, inner=8),
    ]


def test_a_gated_mlp_packed_in_one_weight() -> None:
    found = groups(own(Attention(SIZE, 4, 8), Gated(SIZE, 20)))
    assert found[-1] == linear("block.mlp.gated", outer=2, units=20) + row("block.mlp.down", units=20)


def test_a_residual_mlp_with_three_heads() -> None:
    """Without a norm the stream itself can be split; softmax forbids the width of a head."""
    assert groups((ResidualMLP(), class_loss, points())) == [
        [*linear("up", units=3, inner=7), *row("down", units=3, inner=7)],
        [*row("up", units=5), *linear("down", units=5), *row("last", units=5)],
        linear("last", units=4),
    ]


class OwnAttention(nn.Module):
    """torch's module, called for its output alone unless `seen`: then the weights have a part in it."""

    def __init__(self, seen: bool = False, **settings: Any) -> None:
        super().__init__()
        self.mix, self.seen = nn.MultiheadAttention(SIZE, HEADS, dropout=0.1, batch_first=True, **settings), seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        future = torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)
        mixed, weights = self.mix(x, x, x, attn_mask=future)
        return weights @ mixed if self.seen else mixed


def torchs_heads(name: str) -> Shown:
    packed = linear(f"{name}.in_proj", outer=3, units=HEADS, inner=WIDTH)
    renamed = [(one.replace("proj.", "proj_"), *rest) for one, *rest in packed]
    return [*renamed, *row(f"{name}.out_proj", units=HEADS, inner=WIDTH)]  # type: ignore[list-item]


def test_attention_of_torchs_module() -> None:
    """Its weights, of which it makes a mean over heads, are summed too; where they are used, heads are not split."""
    vocabulary, heads, mlp = derive(trace(*own(OwnAttention()))).groups
    assert [shown(one) for one in (vocabulary, heads, mlp)] == [
        VOCABULARY_GROUP,
        torchs_heads("block.attention.mix"),
        MLP_GROUP,
    ]
    assert heads.forward_bytes == 4 * (3 * 5 * SIZE + 3 * 5 * 5)
    assert groups(own(OwnAttention(seen=True))) == [VOCABULARY_GROUP, MLP_GROUP]
    assert groups(own(OwnAttention(add_bias_kv=True))) == [VOCABULARY_GROUP, MLP_GROUP]


def test_attention_of_torchs_module_to_keys_and_values_of_other_widths() -> None:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(model[0](x, x[..., :6], x[..., :7])[0], (SIZE,)).square().sum()

    model = nn.Sequential(nn.MultiheadAttention(SIZE, HEADS, kdim=6, vdim=7))
    separate: Shown = [(f"0.{name}_proj_weight", 0, 1, HEADS, WIDTH) for name in "qkv"]
    assert groups((model, loss, torch.randn(5, 3, SIZE))) == [separate + torchs_heads("0")[1:]]


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoder_and_decoder(norm_first: bool) -> None:
    encoder = nn.TransformerEncoderLayer(SIZE, HEADS, 40, norm_first=norm_first)
    decoder = nn.TransformerDecoderLayer(SIZE, HEADS, 40, norm_first=norm_first)

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x, (SIZE,))
        return F.layer_norm(model[1](x, model[0](x)), (SIZE,)).square().sum()

    found = derive(trace(nn.ModuleList([encoder, decoder]), loss, torch.randn(5, 3, SIZE)))
    mlps = [linear(f"{at}.linear1", units=40) + row(f"{at}.linear2", units=40) for at in (0, 1)]
    names = ("0.self_attn", "1.self_attn", "1.multihead_attn")
    for group in (*map(torchs_heads, names), *mlps):
        assert group in [shown(one) for one in found.groups]


def test_bytes_count_each_whole_tensor_once() -> None:
    vocabulary, heads, _, mlp = derive(trace(*own(Attention(SIZE, 4, 8)))).groups
    stream = 3 * 5 * SIZE * 4
    # The embedding's sum; the stream meets the head.
    assert (vocabulary.forward_bytes, vocabulary.backward_bytes, vocabulary.sums) == (stream, stream, ("tok",))
    # One input for queries, keys and values.
    assert (heads.forward_bytes, heads.backward_bytes, heads.sums) == (stream, stream, ("block.attention.o",))
    assert (mlp.forward_bytes, mlp.backward_bytes, mlp.products) == (stream, stream, 2 * 3 * 5 * SIZE * 40)
    assert heads.elements == 4 * SIZE * SIZE + 3 * SIZE


def test_a_head_without_its_logits_is_split_by_classes() -> None:
    """The same bytes and products as with them."""

    class WithoutLogits(LanguageModel):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tok(ids[:, :-1]) + self.place[: ids.shape[1] - 1]
            x = self.norm(self.block(x))
            return evenly.nn.linear_cross_entropy(x, self.tok.weight, ids[:, 1:], reduction="sum")

    model = WithoutLogits(Attention(SIZE, 4, 8))
    with_logits = derive(trace(*own(Attention(SIZE, 4, 8))))
    assert derive(trace(model, lambda model, ids: model(ids), tokens())).groups == with_logits.groups


def test_a_head_without_its_logits_is_split_with_its_bias() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        hidden, classes = batch
        return evenly.nn.linear_cross_entropy(hidden, model.weight, classes, bias=model.bias)

    head: Shown = [("weight", 0, 1, 24, 1), ("bias", 0, 1, 24, 1)]
    found = derive(trace(nn.Linear(5, 24), loss, points()))
    assert [shown(one) for one in found.groups] == [head]
    assert found.forbidden["weight"] == ("", "evenly.nn.losses.linear_cross_entropy")


# --------------------------------------------------------------------------------------------------- where it ends


def test_a_group_norm_ends_what_is_split_within_its_groups() -> None:
    found = derive(trace(Convolutions(), lambda m, x: m(x).square().sum(), torch.randn(3, 2, 9)))
    (groups,) = [one for one in found.groups if len(one.parameters) > 1]
    assert [(one.name, one.dim, one.units, one.inner) for one in groups.parameters] == [
        ("0.weight", 0, 2, 2), ("0.bias", 0, 2, 2), ("1.weight", 0, 2, 2), ("1.bias", 0, 2, 2), ("3.weight", 1, 2, 2),
    ]  # fmt: skip
    assert found.forbidden["0.weight"][2] == "conv1d in 0" and groups.sums == ("3",)


def test_an_unknown_operation_bars_what_it_touches_and_is_named() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(5, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(F.relu(self.second(torch.fft.rfft(self.first(x)).abs())))

    found = derive(trace(Strange(), class_loss, (torch.randn(3, 6), torch.arange(3))))
    assert [shown(group) for group in found.groups] == [
        row("first", units=6),
        linear("second", units=8) + row("third", units=8),
        linear("third", units=4),
    ]
    assert found.forbidden["first.weight"] == ("torch.fft.rfft", "")
    assert found.forbidden["second.weight"] == ("", "torch.fft.rfft")


class Doubled(torch.autograd.Function):
    """With a backward that looks at all of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.softmax(-1)


class DoubledUnseen(Doubled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # in a forward that records none anyway
            return x.exp() * 2


@pytest.mark.parametrize("function", [Doubled, DoubledUnseen])
def test_a_backward_that_is_not_seen_bars(function: type[Doubled]) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4))
    found = derive(trace(model, lambda m, b: F.cross_entropy(m[1](function.apply(m[0](b[0]))), b[1]), points()))
    assert found.forbidden["0.weight"] == ("exp", "") and found.forbidden["1.weight"] == ("", "exp")


class DoubledAfterAll(Doubled):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = x.detach() * 3
        with torch.no_grad():
            return (x.exp() + inner) * 2


def test_a_function_whose_forward_records_gradients_bars_and_so_does_the_next() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        x = Doubled.apply(model[1](DoubledAfterAll.apply(model[0](batch[0]))))
        with torch.no_grad():
            model[0](batch[0])
        return F.cross_entropy(x, batch[1])

    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4))
    found = derive(trace(model, loss, points()))
    assert found.forbidden["0.weight"][0] and found.forbidden["1.weight"] == ("exp", found.forbidden["1.weight"][1])
    assert found.forbidden["1.bias"] == ("exp",)


def on_noise(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(torch.randn(3, 5)), batch[1])


def under_no_grad(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        target = model(batch[0])
    return (model(batch[0]) - target).square().sum()


@torch.no_grad()
def of_one_alone(model: Any, batch: Any) -> torch.Tensor:
    return model(batch[0]).sum()


@pytest.mark.parametrize("loss", [on_noise, under_no_grad, of_one_alone])
def test_a_weight_is_split_that_is_used_on_noise_or_without_gradients(loss: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    assert linear("0", units=8) + row("2", units=8) in groups((model, loss, points()))


def test_noise_of_the_shape_of_a_weight_belongs_to_it() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight + torch.randn(self.weight.shape), self.bias)

    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), Noisy(8, 4))
    assert "linear" not in " ".join(derive(trace(model, class_loss, points())).forbidden["0.weight"])


def test_what_no_call_takes_stays_whole() -> None:
    model = ResidualMLP()
    model.never = nn.Parameter(torch.ones(4, 4))
    found = derive(trace(model, class_loss, points()))
    assert found.forbidden["never"] == ("no call takes it", "no call takes it")


def test_a_dim_that_would_stand_twice_is_not_split() -> None:
    """A square weight applied twice: what it puts out is what it takes in."""

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.tanh(super().forward(x)))

    assert groups((Twice(4, 4), class_loss, (torch.randn(3, 4), torch.arange(3)))) == []


def test_a_contraction_of_activations_is_not_split() -> None:
    """Bilinear scores: both sides have the hidden dim."""

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model[0](x) @ model[1](x).T, torch.arange(len(x)))

    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(5, 8))
    assert all(
        "0.weight" not in str(group[0][:1]) or group[0][1] == 1 for group in groups((model, loss, torch.randn(3, 5)))
    )


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda h: h.softmax(-1),
    "cumsum": lambda h: h.cumsum(1),
    "part": lambda h: h[:, :6],
    "shift": lambda h: F.pad(h, (1, -1)),
    "every second": lambda h: h[:, ::2],
    "index": lambda h: h[:, torch.tensor([1, 0])],
    "one": lambda h: h[:, 2, None],
    "mean": lambda h: h.mean(-1, keepdim=True),
    "max": lambda h: h.max(-1, keepdim=True).values,
    "cat": lambda h: torch.cat([h, h], -1),
    "sections": lambda h: h.split([2, 6], -1)[1],
    "norm": lambda h: F.normalize(h, dim=-1),
    "sort": lambda h: h.sort(-1).values,
    "triangle": lambda h: h.tril(),
    "unknown": lambda h: F.pixel_shuffle(h[..., None, None].expand(-1, -1, 2, 2), 2).flatten(1),
    "no common refinement": lambda h: h + h.view(3, 8)[:, None, :].expand(3, 1, 8).reshape(3, 8).view(6, 4).view(3, 8),
}
KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "views": lambda h: h.view(3, 2, 4).transpose(1, 2).mT.flatten(1).unflatten(1, (4, 2)).reshape(3, -1),
    "in place": lambda h: h.mul(2).add_(1).clamp_(min=0),
    "broadcast": lambda h: torch.where(h > 0, h, torch.zeros(1, 1)) * torch.arange(8.0),
    "moved": lambda h: h[:, None].movedim(-1, 0).permute(1, 2, 0).squeeze(1),
    "whole slices": lambda h: h[:][..., None][:, :, 0][0:3],
    "pieces": lambda h: torch.stack(h.chunk(4, 1)).sum(0),
    "glu": lambda h: F.glu(h, -1),
    "types": lambda h: h.double().to(torch.float32).type_as(h).contiguous().clone(),
    "repeat": lambda h: h.repeat(2, 1).repeat_interleave(2, dim=1),
    "einsum": lambda h: torch.einsum("bd,bd->bd", h, h),
    "other dim": lambda h: h.T.softmax(-1).T.cumsum(0),
    "tied to itself": lambda h: h * h.sigmoid(),
}


@pytest.mark.parametrize("name", [*REFUSED, *KEPT])
def test_what_lies_between_two_layers(name: str) -> None:
    """The hidden dim of two layers can be split if what lies between them treats its elements, or pieces, apart."""
    between = {**REFUSED, **KEPT}[name]
    model = nn.ModuleList([nn.Linear(5, 8), nn.LazyLinear(4)])
    with torch.no_grad():
        model[1](between(model[0](torch.randn(3, 5))))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model[1](between(model[0](x)))
        return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))

    hidden = [g for g in groups((model, loss, torch.randn(3, 5))) if any(one[:2] == ("0.weight", 0) for one in g)]
    assert bool(hidden) == (name in KEPT or name == "no common refinement"), hidden


# --------------------------------------------------------------------------------------------------- transformers


def in_layer(layer: int | str, names: list[Shown], template: str) -> Shown:
    return [(template.format(layer, name), *rest) for part in names for name, *rest in part]  # type: ignore[misc]


def only(found: Derivation, wanted: str, dim: int) -> list[Shown]:
    return [shown(g) for g in found.groups if any((one.name, one.dim) == (wanted, dim) for one in g.parameters)]


def both(name: str, **settings: Any) -> Derivation:
    """The derivation with one way to compute attention, which is that with the other."""
    sdpa, eager = (derive(trace(*transformer(name, way, **settings))) for way in ("sdpa", "eager"))
    assert [shown(group) for group in sdpa.groups] == [shown(group) for group in eager.groups]
    return sdpa


def test_gpt2() -> None:
    found = both("gpt2")
    expected: list[Shown] = [
        [("transformer.wte.weight", 0, 1, VOCABULARY, 1)],
        [("transformer.wpe.weight", 0, 1, 9, 1)],
    ]
    for layer in range(2):
        at = f"transformer.h.{layer}"
        expected.append(
            [
                (f"{at}.attn.c_attn.weight", 1, 3, 4, 8),
                (f"{at}.attn.c_attn.bias", 0, 3, 4, 8),
                (f"{at}.attn.c_proj.weight", 0, 1, 4, 8),
            ]
        )
        expected.append(
            [
                (f"{at}.mlp.c_fc.weight", 1, 1, 128, 1),
                (f"{at}.mlp.c_fc.bias", 0, 1, 128, 1),
                (f"{at}.mlp.c_proj.weight", 0, 1, 128, 1),
            ]
        )
    assert [shown(group) for group in found.groups] == expected
    assert found.aliases["lm_head.weight"] == "transformer.wte.weight"
    assert found.groups[0].products > 0  # the head's


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_llama(kv: int, tied: bool) -> None:
    found = both("llama", num_key_value_heads=kv, tie_word_embeddings=tied)
    assert only(found, "model.embed_tokens.weight", 0) == [[("model.embed_tokens.weight", 0, 1, VOCABULARY, 1)]]
    assert only(found, "lm_head.weight", 0) == ([] if tied else [[("lm_head.weight", 0, 1, VOCABULARY, 1)]])
    for layer in range(2):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        names = [f"{at}.{name}_proj.weight" for name in "qkvo"]
        wide = 32 // kv
        by_kv = [
            (names[0], 0, 1, kv, wide),
            (names[1], 0, 1, kv, 8),
            (names[2], 0, 1, kv, 8),
            (names[3], 1, 1, kv, wide),
        ]
        within = [(names[0], 0, kv, 4 // kv, 8), (names[3], 1, kv, 4 // kv, 8)]
        across = [(names[0], 0, 1, 4, 8), (names[3], 1, 1, 4, 8)]
        assert only(found, names[0], 0) == {1: [within], 2: [by_kv, within, across], 4: [by_kv]}[kv]
        assert only(found, f"{mlp}.gate_proj.weight", 0) == [
            [
                (f"{mlp}.gate_proj.weight", 0, 1, 48, 1),
                (f"{mlp}.up_proj.weight", 0, 1, 48, 1),
                (f"{mlp}.down_proj.weight", 1, 1, 48, 1),
            ]
        ]


def test_bert() -> None:
    found = both("bert")
    table = "bert.embeddings.word_embeddings.weight"
    assert only(found, table, 0) == [[(table, 0, 1, VOCABULARY, 1), ("cls.predictions.bias", 0, 1, VOCABULARY, 1)]]
    for layer in range(2):
        at = f"bert.encoder.layer.{layer}"
        heads = [
            part for n in ("query", "key", "value") for part in linear(f"{at}.attention.self.{n}", units=4, inner=8)
        ]
        heads += row(f"{at}.attention.output.dense", units=4, inner=8)
        assert only(found, f"{at}.attention.self.query.weight", 0) == [heads]
        mlp = linear(f"{at}.intermediate.dense", units=48) + row(f"{at}.output.dense", units=48)
        assert only(found, f"{at}.intermediate.dense.weight", 0) == [mlp]


def test_t5() -> None:
    """Relative biases belong to the heads of every layer that uses them."""
    found = both("t5")
    assert only(found, "shared.weight", 0) == [[("shared.weight", 0, 1, VOCABULARY, 1)]]

    def heads(at: str, bias: bool = False) -> Shown:
        parts = [*[(f"{at}.{name}.weight", 0, 1, 4, 8) for name in "qkv"], (f"{at}.o.weight", 1, 1, 4, 8)]
        return parts + ([(f"{at}.relative_attention_bias.weight", 1, 1, 4, 1)] if bias else [])

    for tower in ("encoder", "decoder"):
        own_heads = [heads(f"{tower}.block.{layer}.layer.0.SelfAttention", bias=not layer) for layer in range(2)]
        assert only(found, f"{tower}.block.1.layer.0.SelfAttention.q.weight", 0) == [own_heads[0] + own_heads[1]]
    cross = [heads(f"decoder.block.{layer}.layer.1.EncDecAttention") for layer in range(2)]
    assert only(found, "decoder.block.0.layer.1.EncDecAttention.k.weight", 0) in ([cross[0] + cross[1]], [cross[0]])
    mlp = "decoder.block.1.layer.2.DenseReluDense"
    assert only(found, f"{mlp}.wi.weight", 0) == [
        [(f"{mlp}.wi.weight", 0, 1, 48, 1), (f"{mlp}.wo.weight", 1, 1, 48, 1)]
    ]


def test_vit() -> None:
    found = both("vit")
    for layer in range(2):
        at = f"vit.layers.{layer}"
        heads = [part for n in "qkv" for part in linear(f"{at}.attention.{n}_proj", units=4, inner=8)]
        heads += row(f"{at}.attention.o_proj", units=4, inner=8)
        assert only(found, f"{at}.attention.q_proj.weight", 0) == [heads]
        mlp = linear(f"{at}.mlp.fc1", units=48) + row(f"{at}.mlp.fc2", units=48)
        assert only(found, f"{at}.mlp.fc1.weight", 0) == [mlp]
    assert only(found, "classifier.weight", 0) == [linear("classifier", units=4)]
    assert not any("embeddings" in one.name for group in found.groups for one in group.parameters)


# ------------------------------------------------------------------------------------------------------ the numbers

CASES: dict[str, Callable[[], Case]] = {
    "heads": lambda: own(Attention(SIZE, 3, 5)),
    "chunk": lambda: own(PackedAttention(SIZE, "chunk"), Gated(SIZE, 20)),
    "torch": lambda: own(OwnAttention()),
    "view": lambda: own(PackedAttention(SIZE, "view")),
    "repeat": lambda: own(Grouped(SIZE, 2, "repeat")),
    "gqa": lambda: own(Grouped(SIZE, 2, "gqa")),
    "residual": lambda: (ResidualMLP(), class_loss, points()),
    **{name: lambda name=name: transformer(name) for name in ("gpt2", "llama", "bert", "t5", "vit")},
}


# Rows of tables and classes have numbers of their own; a stream without a norm begins in the batch.
NUMBERED = ("tok.", "embed", "wte", "wpe", "shared", "lm_head", "classifier", "last")


def turn_round(model: nn.Module, group: SplitGroup) -> None:
    """Puts the units of every parameter of the group in the opposite order."""
    parameters = dict(model.named_parameters())
    for one in group.parameters:
        data = parameters[one.name].data
        opened = data.unflatten(one.dim, (one.outer, one.units, one.inner))
        data.copy_(opened.flip(one.dim + 1).reshape(data.shape))


def is_across(group: SplitGroup, others: tuple[SplitGroup, ...]) -> bool:
    """Whether the group deals heads of several groups, whose keys and values differ."""
    return any(shown(group) != shown(other) and [*names(group)] == [*names(other)] for other in others)


def names(group: SplitGroup) -> list[str]:
    return [one.name for one in group.parameters]


@pytest.mark.parametrize("name", CASES)
def test_units_stand_for_each_other(name: str) -> None:
    """What is dealt to ranks has no order of its own: with the units of a group turned round the loss stays."""
    model, loss, batch = CASES[name]()
    model = model.double().eval()
    if isinstance(batch, tuple):
        batch = tuple(part.double() if part.is_floating_point() else part for part in batch)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    found = derive(trace(model, loss, batch)).groups
    checked = [
        group
        for group in found
        if not is_across(group, found) and group.products and not any(part in str(names(group)) for part in NUMBERED)
    ]
    assert checked
    with torch.no_grad():
        right = loss(model, batch)
        for group in checked:
            turn_round(model, group)
            torch.testing.assert_close(loss(model, batch), right, rtol=1e-6, atol=0)  # llama and T5 norm in float32
            turn_round(model, group)


# ------------------------------------------------------------------------------------------------------ invariants


@pytest.mark.parametrize("name", CASES)
def test_atoms_multiply_to_the_size_of_their_dim(name: str) -> None:
    traced = trace(*CASES[name]())
    graph = Graph(traced, {name: op.propagate for name, op in OPS.items()})
    assert graph.dims.keys() == set(range(len(traced.values)))
    for index, value in enumerate(traced.values):
        lengths = [graph.factors.length(graph.factors.now(dim)) for dim in graph.dims[index]]
        assert lengths == [max(size, 1) for size in value.shape]


def test_a_tied_head_and_a_batch_of_one() -> None:
    """Dims of size 1 hold no factors; a batch of one row is split like any other."""
    one = (LanguageModel(Attention(SIZE, 4, 8)), next_token_loss, tokens(rows=1))
    assert groups(one) == groups(own(Attention(SIZE, 4, 8)))
