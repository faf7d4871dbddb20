"""Shapes from configurations of Hugging Face transformers, which are `config.json` files. No torch, no transformers.

The file may come from anywhere: every value is checked before it is used, and all that is wrong is reported at once.
What a file leaves out is what transformers takes for its `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from evenly.errors import UserError
from evenly.planner.hf_values import FFN, GATED, HEADS, HIDDEN, LAYERS, PLAIN, SEQUENCE, ConfigValues
from evenly.planner.shape import Activation, Norm, Positions, QueryKeyNorm, Shape

MAKE = "name a known model, describe one as transformer:layers=24,hidden=2048,heads=16, or fix the file"


def shape_of_config(config: Mapping[str, Any]) -> Shape:
    """The shape that `config`, the content of a `config.json`, describes.

    `sequence` is what it was trained with where the file says so, else the most that it can take. Raises `UserError`
    for a `model_type` that is not known (with those that are) and for values that are missing or no sizes, all at once.
    """
    model_type = config.get("model_type")
    asked = "read the shape of a model from its config.json"
    if not isinstance(model_type, str) or model_type not in READERS:
        near = get_close_matches(str(model_type)[:40], READERS, 1)
        found = f"model_type is {str(model_type)[:40]!r}" + (f" (near: {near[0]})" if near else "")
        raise UserError(
            asked, found, f"known types are {', '.join(READERS)}; else describe it as transformer:layers=..."
        )
    values = ConfigValues(config)
    shape = READERS[model_type](values)
    problems = [*dict.fromkeys(values.problems)] or [*shape.problems()]
    if problems:
        raise UserError(f"{asked} ({model_type})", "; ".join(problems), MAKE)
    return shape


# --- what families share -------------------------------------------------------------------------------


def _shape(
    config: ConfigValues,
    *,
    norm: Norm,
    activation: Activation,
    positions: Positions,
    bias: bool,
    tied: bool,
    ffn: int | None = None,
    sequence: int | None = None,
    **others: Any,
) -> Shape:
    """A shape whose first sizes stand under their usual names; `tied` where the file does not say."""
    hidden, heads = config.size(*HIDDEN), config.size(*HEADS, as_field="heads")
    vocab = others.pop("vocab", None)
    vocab = config.size("vocab_size") if vocab is None else vocab
    sizes: dict[str, Any] = dict(
        name=_name(config),
        layers=config.size(*LAYERS, as_field="layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=max(1, hidden // heads),
        ffn=config.size(*FFN) if ffn is None else ffn,
        vocab=vocab,
        outputs=vocab,
        sequence=_sequence(config, 2048) if sequence is None else sequence,
        qkv_bias=bias,
        tied=config.flag("tie_word_embeddings", tied),
    )
    if "head_dim" not in others and hidden % heads:
        config.problems.append(f"{HIDDEN[0]} {hidden} cannot be shared evenly by {HEADS[0]} {heads}")
    return Shape(norm=norm, activation=activation, positions=positions, bias=bias, **{**sizes, **others})


def _name(config: ConfigValues) -> str:
    name = config.word("_name_or_path", default="").rstrip("/").rpartition("/")[2]
    return name if name.isprintable() and 0 < len(name) <= 60 else str(config.values["model_type"])


def _sequence(config: ConfigValues, default: int) -> int:
    """Tokens that it was trained with, where its positions were stretched afterwards; else the most it can take."""
    stretched = (config, config.table("rope_scaling"), config.table("rope_parameters"))
    trained = [one for one in stretched if one.given("original_max_position_embeddings")[1] is not None]
    if trained:
        return trained[0].size("original_max_position_embeddings")
    return config.size(*SEQUENCE, default=default)


def _head_dim(config: ConfigValues, default: int | None = None) -> dict[str, Any]:
    if default is None and config.given("head_dim")[1] is None:
        return {}
    return {"head_dim": config.size("head_dim", default=default)}


def _kv_heads(config: ConfigValues, default: int | None = None) -> int:
    heads = config.size(*HEADS, as_field="heads")
    return config.size("num_key_value_heads", default=heads if default is None else default)


def _like_llama(
    config: ConfigValues,
    *,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qkv_bias: bool | None = None,
    activation: Activation | None = None,
    tied: bool = False,
    **others: Any,
) -> Shape:
    """RMS norms, rotary positions, a gated MLP and grouped queries, with what a family has changed of that.

    attention_bias: of all its projections, or of `qkv_bias` alone.
    """
    layers, hidden = config.size(*LAYERS, as_field="layers"), config.size(*HIDDEN)
    given: dict[str, Any] = dict(
        norm="rmsnorm",
        activation=activation or config.activation(GATED, "hidden_act", default="silu"),
        positions="rotary",
        kv_heads=_kv_heads(config),
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        extra=layers * hidden * (attention_bias - mlp_bias),
    )
    return _shape(config, bias=mlp_bias, tied=tied, **{**given, **_head_dim(config), **others})


def _window(config: ConfigValues, *, of_all: bool = True, default: int | None = None) -> int | None:
    if not of_all or ("sliding_window" in config.values and config.values["sliding_window"] is None):
        return None
    name, value = config.given("sliding_window")
    return default if value is None else config.size(name)


# --- families ------------------------------------------------------------------------------------------


def _gpt2(config: ConfigValues) -> Shape:
    config.must("add_cross_attention", False, False)
    activation = config.activation(PLAIN, "activation_function", default="gelu_new")
    return _shape(
        config,
        norm="layernorm",
        activation=activation,
        positions="learned",
        bias=True,
        tied=True,
        ffn=config.size(*FFN, default=4 * config.size(*HIDDEN)),
        sequence=_sequence(config, 1024),
    )


def _bert(config: ConfigValues, *, unused_positions: int = 0) -> Shape:
    """With the head that predicts masked tokens: a linear layer and a norm before the embedding's weight and a bias."""
    config.must("add_cross_attention", False, False)
    config.must("position_embedding_type", "absolute", "absolute")
    hidden, types = config.size(*HIDDEN), config.size("type_vocab_size", default=2)
    head = hidden * hidden + 3 * hidden + config.size("vocab_size")
    return _shape(
        config,
        norm="layernorm",
        activation=config.activation(PLAIN, "hidden_act", default="gelu"),
        positions="learned",
        bias=True,
        tied=True,
        sequence=max(1, config.size(*SEQUENCE, default=512) - unused_positions),
        causal=config.flag("is_decoder", False),
        extra=head + (types + unused_positions) * hidden,
    )


