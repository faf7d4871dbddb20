"""What blocks of published libraries compute and save, against the literature; times are finite."""

from __future__ import annotations

import sys
from dataclasses import astuple, replace
from math import inf
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks.published.libraries import (
    LibraryKernels,
    PublishedConfig,
    PublishedSplit,
    Selective,
    library_named,
    library_names,
    offloaded,
    published_split,
)
from evenly.hardware.cluster import Cluster
from evenly.hardware.devices import device_names
from evenly.model.parts import BlockCost, ModelCosts, OpCost, Recompute
from evenly.planner.known import find_shape
from evenly.planner.shape import Shape
from evenly.planner.speeds import shipped, speeds_of
from evenly.planner.time import Machine, step_time
from evenly.planner.transformer import transformer_parts

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
NAIVE = LibraryKernels(attention="naive", dropout=True)
SBH = S * B * H


def split(**changes: object) -> PublishedSplit:
    return replace(PublishedSplit(samples=B, sequence=S), **changes)  # pyright: ignore[reportArgumentType]


def parts(shape: Shape = GPT, kernels: LibraryKernels = NAIVE, **changes: object) -> ModelCosts:
    return transformer_parts(shape, split(**changes), kernels)


def kept(shape: Shape = GPT, kernels: LibraryKernels = NAIVE, recompute: Recompute = "none", **changes: object) -> int:
    return parts(shape, kernels, **changes).blocks[0].saved_bytes[recompute]


def flops(works: object) -> float:
    assert isinstance(works, list)
    return sum(work.flops * work.times for work in works)


def again(part: BlockCost) -> list[OpCost]:
    return [work for work in part.forward if work.recomputed]


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_whole_bytes_are_those_of_korthikanti_2022(t: int) -> None:
    scores = 5 * A * S / H
    assert kept(tensor=t) == pytest.approx(SBH * (10 + 24 / t + scores / t))  # equation 2
    assert kept(tensor=t, split_sequence=True) == pytest.approx(SBH / t * (34 + scores))  # equation 4
    assert kept(tensor=t, split_sequence=True, recompute="selective") == pytest.approx(SBH * 34 / t)  # equation 6
    assert kept(tensor=t, recompute="full") == pytest.approx(2 * SBH)


def test_what_is_gathered_over_the_tensor_axis_may_be_kept_whole() -> None:
    whole = kept(kernels=replace(NAIVE, gathers_kept=True), tensor=4, split_sequence=True)
    assert whole - kept(tensor=4, split_sequence=True) == pytest.approx(2 * 2 * SBH * 3 / 4)


def test_without_dropout_no_masks_and_one_copy_of_the_scores_are_kept() -> None:
    assert kept(kernels=LibraryKernels(attention="naive")) == pytest.approx(SBH * 32 + 2 * A * S * S * B)


@pytest.mark.parametrize(("element", "times"), [(2, 1), (4, 2), (8, 4)])
def test_wider_activations_keep_more_but_masks_stay(element: int, times: int) -> None:
    masks = 2 * SBH + A * S * S * B
    assert kept(element_bytes=element) == pytest.approx((kept() - masks) * times + masks)


def test_ranks_of_the_context_axis_keep_their_tokens() -> None:
    assert kept(kernels=LibraryKernels(), context=4) == pytest.approx(kept(kernels=LibraryKernels()) / 4)
    assert kept(context=4) == pytest.approx(kept() / 4)  # all keys, a quarter of the queries


def test_a_window_saves_no_scores_that_are_written_for_all_pairs() -> None:
    assert kept(replace(GPT, window=256)) == kept()


def test_maxtext_keeps_queries_keys_and_values() -> None:
    assert kept(kernels=LibraryKernels(selective="rest"), recompute="selective") == pytest.approx(SBH * 8)


def test_fms_fsdp_recomputes_every_second_block() -> None:
    blocks = parts(kernels=LibraryKernels(selective="blocks")).blocks
    assert [block.saved_bytes["selective"] for block in blocks[:4]] == [
        blocks[0].saved_bytes["none"],
        blocks[0].saved_bytes["full"],
    ] * 2
    assert not again(blocks[0]) and len(again(blocks[1])) == len(blocks[1].forward)


@pytest.mark.parametrize("selective", ["attention", "rest", "blocks"])
@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "mixtral-8x7b", "t5-base", "bert-base", "falcon-7b"])
def test_recomputing_more_keeps_less(name: str, selective: Selective) -> None:
    for block in transformer_parts(find_shape(name), split(samples=1), LibraryKernels(selective=selective)).blocks:
        assert 0 < block.saved_bytes["full"] <= block.saved_bytes["selective"] <= block.saved_bytes["none"]
        assert block.input_bytes <= block.saved_bytes["full"]


def test_operations_of_a_step_are_those_of_narayanan_2021() -> None:
    model = parts()
    forward = sum(flops(list(block.forward)) for block in model.blocks)
    backward = sum(flops(list(block.backward)) for block in model.blocks)
    head = flops(list(model.after.forward)) + flops(list(model.after.backward))
    layers = GPT.layers
    # Section 5.1: with all of a block computed anew, 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    whole = 96 * B * S * layers * H**2 * (1 + S / (6 * H) + V / (16 * layers * H))
    assert 2 * forward + backward + head == pytest.approx(whole)


