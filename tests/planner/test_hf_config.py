"""Shapes read from configurations have the parameters of the models that transformers builds from them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM
from transformers import AutoModelForSeq2SeqLM as AutoModelForText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from evenly.errors import UserError
from evenly.planner.hf_config import READERS, shape_of_config
from evenly.planner.shape import active_parameters, parameters

CLASSES: dict[str, Any] = {
    "bert": AutoModelForMaskedLM,
    "roberta": AutoModelForMaskedLM,
    "t5": AutoModelForText,
    "vit": AutoModelForImageClassification,
}

USUAL = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=76,
    num_hidden_layers=3,
    num_attention_heads=6,
    max_position_embeddings=40,
)
GROUPED = dict(USUAL, num_key_value_heads=2)
GPT2 = dict(vocab_size=101, n_embd=48, n_layer=3, n_head=6, n_positions=40)
T5 = dict(vocab_size=101, d_model=48, d_kv=10, d_ff=76, num_layers=3, num_heads=6)
OPT = dict(vocab_size=101, hidden_size=48, ffn_dim=76, num_hidden_layers=3, num_attention_heads=6)
BLOOM = dict(vocab_size=101, hidden_size=48, n_layer=3, n_head=6)
FALCON = dict(vocab_size=101, hidden_size=48, num_hidden_layers=3, num_attention_heads=6)
VIT = dict(USUAL, image_size=28, patch_size=7, num_channels=2, num_labels=11)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=21)

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", GPT2),
    ("gpt2", dict(GPT2, n_inner=50, tie_word_embeddings=False)),
    ("bert", USUAL),
    ("bert", dict(USUAL, type_vocab_size=3)),
    ("roberta", dict(USUAL, type_vocab_size=1)),
    ("llama", USUAL),
    ("llama", dict(GROUPED, head_dim=10, tie_word_embeddings=True)),
    ("llama", dict(GROUPED, attention_bias=True)),
    ("llama", dict(GROUPED, mlp_bias=True)),
    ("mistral", GROUPED),
    ("mistral", dict(GROUPED, head_dim=10)),
    ("mixtral", dict(GROUPED, num_local_experts=5, num_experts_per_tok=2)),
    ("qwen2", GROUPED),
    ("qwen3", dict(GROUPED, head_dim=10)),
    ("qwen3", dict(GROUPED, attention_bias=True)),
    ("qwen3_moe", dict(GROUPED, **EXPERTS, head_dim=8)),
    ("qwen3_moe", dict(GROUPED, **EXPERTS, head_dim=8, mlp_only_layers=[0])),
    ("t5", T5),
    ("t5", dict(T5, num_decoder_layers=2, feed_forward_proj="gated-gelu", relative_attention_num_buckets=20)),
    ("vit", VIT),
    ("vit", dict(VIT, qkv_bias=False)),
    ("bloom", BLOOM),
    ("opt", OPT),
    ("opt", dict(OPT, enable_bias=False)),
    ("gpt_neox", USUAL),
    ("gpt_neox", dict(USUAL, attention_bias=False, tie_word_embeddings=True)),
    ("falcon", FALCON),
    ("falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=50)),
    ("falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1)),
    ("falcon", dict(FALCON, multi_query=False, parallel_attn=False, alibi=True)),
    ("gemma", dict(GROUPED, head_dim=10)),
    ("gemma2", dict(GROUPED, head_dim=10)),
    ("phi", GROUPED),
    ("phi", dict(GROUPED, qk_layernorm=True)),
    ("phi3", dict(GROUPED, pad_token_id=0)),
    ("mpt", dict(vocab_size=101, d_model=48, n_layers=3, n_heads=6, max_seq_len=40)),
    ("nemotron", dict(GROUPED)),
    ("nemotron", dict(GROUPED, head_dim=10, mlp_bias=True, attention_bias=True)),
    ("olmo", GROUPED),
    ("olmo2", GROUPED),
    ("olmo2", dict(GROUPED, attention_bias=True, tie_word_embeddings=True)),
]


def built(model_type: str, settings: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The whole configuration that transformers makes of `settings`, and the parameters of its model."""
    config = CONFIG_MAPPING[model_type](**settings)
    kept = config.to_dict()
    with torch.device("meta"):
        model = CLASSES.get(model_type, AutoModelForCausalLM).from_config(config)
    return kept, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "settings"), CONFIGS)
def test_as_many_parameters_as_transformers_builds(model_type: str, settings: dict[str, Any]) -> None:
    config, count = built(model_type, settings)
    assert parameters(shape_of_config(config)) == count
    assert [*shape_of_config(config).problems()] == []


def test_every_type_is_compared() -> None:
    assert sorted({model_type for model_type, _ in CONFIGS}) == sorted(READERS)


def read(model_type: str, **settings: Any) -> Any:
    return shape_of_config(dict(GROUPED, model_type=model_type, **settings))


