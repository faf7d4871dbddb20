"""One rule that makes any configuration of transformers small: by a field's name and its default, in its parts too.

Nothing here knows an architecture. What the rule cannot see is data in `exceptions.toml`, each with its reason.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")

VOCABULARY = 96
CODEBOOK = 64  # some want a power of two
LAYERS = 2
HEADS = 4
HEAD_DIM = 8
WIDTH = HEADS * HEAD_DIM
WIDER = 2 * WIDTH
EXPERTS = 4
POSITIONS = 64
IMAGE = 32
PATCH = 8

# The first pattern that is found in a field's name decides; the number is the most that it keeps.
INTEGERS: tuple[tuple[str, int], ...] = (
    (r"codebook_size", CODEBOOK),
    (r"vocab_size|^num_embeddings$", VOCABULARY),
    (r"experts_per_tok|^moe_k$|moe_topk|top_?k_experts|num_selected_experts", 2),
    (r"experts_per_group", 2),
    (r"n_shared_experts|num_shared_experts", 1),
    (r"^(moe_)?num_(local_|routed_)?experts$|n_routed_experts|^n_experts$|num_local_experts", EXPERTS),
    (r"^n_group$|^num_expert_groups?$", 2),
    (r"topk_group", 1),
    (r"^(mamba_)?n_groups$|^num_groups$|ngroups|conv_pos_embedding_groups", 2),
    (r"(mamba|ssm)_.*head.*dim|mamba_d_head|ssm_head_dim|mamba_head_dim|mamba_headdim", 2 * HEAD_DIM),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"head_dim|head_size|^d_kv$|^d_head$|kv_channels|^rotary_dim$", HEAD_DIM),
    (r"(key_value|kv)_(attention_)?heads|num_key_value_groups|linear_num_key_heads", HEADS // 2),
    (r"heads?$|^num_heads|attention_heads", HEADS),
    (r"linear_num_value_heads", HEADS),
    (r"state_size|d_state|state_dim|dt_rank|time_step_rank|lora_rank|lora_dim", HEAD_DIM),
    (r"^(num|n)_.*layers?$|^n_layers?$|_layers$|^depth$|num_hidden_groups|encoder_blocks$", LAYERS),
    (r"dense_replace|num_dense_layers", 1),
    (r"mask_(time|feature)_length", 2),
    (r"conv_pos_embeddings$", 16),
    (r"intermediate|ffn_dim|ffn_hidden|feed_?forward|mlp_dim|^d_ff$|^d_inner$|mlp_hidden|^n_inner$", WIDER),
    (r"max_.*position|n_positions|context_length|max_seq_len|position_embeddings$|max_.*frames", POSITIONS),
    (
        r"attention_window|sliding_window|window_size$|local_attention|(?<!tokenizer_)chunk_size|index_topk|block_size|chunk_length",
        8,
    ),
    (r"num_(queries|query_tokens|latents|object_queries|denoising)$|latent_query_num|num_proposals", 10),
    (r"(?<!scaled_)image_size|img_size|input_size", IMAGE),
    (r"patch_size|encoder_stride", PATCH),
    (
        r"hidden_size|d_model|n_embd|_dims?$|^dim$|embed|width|_channels$|_filters$|proj|feature_size|pooler|^channels$",
        WIDTH,
    ),
    (r"^(num_)?(hidden_)?classes$", 8),
)
# Defaults of None that a model cannot be built from.
MISSING = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "vocab_size": VOCABULARY, "num_experts_per_tok": 2}
KEPT = re.compile(
    r"num_channels|in_channels|audio_channels|query_dim|type_vocab|num_mel_bins|coefficient|drop|temperature|interval|"
    r"conv_kernel_dim|_id$|token_index|^chunk_size_feed_forward|output_stride|max_relative_positions"
)
IDS = re.compile(r"token_ids?$|token_index$|(bos|eos|pad|unk|sep|cls|mask)_(id|index)$|^lang_id$")
WIDTHS = re.compile(
    r"hidden_sizes|_channels?(_list)?$|_dims?$|embed|width|channel_size|^dims$|encoder_hidden|intermediate_size"
)
DEPTHS = re.compile(
    r"^depths?$|num_blocks$|block_sizes|block_repeats|num_layers|_layers$|n_layers|layers_per|numb_of_layers"
)
HEAD_LISTS = re.compile(r"num_heads|attention_heads")
SIZES = re.compile(r"image_size|img_size")


def shrunk(config_class: type, changes: dict[str, Any] | None = None) -> Any:
    """A small configuration of `config_class`; changes: fields that the rule does not decide ('sub.field' too)."""
    changes = dict(changes or {})
    whole = config_class()
    fields: dict[str, Any] = {}
    accepted = _fields(config_class)
    own = {name: value for name, value in vars(whole).items() if name in accepted}
    old_layers = {v for k, v in own.items() if _is_count(v) and re.search(INTEGER_LAYERS, k) and v > LAYERS}
    for name, value in own.items():
        if hasattr(value, "to_dict"):
            inner = {k.split(".", 1)[1]: v for k, v in changes.items() if k.startswith(f"{name}.")}
            fields[name] = shrunk(type(value), {**exceptions(value.model_type), **inner})
        elif value is None and name in MISSING:
            fields[name] = MISSING[name]
        elif (small := _small(name, value, own, old_layers)) != value:
            fields[name] = small
    fields |= {name: value for name, value in changes.items() if "." not in name}
    return config_class(**fields)


INTEGER_LAYERS = next(pattern for pattern, most in INTEGERS if most == LAYERS and "depth" in pattern)


@lru_cache(maxsize=1)
def _exceptions() -> dict[str, dict[str, Any]]:
    return tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))


def exceptions(model_type: str) -> dict[str, Any]:
    """What is stated for a model type's configuration, without the reason."""
    return {k: v for k, v in _exceptions().get("fields", {}).get(model_type, {}).items() if k != "reason"}


