"""A Trainer with ragged labels, gradient accumulation, a cosine schedule and decay by name, as a job file."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import evenly

LENGTH, SAMPLES = 10, 46


def make_data() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    ids = torch.randint(0, 30, (SAMPLES, LENGTH))
    places = torch.arange(LENGTH)
    return [{"input_ids": x, "labels": torch.where(places < 1 + n % 7, -100, x)} for n, x in enumerate(ids)]


def compute_metrics(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:]
    counts = labels != -100
    return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == labels)[counts].mean())}


def make_trainer(folder: str = "unused", *, callbacks: list[TrainerCallback] | None = None, **more: Any) -> Trainer:
    set_seed(1)
    none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **none))
    data = make_data()
    given: dict[str, Any] = {
        "per_device_train_batch_size": 3, "per_device_eval_batch_size": 3, "gradient_accumulation_steps": 2,
        "max_steps": 30, "learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3,
        "eval_strategy": "steps", "eval_steps": 10, "save_strategy": "no", "logging_steps": 1, "report_to": "none",
        "use_cpu": True, "train_sampling_strategy": "sequential", "adam_epsilon": 1e-6,
    }  # fmt: skip
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=folder, **{**given, **more}),
        train_dataset=data[:40],
        eval_dataset=data[40:],
        compute_metrics=compute_metrics,
        callbacks=callbacks,
    )


def job() -> evenly.Job:
    return evenly.from_trainer(make_trainer())