def test_what_does_not_change_the_count_is_read_too() -> None:
    assert read("mistral").window == 4096 and read("mistral", sliding_window=None).window is None
    assert read("qwen2", sliding_window=99).window is None
    assert read("qwen2", sliding_window=99, use_sliding_window=True, max_window_layers=0).window == 99
    assert [read(name).activation for name in ("llama", "gemma", "nemotron", "phi")] == [
        "swiglu",
        "geglu",
        "squared-relu",
        "gelu",
    ]
    assert not shape_of_config(dict(USUAL, model_type="bert")).causal
    assert read("llama", _name_or_path="owner/name").name == "name"
    moe = read("qwen3_moe", **EXPERTS, mlp_only_layers=[0])
    assert parameters(moe) - active_parameters(moe) == 2 * 3 * (3 * 48 * 21)


def test_the_context_is_that_of_pretraining() -> None:
    """Llama 3.1's file has positions stretched from 8192 to 131072."""
    stretched = dict(rope_scaling=dict(factor=8.0, original_max_position_embeddings=20, rope_type="llama3"))
    assert read("llama").sequence == 40
    assert read("llama", **stretched).sequence == 20


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["model_type is 'None'", "known types are bert, bloom"]),
        (dict(model_type=["llama"]), ["known types are"]),
        (dict(model_type="lama"), ["near: llama"]),
        (
            dict(model_type="llama", num_hidden_layers="3", hidden_size=0, tie_word_embeddings=1, hidden_act="tanh"),
            [
                "num_hidden_layers is '3', not a whole number from 1 to 10000",
                "hidden_size is 0",
                "num_attention_heads or n_head or n_heads or num_heads is missing",
                "vocab_size is missing",
                "tie_word_embeddings is 1, not true or false",
                "hidden_act is 'tanh'",
            ],
        ),
        (dict(GROUPED, model_type="llama", num_hidden_layers=True), ["num_hidden_layers is True"]),
        (dict(GROUPED, model_type="llama", num_hidden_layers=10**30), ["num_hidden_layers is 1000"]),
        (dict(GROUPED, model_type="llama", hidden_size=48.0), ["hidden_size is 48.0"]),
        (dict(GROUPED, model_type="llama", hidden_size=50), ["hidden_size 50 cannot be shared evenly"]),
        (dict(GROUPED, model_type="llama", num_key_value_heads=4), ["heads=6 cannot be shared evenly by kv_heads=4"]),
        (dict(GROUPED, model_type="llama", rope_scaling=[1]), ["rope_scaling is [1], not a table"]),
        (dict(OPT, model_type="opt", word_embed_proj_dim=24), ["word_embed_proj_dim is 24, not 48"]),
        (dict(GROUPED, model_type="mixtral", num_local_experts=1), ["experts_per_token=2 is more than experts=1"]),
        (
            dict(GROUPED, model_type="qwen3_moe", mlp_only_layers=[1]),
            ["mlp_only_layers is [1], not a list of the first"],
        ),
        (dict(GROUPED, model_type="qwen3_moe", decoder_sparse_step=2), ["decoder_sparse_step is 2, not 1"]),
        (dict(GPT2, model_type="gpt2", add_cross_attention=True), ["add_cross_attention is True, not False"]),
        (dict(VIT, model_type="vit", image_size=30), ["image_size 30 is not a multiple of patch_size 7"]),
        (dict(VIT, model_type="vit", id2label=[1]), ["id2label is [1], not a table of classes"]),
        (dict(T5, model_type="t5", feed_forward_proj="gated-tanh"), ["feed_forward_proj is 'gated-tanh'"]),
        (
            dict(model_type="mpt", vocab_size=101, d_model=48, n_layers=3, n_heads=6, attn_config=dict(attn_type="x")),
            ["attn_config.attn_type is 'x'"],
        ),
    ],
)
def test_untrusted_values_are_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as told:
        shape_of_config(config)
    assert [word for word in words if word not in str(told.value)] == []


class Recorded(dict[str, Any]):
    """A configuration that notes which of its keys are asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


ODD = [None, True, -1, 0, 1, 7, 10**40, 0.5, float("nan"), "", "gelu", "x" * 99, [], [0, 2], {}, {"alibi": 3}]


@pytest.mark.parametrize("model_type", READERS)
def test_any_value_is_read_or_refused(model_type: str) -> None:
    """Two odd values at a time, in any of the keys that are read."""
    random, refused = Random(7), 0
    plain = Recorded({**T5, **GPT2, **EXPERTS, **GROUPED, "model_type": model_type})
    shape_of_config(plain)
    keys = sorted(plain.asked - {"model_type"})
    for _ in range(200):
        changed = {random.choice(keys): random.choice(ODD) for _ in range(2)}
        try:
            assert [*shape_of_config({**plain, **changed}).problems()] == []
        except UserError:
            refused += 1
    assert 0 < refused < 200
