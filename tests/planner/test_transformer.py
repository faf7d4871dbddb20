"""What blocks compute and keep, against the formulas of the literature, and their parameters against exact counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenly.model.parts import BlockCost, ModelCosts, OpCost, Recompute
from evenly.planner.known import find_shape, known_names
from evenly.planner.shape import Shape, parameters
from evenly.planner.transformer import Kernels, Split, block_kinds, transformer_parts

S, B, H, A, V = 2048, 4, 4096, 32, 51200
GPT = Shape(
    name="gpt",
    layers=24,
    hidden=H,
    heads=A,
    kv_heads=A,
    head_dim=H // A,
    ffn=4 * H,
    vocab=V,
    outputs=V,
    sequence=S,
    tied=True,
)
KERNELS = Kernels()
SBH = S * B * H


def split(**changes: object) -> Split:
    return replace(Split(samples=B, sequence=S), **changes)  # pyright: ignore[reportArgumentType]


def parts(shape: Shape = GPT, kernels: Kernels = KERNELS, **changes: object) -> ModelCosts:
    return transformer_parts(shape, split(**changes), kernels)


def kept(shape: Shape = GPT, kernels: Kernels = KERNELS, recompute: Recompute = "none", **changes: object) -> int:
    return parts(shape, kernels, **changes).blocks[0].saved_bytes[recompute]


def flops(works: object) -> float:
    assert isinstance(works, list)
    return sum(work.flops * work.times for work in works)


def again(part: BlockCost) -> list[OpCost]:
    return [work for work in part.forward if work.recomputed]


# ------------------------------------------------------------------------------------------------- what is kept


def test_fused_attention_keeps_a_number_per_token_and_head() -> None:
    assert kept(kernels=Kernels()) == pytest.approx(SBH * 32 + 4 * A * S * B)


def test_fewer_key_heads_and_gates_are_kept_as_they_are_wide() -> None:
    llama = replace(GPT, kv_heads=8, activation="swiglu", ffn=3 * H, bias=False, qkv_bias=False, norm="rmsnorm")
    # norms and what goes into products 8, queries and output 4, keys and values 4 / 4, gate, up and product 3 x 3 x 2
    assert kept(llama, Kernels()) == pytest.approx(SBH * (8 + 4 + 1 + 18) + 4 * A * S * B)
    # Of fewer key heads than ranks every rank has one.
    per_rank = SBH * (8 + 4 / 16 + 2 * 2 / A + 18 / 16) + 4 * A / 16 * S * B
    assert kept(llama, Kernels(), tensor=16) == pytest.approx(per_rank)


def test_evenly_keeps_what_products_and_attention_give() -> None:
    cheap = Kernels()
    # input 2, queries, keys, values 6, attention 2, output 2, up 8, down 2
    assert kept(kernels=cheap, recompute="selective") == pytest.approx(SBH * 22 + 4 * A * S * B)
    # Sums over the tensor axis are whole on every rank before they are added up.
    tensor = SBH * (2 + 4 + 16 / 4) + 4 * A / 4 * S * B
    split_tokens = tensor - 2 * SBH * 3 / 4
    assert kept(kernels=cheap, recompute="selective", tensor=4) == pytest.approx(tensor)
    assert kept(kernels=cheap, recompute="selective", tensor=4, split_sequence=True) == pytest.approx(split_tokens)


# ------------------------------------------------------------------------------------------------ what is computed


def test_fused_causal_attention_computes_half_of_the_pairs_and_its_backward_pass_five_products_for_two() -> None:
    work, back = (
        next(work for work in works if work.kind == "attention")
        for block in parts(kernels=Kernels()).blocks[:1]
        for works in (block.forward, block.backward)
    )
    assert work.flops == pytest.approx(4 * B * S * S * H / 2)
    assert back.flops == pytest.approx(2.5 * work.flops)
    both_ways = parts(replace(GPT, causal=False), Kernels()).blocks[0].forward
    assert sum(work.flops for work in both_ways if work.kind == "attention") == pytest.approx(4 * B * S * S * H)


def test_a_window_computes_the_pairs_in_it() -> None:
    def pairs(window: int | None, *, causal: bool) -> float:
        shape = replace(GPT, window=window, causal=causal)
        works = parts(shape, Kernels()).blocks[0].forward
        return sum(work.flops for work in works if work.kind == "attention") / (4 * B * H)

    exact = sum(min(token + 1, 256) for token in range(S))
    assert pairs(256, causal=True) == pytest.approx(exact, rel=1e-3)
    assert pairs(256, causal=False) == pytest.approx(256 * S)
    assert pairs(S, causal=True) == pairs(None, causal=True) == pairs(10 * S, causal=True)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_ranks_of_the_tensor_axis_share_the_operations(t: int) -> None:
    one, share = parts().blocks[0], parts(tensor=t).blocks[0]
    assert flops(list(share.forward)) == pytest.approx(flops(list(one.forward)) / t)
    assert flops(list(share.backward)) == pytest.approx(flops(list(one.backward)) / t)


def test_the_tensor_axis_sums_twice_per_block_once_more_for_the_encoder_and_once_for_both_ends() -> None:
    whole = 2 * SBH
    for sp in (False, True):
        model = parts(tensor=4, split_sequence=sp)
        assert [*model.blocks[0].collectives] == [("all_reduce", whole)] * 2
        assert [*model.before.collectives] == [*model.after.collectives] == [("all_reduce", whole // 2)]
    encoder, *_, decoder = parts(replace(GPT, encoder_layers=2), tensor=4).blocks
    assert (len(encoder.collectives), len(decoder.collectives)) == (2, 3)
    assert not parts().blocks[0].collectives and not parts().after.collectives


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_all_is_multiplied_in_the_precision_of_the_run(dtype: str) -> None:
    model = parts(dtype=dtype)
    works = [*model.blocks[0].forward, *model.blocks[0].backward, *model.after.forward, *model.after.backward]
    assert {work.dtype for work in works if work.flops} == {dtype}


# ------------------------------------------------------------------------------------------------- kinds of blocks


@pytest.mark.parametrize("name", known_names())
def test_known_shapes_have_their_parameters_in_their_parts(name: str) -> None:
    shape = find_shape(name)
    model = transformer_parts(shape, Split(samples=1, sequence=shape.sequence), Kernels())
    found = model.before.parameters + sum(block.parameters for block in model.blocks) + model.after.parameters
    assert found == parameters(shape)
    assert len(model.blocks) == shape.layers + shape.encoder_layers
    assert model.tied_parameters == (shape.vocab * shape.hidden if shape.tied else 0)


@pytest.mark.parametrize("name", ["gpt2-xl", "llama-3.1-8b", "t5-large", "qwen3-0.6b", "mixtral-8x7b"])
@pytest.mark.parametrize("t", [2, 4, 8])
def test_ranks_of_the_tensor_axis_hold_all_parameters_and_some_of_them_all(name: str, t: int) -> None:
    shape = find_shape(name)
    for kind in {*block_kinds(shape)}:
        place = block_kinds(shape).index(kind)
        one, many = (
            transformer_parts(shape, Split(samples=1, sequence=64, tensor=size), Kernels()).blocks[place].parameters
            for size in (1, t)
        )
        vectors = (shape.norms + kind.cross + 12 * shape.experts) * 4 * shape.hidden
        router = kind.experts * shape.hidden * shape.experts
        assert one / t <= many <= one / t + vectors + router


def test_decoders_attend_to_the_encoder_and_encoders_to_all() -> None:
    shape = replace(GPT, layers=2, encoder_layers=3)
    blocks = parts(shape, Kernels()).blocks
    encoder, decoder = blocks[0], blocks[-1]
    assert blocks == [encoder] * 3 + [decoder] * 2
    width = 4 * B * S * H
    assert [work.flops for work in encoder.forward if work.kind == "attention"] == [width * S]
    assert [work.flops for work in decoder.forward if work.kind == "attention"] == [width * S / 2, width * S]
    # A norm's input, queries' input, queries, keys, values and what attention gives: 6 x 2, and its statistics.
    assert decoder.saved_bytes["none"] - encoder.saved_bytes["none"] == pytest.approx(12 * SBH + 4 * A * S * B)
    assert flops(list(decoder.forward)) - flops(list(encoder.forward)) == pytest.approx(
        8 * B * S * H**2 + 4 * B * S * S * H / 2
    )


def test_first_blocks_without_experts_have_one_mlp() -> None:
    experts = replace(GPT, experts=8, experts_per_token=2, expert_ffn=H, shared_experts=1, dense_layers=1, bias=False)
    model = parts(experts, Kernels())
    dense, sparse = model.blocks[0], model.blocks[1]
    assert flops(list(dense.forward)) == pytest.approx(
        flops(list(parts(replace(GPT, bias=False), Kernels()).blocks[0].forward))
    )
    # Three experts of a quarter of the width for one whole, and the router.
    saved = 4 * B * S * H * (4 * H - 3 * H) - 2 * B * S * H * 8
    assert flops(list(dense.forward)) - flops(list(sparse.forward)) == pytest.approx(saved)
    assert dense.saved_bytes["none"] - sparse.saved_bytes["none"] == pytest.approx(2 * 2 * SBH)
    assert sparse.parameters - dense.parameters == 9 * 2 * H * H + 8 * H - 8 * H * H
    assert {work.times for work in sparse.forward if work.kind == "matmul"} == {1, 8}


def test_a_block_of_one_norm_hands_attention_and_mlp_the_same_tensor() -> None:
    assert kept(replace(GPT, norms=1)) == pytest.approx(kept() - 2 * 2 * SBH)
    assert kept(replace(GPT, norms=4)) == pytest.approx(kept() + 2 * 2 * SBH)


def test_images_are_classified_once_per_sample() -> None:
    shape = find_shape("vit-b-16")
    assert transformer_parts(shape, Split(samples=8, sequence=197), Kernels()).after.logits == 8 * 1000
    assert parts().after.logits == B * S * V
    assert parts(tensor=4).after.logits == B * S * V // 4


@pytest.mark.parametrize(("element", "times"), [(2, 1), (4, 2), (8, 4)])
def test_wider_activations_keep_more_but_statistics_stay(element: int, times: int) -> None:
    statistics = 4 * A * S * B
    assert kept(element_bytes=element) == pytest.approx((kept() - statistics) * times + statistics)


def test_selective_recomputation_computes_again_what_multiplies_nothing() -> None:
    block = parts(tensor=2).blocks[0]
    assert {work.kind for work in again(block)} == {"memory"} and len(block.collectives_again) == 1
    assert not any(work.recomputed for work in block.backward)


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "mixtral-8x7b", "t5-base", "bert-base", "falcon-7b"])
def test_recomputing_more_keeps_less(name: str) -> None:
    for block in transformer_parts(find_shape(name), split(samples=1), Kernels()).blocks:
        assert 0 < block.saved_bytes["full"] <= block.saved_bytes["selective"] <= block.saved_bytes["none"]
        assert block.input_bytes <= block.saved_bytes["full"]