def _llama(config: ConfigValues) -> Shape:
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return _like_llama(config, attention_bias=attention_bias, mlp_bias=mlp_bias)


def _mixtral(config: ConfigValues) -> Shape:
    return _like_llama(
        config,
        kv_heads=_kv_heads(config, 8),
        window=_window(config),
        experts=config.size("num_local_experts", "num_experts", default=8),
        experts_per_token=config.size("num_experts_per_tok", default=2),
        expert_ffn=config.size(*FFN),
    )


def _qwen_window(config: ConfigValues) -> int | None:
    first = config.size("max_window_layers", default=28, as_field="encoder_layers")
    return _window(config, of_all=config.flag("use_sliding_window", False) and first == 0)


def _qwen3(config: ConfigValues) -> Shape:
    return _like_llama(
        config,
        attention_bias=config.flag("attention_bias", False),
        window=_qwen_window(config),
        qk_norm="head",
        **_head_dim(config, 128),
    )


def _qwen3_moe(config: ConfigValues) -> Shape:
    config.must("decoder_sparse_step", 1, 1)
    return _like_llama(
        config,
        attention_bias=config.flag("attention_bias", False),
        kv_heads=_kv_heads(config, 4),
        qk_norm="head",
        experts=config.size("num_experts", "num_local_experts", default=128),
        experts_per_token=config.size("num_experts_per_tok", default=8),
        expert_ffn=config.size("moe_intermediate_size", default=768),
        dense_layers=_first_layers(config, "mlp_only_layers"),
        window=_window(config, of_all=config.flag("use_sliding_window", False)),
    )


