"""A small Llama by one of trl's trainers, as a job file: `kind` is dpo or grpo."""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import evenly

WORDS = ["even", "shares", "of", "a", "batch", "on", "any", "number", "of", "devices", "train", "to", "the", "same"]


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    vocabulary = {**special, **{word: number for number, word in enumerate(dict.fromkeys(WORDS), 4)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def text(first: int, count: int) -> str:
    return " ".join(WORDS[(first + n) % len(WORDS)] for n in range(count))


def model() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    )


def job(kind: str = "dpo") -> evenly.Job:
    folder = tempfile.mkdtemp()
    given: dict[str, Any] = {"output_dir": folder, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    given |= {"max_steps": 4, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False}
    given |= {"gradient_checkpointing": False}
    if kind == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        data = Dataset.from_list([{"prompt": text(n, 3)} for n in range(16)])
        args = GRPOConfig(num_generations=4, max_completion_length=4, **given)
        trainer = GRPOTrainer(
            model=model(),
            args=args,
            processing_class=tokenizer(),
            train_dataset=data,
            reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
        )
    else:
        from trl import DPOConfig, DPOTrainer

        rows = [{"prompt": text(n, 3), "chosen": text(n, 5), "rejected": text(n + 2, 4)} for n in range(32)]
        trainer = DPOTrainer(
            model=model(),
            args=DPOConfig(gradient_accumulation_steps=2, **given),
            processing_class=tokenizer(),
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
        )
    return evenly.from_trainer(trainer)
