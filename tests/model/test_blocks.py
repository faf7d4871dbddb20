"""Blocks are found in models of many kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from evenly.model.blocks import find_blocks


class Layer(nn.Module):
    def __init__(self, width: int, *, wide: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.skip = nn.Linear(width, width) if wide else None


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.down = nn.Linear(width, 2 * width)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = nn.ModuleList(Layer(4) for _ in range(3))


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def parts(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def test_the_largest_list_of_a_model() -> None:
    model = parts(
        tokens=nn.Embedding(9, 8),
        places=nn.Embedding(9, 8),
        layers=nn.ModuleList(Layer(8) for _ in range(3)),
        heads=nn.ModuleList(nn.Sequential(nn.Linear(8, 1)) for _ in range(2)),
        head=nn.Linear(8, 9),
    )
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_what_blocks_share_is_none_of_its_own() -> None:
    model = parts(place1=Layer(4), place2=Layer(4), one=nn.Sequential(Layer(4)), two=nn.Sequential(Layer(4)))
    model.one[0].skip, model.two[0].skip = model.place1, model.place2
    assert names(model) == ["one", "two"]


def test_stages_that_differ_are_looked_into_and_experts_are_not() -> None:
    stages = parts(stages=nn.ModuleList([Stage(4, 2), Stage(8, 2), Stage(16, 1)]))
    assert names(stages) == [
        "stages.0.blocks.0",
        "stages.0.blocks.1",
        "stages.1.blocks.0",
        "stages.1.blocks.1",
        "stages.2",
    ]
    assert names(parts(layers=nn.ModuleList(Experts() for _ in range(2)))) == ["layers.0", "layers.1"]


def test_layers_that_differ_in_little_are_blocks_with_all_their_experts() -> None:
    first, second = Experts(), Experts()
    first.bias = nn.Linear(1, 3)
    assert names(parts(layers=nn.ModuleList([first, second]))) == ["layers.0", "layers.1"]


def test_two_layers_of_two_kinds_are_blocks_where_there_is_no_other() -> None:
    assert names(parts(layers=nn.ModuleList([Layer(4), Stage(4, 1)]), head=nn.Linear(4, 2))) == ["layers.0", "layers.1"]


def test_a_list_of_one_layer_is_a_block_where_there_is_no_other() -> None:
    one = nn.ModuleList([Layer(4)])
    assert names(parts(embed=nn.Embedding(3, 4), layers=one, head=nn.Linear(4, 3))) == ["layers.0"]
    assert names(parts(layers=one, others=nn.ModuleList([Stage(4, 1), Stage(4, 1)]))) == ["others.0", "others.1"]


def test_stages_of_a_residual_network() -> None:
    def stage(width: int) -> nn.Module:
        return nn.Sequential(Layer(width, wide=True), Layer(width))

    model = parts(stem=nn.Conv2d(3, 8, 7), layer1=stage(8), layer2=stage(16), layer3=stage(64))
    assert names(model) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1"]


def test_several_towers() -> None:
    def tower(width: int, depth: int) -> nn.Module:
        return parts(embed=nn.Linear(9, width), block=nn.ModuleList(Layer(width) for _ in range(depth)))

    assert names(parts(encoder=tower(8, 2), decoder=tower(12, 2))) == [
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    ]
    assert names(parts(left=tower(8, 2), right=tower(8, 2)))[1:3] == ["left.block.1", "right.block.0"]


def test_a_layer_in_two_lists_is_one_block() -> None:
    shared = Layer(4)
    model = parts(first=nn.ModuleList([shared, Layer(4)]), second=nn.ModuleList([Layer(4), shared]))
    assert names(model) == ["first.0", "first.1", "second.0"]


def test_models_without_a_list_of_layers() -> None:
    assert names(parts(block1=Layer(4), block2=Layer(4), head=nn.Linear(4, 2))) == ["block1", "block2"]
    assert names(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))) == [
        "0",
        "2",
        "4",
    ]
    assert names(parts(rnn=nn.LSTM(3, 4, num_layers=2), head=nn.Linear(4, 2))) == []
    assert names(nn.Linear(2, 2)) == []


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        small = dict(vocab_size=50, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_decoder_layers=3, num_heads=2)
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**small))
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=50))
    assert names(t5) == [f"encoder.block.{i}" for i in range(2)] + [f"decoder.block.{i}" for i in range(3)]
    assert names(gpt2) == [f"transformer.h.{i}" for i in range(3)]


def test_containers_that_nothing_calls_are_looked_into() -> None:
    def layers(count: int) -> nn.ModuleList:
        return nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 4) for _ in range(count))

    stages = nn.ModuleList([layers(2), layers(2)])
    assert [block.name for block in find_blocks(stages)] == ["0.0", "0.1", "1.0", "1.1"]
    single = nn.ModuleList([layers(1), layers(1)])
    assert [block.name for block in find_blocks(single)] == ["0.0", "1.0"]