def _first_layers(config: ConfigValues, name: str) -> int:
    """How many layers a list names that may name only the first, in their order."""
    value = config.values.get(name) or []
    if not isinstance(value, list) or value != [*range(len(value))]:
        config.refuse(name, value, "a list of the first layers, counted from 0")
        return 0
    return len(value)


def _t5(config: ConfigValues) -> Shape:
    buckets, heads = config.size("relative_attention_num_buckets", default=32), config.size(*HEADS, as_field="heads")
    encoder_layers = config.size("num_layers", as_field="layers")
    gated, _, word = config.word("feed_forward_proj", default="relu").rpartition("-")
    if gated not in ("", "gated") or word not in (GATED if gated else PLAIN):
        config.refuse("feed_forward_proj", f"{gated}-{word}" if gated else word, "relu, gelu, gated-gelu or gated-silu")
    return _shape(
        config,
        norm="rmsnorm",
        activation=(GATED if gated else PLAIN).get(word, "relu"),
        positions="relative",
        bias=False,
        tied=True,
        sequence=_sequence(config, 512),
        head_dim=config.size("d_kv", default=64),
        layers=config.size("num_decoder_layers", "num_layers", as_field="layers"),
        encoder_layers=encoder_layers,
        extra=2 * buckets * heads,
    )