def left_out() -> dict[str, str]:
    """Model types that are not run, with the reason."""
    return dict(_exceptions().get("left_out", {}))


def _fields(config_class: type) -> set[str]:
    names: set[str] = set()
    for one in config_class.__mro__:
        names |= set(getattr(one, "__annotations__", {}))
    names |= set(inspect.signature(config_class.__init__).parameters)
    return names


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small(name: str, value: Any, own: dict[str, Any], old_layers: set[int]) -> Any:
    if _is_count(value):
        return _small_id(value) if IDS.search(name) else _small_count(name, value, own)
    if isinstance(value, (list, tuple)) and value:
        return type(value)(_small_list(name, list(value), own, old_layers))
    if isinstance(value, dict):
        return {
            key: _small(key, inner, own, old_layers) if str(key).endswith("section") else inner
            for key, inner in value.items()
        }
    return value


def _small_id(value: int) -> int:
    return value if value < VOCABULARY else value % (VOCABULARY - 8) + 4


def _small_count(name: str, value: int, own: dict[str, Any]) -> int:
    if KEPT.search(name):
        return value
    for pattern, most in INTEGERS:
        if re.search(pattern, name):
            if "key_value" in pattern and value == own.get("num_attention_heads"):
                return min(value, HEADS)
            return min(value, most)
    return value


def _small_list(name: str, value: list[Any], own: dict[str, Any], old_layers: set[int]) -> list[Any]:
    if all(_is_count(v) for v in value):
        if IDS.search(name):
            return [_small_id(v) for v in value]
        if name.endswith("section"):  # of a head's dims, in halves
            half = HEAD_DIM // 2
            return [half - (len(value) - 1) * (half // len(value)), *[half // len(value)] * (len(value) - 1)]
        if SIZES.search(name):
            return [min(v, IMAGE) for v in value]
        if HEAD_LISTS.search(name) and len(value) not in old_layers:
            return [max(1, v * 2 // min(value)) if max(value) > HEADS else v for v in value]
        if DEPTHS.search(name) and len(value) not in old_layers:
            return [1 for v in value]
        if WIDTHS.search(name) and max(value) > WIDTH and len(value) not in old_layers:
            return [_scaled(v, min(w for w in value if w > 4)) for v in value]
    if len(value) in old_layers:
        return value[:LAYERS]
    return value


def _scaled(value: int, least: int) -> int:
    """Widths keep their ratio to the least, which becomes 16."""
    return value if value <= 4 else max(16, round(value * 16 / least / 8) * 8)
