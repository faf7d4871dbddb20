"""Subjects of transformers: the model, its batches and its loss, all from the library's own tables.

An architecture is a model type of transformers. Its class is the first of `HEADS` that the library has for it, its
batch the first of the kinds below that its forward takes and whose loss has a gradient.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import samples
import shrink
import torch
from samples import Shapes

TOKENS = 12
EXPERTS = "eager"  # grouped products, transformers' default, take no float64
HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "SEQUENCE_CLASSIFICATION",
    "MASKED_IMAGE_MODELING",
    "DEPTH_ESTIMATION",
    "TIME_SERIES_PREDICTION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "IMAGE_TO_IMAGE",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM",
)
# Model types that are parts of others, or need pixels at marked places of a text, have none of these heads.


@lru_cache(maxsize=1)
def architectures() -> dict[str, str]:
    """Model type -> head, in the order of `HEADS` and of the library's tables."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for head in HEADS:
        for model_type in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES"):
            found.setdefault(model_type, head)
    for model_type in shrink.left_out():
        found.pop(model_type, None)
    return found


def model_class(model_type: str) -> type:
    """The class of an architecture."""
    import transformers
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, f"MODEL_FOR_{architectures()[model_type]}_MAPPING_NAMES")[model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def small_config(model_type: str) -> Any:
    """The shrunk configuration of an architecture."""
    from transformers import CONFIG_MAPPING

    config = shrink.shrunk(CONFIG_MAPPING[model_type], shrink.exceptions(model_type))
    if getattr(config, "use_cache", None):
        config.use_cache = False
    text = getattr(config, "text_config", None)
    if text is not None and not isinstance(config, model_class(model_type).config_class):
        config = text  # as the library's own `AutoModelForCausalLM` takes it
    if architectures()[model_type] == "CAUSAL_LM" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def build(model_type: str) -> torch.nn.Module:
    """The model, as a job's `model` builds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(model_type)(small_config(model_type))
    for part in model.modules():
        if hasattr(part, "config") and hasattr(part.config, "to_dict"):
            part.config._experts_implementation = EXPERTS  # pyright: ignore[reportPrivateUsage]
    return model


# ------------------------------------------------------------------------------------------------- batches
def _find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of `names` in a configuration or, breadth first, in its parts."""
    queue = [config]
    while queue:
        one = queue.pop(0)
        for name in names:
            if (value := getattr(one, name, None)) is not None:
                return value
        queue += [v for v in vars(one).values() if hasattr(v, "to_dict")]
    return default


def _ids(config: Any) -> frozenset[int]:
    found: set[int] = set()
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            found |= _ids(value)
        elif shrink.IDS.search(name) and value is not None:
            found |= set(value if isinstance(value, (list, tuple)) else [value])
    return frozenset(found)


def batches(model_type: str) -> Iterator[Shapes]:
    """The kinds of a batch that an architecture may take, the likeliest first."""
    cls, config = model_class(model_type), small_config(model_type)
    names = set(inspect.signature(cls.forward).parameters)
    main = cls.main_input_name
    for inputs in _inputs(main, names, config):
        for labels in (*_labels(architectures()[model_type], names, config, inputs), {}):
            yield {**inputs, **labels}


def _inputs(main: str, names: set[str], config: Any) -> Iterator[Shapes]:
    vocabulary = _find(config, "vocab_size", default=shrink.VOCABULARY)
    text: Shapes = {"input_ids": ("ids", (TOKENS,), vocabulary)}
    decoder: Shapes = {"decoder_input_ids": ("ids", (TOKENS,), vocabulary)} if "decoder_input_ids" in names else {}
    if main == "input_ids":
        if "pixel_values" in names and "return_loss" in names:
            yield {**text, **next(_images(config))}
        yield text
        if "bbox" in names:
            yield {**text, "bbox": ("class", (TOKENS, 4), 1), **next(_images(config))}
            yield {**text, "bbox": ("class", (TOKENS, 4), 1)}
        if "attention_mask" in names:
            yield {**text, "attention_mask": ("ones", (TOKENS,), 1)}
        if decoder:
            yield {**text, **decoder}
        if "pixel_values" in names:
            yield {**text, **next(_images(config))}
        yield {"input_ids": ("ids", (4 * TOKENS,), vocabulary)}
        yield {"input_ids": ("ids", (shrink.POSITIONS,), vocabulary)}
        if "input_features" in names:
            mels = _find(config, "num_mel_bins", default=80)
            yield {**text, "input_features": ("float", (mels, 8 * TOKENS), 0)}
        if codebooks := _find(config, "num_codebooks"):
            yield {"input_ids": ("ids", (TOKENS, codebooks + 1), vocabulary)}
    elif main in ("pixel_values", "pixel_values_videos"):
        for images in _images(config, main):
            yield images
            if "input_ids" in names:
                yield {**images, **text}
            if decoder:
                yield {**images, **decoder}
            if "pixel_mask" in names:
                size = images[main][1][-1]
                yield {**images, "pixel_mask": ("ones", (size, size), 1)}
    elif main == "past_values":
        length = _find(config, "context_length", default=16)
        lags = max(_find(config, "lags_sequence", default=[0]))
        features = _find(config, "num_time_features", default=0)
        channels = _find(config, "num_input_channels", default=1)
        ahead = _find(config, "prediction_length", default=4)
        yield {
            "past_values": ("float", (length + lags,), 0),
            "past_time_features": ("float", (length + lags, features), 0),
            "past_observed_mask": ("ones", (length + lags,), 0),
            "future_values": ("float", (ahead,), 0),
            "future_time_features": ("float", (ahead, features), 0),
        }
        yield {"past_values": ("float", (length, channels), 0), "future_values": ("float", (ahead, channels), 0)}
        yield {"past_values": ("float", (length, channels), 0)}
    else:
        if main == "inputs":
            yield {main: ("ids", (shrink.POSITIONS,), vocabulary)}
        for shape in _sounds(config):
            yield {main: ("float", shape, 0)}
            if decoder:
                yield {main: ("float", shape, 0), **decoder}
            if "attention_mask" in names:
                yield {main: ("float", shape, 0), "attention_mask": ("ones", shape[-1:], 1)}
                yield {main: ("float", shape, 0), "attention_mask": ("ones", shape[:1], 1)}
            if "input_features_mask" in names:
                yield {main: ("float", shape, 0), "input_features_mask": ("ones", shape[:1], 1), **text}


def _images(config: Any, main: str = "pixel_values") -> Iterator[Shapes]:
    channels = _find(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) and channels < 5 else 3
    size = _find(config, "image_size", "img_size", default=2 * shrink.IMAGE)
    size = [size, size] if isinstance(size, int) else list(size)
    frames = _find(config, "num_frames", "frames_per_clip", default=None)
    shapes = [(channels, *size)] if isinstance(size[0], int) else []
    if frames:
        shapes[:0] = [(frames, *shape) for shape in shapes]
    for shape in (*shapes, *((channels, side, side) for side in (2 * shrink.IMAGE, 64, 128, 224, 384))):
        yield {main: ("float", shape, 0)}
    if shapes:
        yield {main: ("float", (2, *shapes[-1]), 0)}


def _sounds(config: Any) -> Iterator[tuple[int, ...]]:
    mels = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=80)
    length = _find(config, "max_source_positions", default=shrink.POSITIONS)
    yield from ((mels, 2 * length), (2 * length, mels), (4000,), (16000,), (1, 4000), (mels, 3000), (3000, mels))
    patches = _find(config, "max_length", default=1024)
    yield (patches, mels)


