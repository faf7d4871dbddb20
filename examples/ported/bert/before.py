"""A BERT that tells the keyword of a line of Python from the rest of it, by transformers' Trainer with compute_metrics."""

import re
import sysconfig
from pathlib import Path

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

KEYWORDS = ["def", "return", "if", "for", "import"]
LENGTH = 48


def read_lines():
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
        for line in path.read_text(errors="ignore").splitlines():
            match = re.match(r"\s*(\w+) (.{12,})", line)
            if match and match[1] in KEYWORDS:
                ids = list(match[2].encode()[:LENGTH])
                mask = [1] * len(ids) + [0] * (LENGTH - len(ids))
                row = {"input_ids": ids + [0] * (LENGTH - len(ids)), "attention_mask": mask}
                found.append({**row, "label": KEYWORDS.index(match[1])})
    return found


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


set_seed(0)
lines = read_lines()
config = BertConfig(
    vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=LENGTH, num_labels=len(KEYWORDS), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
args = TrainingArguments(
    output_dir="runs/bert", per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=60, learning_rate=2e-3,
    weight_decay=0.01, warmup_steps=6, eval_strategy="steps", eval_steps=30, save_strategy="no", logging_steps=10,
    report_to="none", use_cpu=True,
)
trainer = Trainer(
    model=BertForSequenceClassification(config), args=args, train_dataset=lines[200:2200], eval_dataset=lines[:200],
    compute_metrics=compute_metrics,
)
trainer.train()