def _vit(config: ConfigValues) -> Shape:
    """As it classifies: a class token before the patches, and a head with a bias."""
    side, patch = (config.size(name, default=default) for name, default in (("image_size", 224), ("patch_size", 16)))
    if side % patch:
        config.problems.append(f"image_size {side} is not a multiple of patch_size {patch}")
    hidden, classes = config.size(*HIDDEN), _classes(config)
    return _shape(
        config,
        norm="layernorm",
        activation=config.activation(PLAIN, "hidden_act", default="gelu"),
        positions="learned",
        bias=True,
        qkv_bias=config.flag("qkv_bias", True),
        tied=False,
        vocab=0,
        outputs=classes,
        sequence=(side // patch) ** 2 + 1,
        causal=False,
        patch=patch * patch * config.size("num_channels", default=3),
        extra=2 * hidden + classes,
    )


def _classes(config: ConfigValues) -> int:
    labels = config.values.get("id2label")
    if labels is not None and not isinstance(labels, Mapping):
        config.refuse("id2label", labels, "a table of classes")
    return len(labels) if isinstance(labels, Mapping) else config.size("num_labels", default=2, as_field="outputs")


def _bloom(config: ConfigValues) -> Shape:
    return _shape(
        config,
        norm="layernorm",
        activation="gelu",
        positions="alibi",
        bias=True,
        tied=True,
        ffn=4 * config.size(*HIDDEN),
        extra=2 * config.size(*HIDDEN),
    )


def _opt(config: ConfigValues) -> Shape:
    hidden = config.size(*HIDDEN)
    config.must("word_embed_proj_dim", hidden, hidden)
    config.must("do_layer_norm_before", True, True)
    config.must("layer_norm_elementwise_affine", True, True)
    config.must("_remove_final_layer_norm", False, False)
    return _shape(
        config,
        norm="layernorm",
        activation=config.activation(PLAIN, "activation_function", default="relu"),
        positions="learned",
        bias=config.flag("enable_bias", True),
        tied=True,
        extra=2 * hidden,
    )


def _gpt_neox(config: ConfigValues) -> Shape:
    attention_bias = config.flag("attention_bias", True)
    layers, hidden = config.size(*LAYERS, as_field="layers"), config.size(*HIDDEN)
    return _shape(
        config,
        norm="layernorm",
        activation=config.activation(PLAIN, "hidden_act", default="gelu"),
        positions="rotary",
        bias=True,
        qkv_bias=attention_bias,
        tied=False,
        extra=layers * hidden * (attention_bias - 1),
    )


def _falcon(config: ConfigValues) -> Shape:
    """Attention and MLP next to each other, after one norm or one each."""
    grouped = config.flag("new_decoder_architecture", False)
    heads = config.size(*HEADS, as_field="heads")
    kv_heads = config.size("num_kv_heads", "n_head_kv", default=heads) if grouped else heads
    separate = config.size("num_ln_in_parallel_attn", default=2 if grouped else 1)
    return _shape(
        config,
        norm="layernorm",
        activation=config.activation(PLAIN, "activation", default="gelu"),
        positions="alibi" if config.flag("alibi", False) else "rotary",
        bias=config.flag("bias", False),
        tied=True,
        ffn=config.size(*FFN, default=4 * config.size(*HIDDEN)),
        kv_heads=1 if config.flag("multi_query", True) and not grouped else kv_heads,
        norms=(2 if separate == 2 else 1) if config.flag("parallel_attn", True) else 2,
    )


def _like_gemma(config: ConfigValues, **others: Any) -> Shape:
    attention_bias = config.flag("attention_bias", False)
    head_dim = _head_dim(config, 256)
    activation = config.activation(GATED, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    return _like_llama(config, attention_bias=attention_bias, tied=True, activation=activation, **head_dim, **others)


def _phi(config: ConfigValues) -> Shape:
    """Attention and MLP next to each other after one norm; the head has a bias."""
    qk_norm: QueryKeyNorm = "head" if config.flag("qk_layernorm", False) else "none"
    return _shape(
        config,
        norm="layernorm",
        activation=config.activation(PLAIN, "hidden_act", default="gelu_new"),
        positions="rotary",
        bias=True,
        tied=False,
        kv_heads=_kv_heads(config),
        norms=1,
        qk_norm=qk_norm,
        extra=config.size("vocab_size"),
    )


def _mpt(config: ConfigValues) -> Shape:
    attention = config.table("attn_config")
    attention.must("attn_type", "multihead_attention", "multihead_attention")
    bias = not config.flag("no_bias", True)
    learned: Positions = "learned" if config.flag("learned_pos_emb", True) else "none"
    return _shape(
        config,
        norm="layernorm" if bias else "layernorm-no-bias",
        activation="gelu",
        positions="alibi" if attention.flag("alibi", True) else learned,
        bias=bias,
        tied=True,
        ffn=config.size("expansion_ratio", default=4) * config.size(*HIDDEN),
        qk_norm="all" if attention.flag("qk_ln", False) else "none",
    )


def _nemotron(config: ConfigValues) -> Shape:
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    activation = config.activation(PLAIN, "hidden_act", default="relu2")
    return _like_llama(
        config, attention_bias=attention_bias, mlp_bias=mlp_bias, norm="layernorm", activation=activation
    )


READERS: dict[str, Callable[[ConfigValues], Shape]] = {
    "bert": _bert,
    "bloom": _bloom,
    "falcon": _falcon,
    "gemma": lambda config: _like_gemma(config, kv_heads=_kv_heads(config, 16)),
    # Norms before and after attention and MLP; every other layer has a window.
    "gemma2": lambda config: _like_gemma(config, kv_heads=_kv_heads(config, 4), norms=4),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": lambda config: _like_llama(config, kv_heads=_kv_heads(config, 8), window=_window(config, default=4096)),
    "mixtral": _mixtral,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "olmo": lambda config: _like_llama(
        config, attention_bias=config.flag("attention_bias", False), norm="layernorm-no-weight"
    ),
    "olmo2": lambda config: _like_llama(config, attention_bias=config.flag("attention_bias", False), qk_norm="all"),
    "opt": _opt,
    "phi": _phi,
    "phi3": lambda config: _like_llama(config, window=_window(config)),
    "qwen2": lambda config: _like_llama(config, qkv_bias=True, window=_qwen_window(config)),
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "roberta": lambda config: _bert(config, unused_positions=2),  # counts positions from 2, after padding
    "t5": _t5,
    "vit": _vit,
}
