"""Subjects of peft: an adapter on a small model of transformers, whose own weights are frozen; `lora-llama`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import Any

import samples
import subjects_transformers
import torch
from samples import Shapes

ALL = {"target_modules": "all-linear"}
PROMPT = {"num_virtual_tokens": 4}
# The name before the dash -> the class of its configuration, and that one's arguments.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, **ALL}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True, **ALL}),
    "rslora": ("LoraConfig", {"r": 4, "use_rslora": True, "lora_dropout": 0.1, **ALL}),
    "lora_bias": ("LoraConfig", {"r": 4, "bias": "all", **ALL}),
    "adalora": ("AdaLoraConfig", {"init_r": 6, "target_r": 4, "total_step": 10, "tinit": 2, "tfinal": 2, **ALL}),
    "ia3": ("IA3Config", {}),
    "loha": ("LoHaConfig", {"r": 4, **ALL}),
    "lokr": ("LoKrConfig", {"r": 4, **ALL}),
    "oft": ("OFTConfig", {"oft_block_size": 4, **ALL}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, **ALL}),
    "vera": ("VeraConfig", {"r": 4, **ALL}),
    "randlora": ("RandLoraConfig", {"r": 4, **ALL}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 16, **ALL}),
    "hra": ("HRAConfig", {"r": 4, **ALL}),
    "miss": ("MissConfig", {"r": 4, **ALL}),
    "shira": ("ShiraConfig", {"r": 4, **ALL}),
    "c3a": ("C3AConfig", {"block_size": 8, **ALL}),
    "ln": ("LNTuningConfig", {}),
    "prefix": ("PrefixTuningConfig", PROMPT),
    "prompt": ("PromptTuningConfig", PROMPT),
    "ptuning": ("PromptEncoderConfig", {**PROMPT, "encoder_hidden_size": 16}),
}
# Adapters and the models that they are put on, whose inputs and losses are those of transformers' own subjects.
PAIRS = (
    *("lora-llama", "lora-mixtral", "lora-t5", "lora-bert", "lora-vit", "lora-whisper", "lora_bias-opt"),
    *("dora-mistral", "dora-roberta", "rslora-qwen2", "rslora-gemma", "adalora-gpt_neox", "adalora-bart"),
    *("ia3-llama", "ia3-t5", "loha-bert", "loha-phi3", "lokr-distilbert", "lokr-qwen3", "oft-llama", "oft-opt"),
    *("boft-electra", "vera-mistral", "vera-gemma2", "randlora-olmo2", "fourierft-roberta", "hra-qwen2"),
    *(
        "miss-phi",
        "miss-llama",
        "shira-falcon",
        "c3a-gpt_neox",
        "ln-gemma",
        "ln-gpt_neox",
        "prefix-llama",
        "prefix-opt",
    ),
    *("prompt-gpt2", "prompt-t5", "ptuning-opt", "ptuning-qwen2"),
)
TASKS = {"CAUSAL_LM": "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM": "SEQ_2_SEQ_LM"}


def names() -> Collection[str]:
    """The pairs."""
    return PAIRS


def _parts(name: str) -> tuple[str, str]:
    adapter, _, model_type = name.partition("-")
    return adapter, model_type


def build(name: str) -> torch.nn.Module:
    """A model of transformers with its adapter; nothing else trains."""
    import peft

    adapter, model_type = _parts(name)
    model = subjects_transformers.build(model_type)
    config_class, arguments = ADAPTERS[adapter]
    task = TASKS.get(subjects_transformers.head(model_type))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, getattr(peft, config_class)(task_type=task, **arguments))


def batches(name: str) -> Iterator[Shapes]:
    """Those of the model without adapter."""
    return subjects_transformers.batches(_parts(name)[1])


loss = samples.own_loss


def head(name: str) -> str:
    """The adapter's method."""
    return f"adapter {_parts(name)[0]}"


def avoided(name: str) -> frozenset[int]:
    """What the model without adapter avoids."""
    return subjects_transformers.avoided(_parts(name)[1])


def experts(name: str) -> int:
    """Those of the model without adapter."""
    return subjects_transformers.experts(_parts(name)[1])