def _labels(head: str, names: set[str], config: Any, inputs: Shapes) -> Iterator[Shapes]:
    vocabulary = _find(config, "vocab_size", default=shrink.VOCABULARY)
    name = "labels" if "labels" in names else "label" if "label" in names else None
    if name is None:
        return
    tokens = inputs.get("input_ids", inputs.get("inputs"))
    if head in ("CAUSAL_LM", "MASKED_LM") and tokens:
        yield {name: ("ids", tokens[1], vocabulary)}
    if head in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "CAUSAL_LM"):
        yield {name: ("ids", (TOKENS if head != "CTC" else 3,), vocabulary)}
    if head.endswith("CLASSIFICATION"):
        yield {name: ("class", (), config.num_labels)}
    if "pixel_values" in inputs and head == "SEMANTIC_SEGMENTATION":
        yield {name: ("class", inputs["pixel_values"][1][-2:], config.num_labels)}


# ------------------------------------------------------------------------------------------------ interface
names = architectures
loss = samples.own_loss


def head(model_type: str) -> str:
    """What an architecture is trained for."""
    return architectures()[model_type]


def avoided(model_type: str) -> frozenset[int]:
    """Numbers of tokens that mean something to the model, and are not drawn."""
    return _ids(small_config(model_type))


def experts(model_type: str) -> int:
    """The most experts that a layer of the small model has; 0: it is no mixture of experts."""
    return _experts(small_config(model_type))


def _experts(config: Any) -> int:
    counts = [0]
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            counts.append(_experts(value))
        elif re.search(r"^(moe_)?(num|n)_(local_|routed_)?experts$", name) and isinstance(value, int):
            counts.append(value)
    return max(counts)