@pytest.mark.parametrize(
    ("selective", "kinds", "sums"), [("attention", {"attention"}, 0), ("rest", {"matmul", "attention", "memory"}, 1)]
)
def test_selective_recomputation_computes_again_what_its_library_does(
    selective: Selective, kinds: set[str], sums: int
) -> None:
    block = parts(kernels=LibraryKernels(selective=selective), tensor=2).blocks[0]
    assert {work.kind for work in again(block)} == kinds
    assert len(block.collectives_again) == sums
    assert not any(work.recomputed for work in block.backward)
    if selective == "rest":
        (once,) = (work for work in block.forward if not work.recomputed)
        assert (once.inner, once.columns) == (H, 3 * H // 2)
        # A product of the MLP that has the sizes of that of queries, keys and values is another one.
        alike = parts(replace(GPT, ffn=3 * H), LibraryKernels(selective=selective)).blocks[0]
        assert len(again(alike)) == len(alike.forward) - 1


def test_naive_attention_is_computed_again_whole() -> None:
    assert flops(again(parts().blocks[0])) == pytest.approx(4 * B * S * S * H)


@pytest.mark.parametrize("dtype", ["float8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kernels", [LibraryKernels(), NAIVE])
def test_narrow_types_are_for_products_of_blocks_with_weights(dtype: str, kernels: LibraryKernels) -> None:
    model = parts(kernels=kernels, dtype=dtype)
    products = [work for work in model.blocks[0].forward if work.kind == "matmul" and work.dtype == dtype]
    assert flops(products) == pytest.approx(24 * B * S * H**2)
    assert {work.dtype for work in model.blocks[0].forward if work.flops} == {dtype, "bfloat16"}
    assert {work.dtype for work in model.after.forward if work.flops} == {"bfloat16"}


def test_every_library_loads() -> None:
    for name in library_names():
        library = library_named(name)
        assert library.holdings.weights > 0 and library.passes > 0
        assert 0 <= library.tensor_hidden <= 1 and 0 <= library.data_hidden <= 1
        assert library.kernel in shipped()["shares"]["attention"]


def test_libraries_recompute_selectively_as_they_do() -> None:
    found = {name: library_named(name).kernels for name in ("nemo", "maxtext")}
    assert found == {"nemo": LibraryKernels(loss_bytes=24.0, narrow=True), "maxtext": LibraryKernels(selective="rest")}


@pytest.mark.parametrize("name", library_names())
def test_times_are_finite_and_add_up(name: str) -> None:
    library = library_named(name)
    for device in device_names():
        cluster = Cluster(2, 4, device)
        machine = Machine(cluster, speeds_of(cluster), library)
        for config in (
            PublishedConfig(data=4, tensor=2, zero=1, batch=4, dtype="float8", sequence=1024),
            PublishedConfig(data=2, context=4, zero=2, batch=4, recompute="selective", sequence=1024),
            PublishedConfig(data=4, pipeline=2, batch=16, recompute="full", dtype="float32", sequence=1024),
        ):
            parts = transformer_parts(find_shape("gpt2"), published_split(config), library.kernels)
            time, _ = step_time(parts, config, machine)
            assert time.step_s == pytest.approx(sum(astuple(time)))
            assert min(astuple(time)) >= 0 and 0 < time.step_s < inf


LLAMA = replace(GPT, ffn=11008, activation="swiglu", norm="rmsnorm", bias=False, kv_heads=8)


@pytest.mark.parametrize(("dtype", "narrow"), [("float8", 1.0), ("mxfp8", 1.03125), ("nvfp4", 0.5625)])
def test_inputs_of_products_are_saved_as_narrow_as_they_are_multiplied(dtype: str, narrow: float) -> None:
    def of_token(**changes: object) -> float:
        return kept(LLAMA, LibraryKernels(narrow=True), **changes) / (S * B) - 4 * A

    keys = 2 * 8 * 128
    # inputs of two norms; queries, keys and values; attention's result; gate and up: 16 bits
    wide = 2 * (2 * H + H + keys + H + 2 * 11008)
    assert of_token(dtype=dtype) == pytest.approx(wide + narrow * (2 * H + H + 11008))
    assert of_token(dtype="bfloat16") == kept(LLAMA, LibraryKernels()) / (S * B) - 4 * A
    assert kept(LLAMA, LibraryKernels(), dtype=dtype) == kept(LLAMA, LibraryKernels())


def test_torchtitan_saves_every_second_product_and_attention() -> None:
    keys = 8 * 128  # values alone
    for compiled, last in ((True, 0), (False, H)):
        kernels = LibraryKernels(selective="operations", compiled=compiled)
        saved = kept(LLAMA, kernels, "selective") / (S * B)
        assert saved == 2 * (H + H + keys + H + 11008 + last) + 4 * A
    again = [one for one in parts(LLAMA, kernels).blocks[0].forward if one.recomputed]
    # the output's product, keys' left out, and as much as one of gate and up
    assert sum(one.flops for one in again if one.kind == "matmul") == 2 * S * B * (H * H + H * 11008)
    assert not any(one.kind == "attention" for one in again)


def test_what_is_offloaded_is_not_saved_on_the_device() -> None:
    whole = parts()
    config = PublishedConfig(offloaded=10)
    saved = [one.saved_bytes["none"] for one in offloaded(whole, config).blocks]
    assert saved == [0] * 10 + [whole.blocks[0].saved_bytes["none"]] * 14
    assert offloaded(whole, PublishedConfig()) is whole
