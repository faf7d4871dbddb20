"""Accelerate, its documented recipe for gradient accumulation over samples of variable size."""

import contextlib
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import torch
from accelerate import Accelerator
from recorder import Recorder
from torch.utils.data import DataLoader
from workloads import collate, loss, per_sample

rec = Recorder()
wl = rec.workload
train = rec.train_set()
# --- user code
accumulation = wl.accumulation(rec.args.ranks)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
model = wl.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
loader = DataLoader(train, batch_size=wl.micro_batch, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
iterator = iter(loader)
remainder = len(loader) % accumulation or accumulation
updates = math.ceil(len(loader) / accumulation)
for update in range(updates):
    batches = [next(iterator) for _ in range(accumulation if update + 1 < updates else remainder)]
    items = sum((b["labels"] != -100).sum() for b in batches)
    items = accelerator.gather(items).sum().item()
    for i, batch in enumerate(batches):
        with model.no_sync() if i + 1 < len(batches) else contextlib.nullcontext():
            value = loss(model(batch["input_ids"]), batch["labels"], "sum")
            accelerator.backward(value * accumulation * accelerator.num_processes / items)
        rec.micro(value / (batch["labels"] != -100).sum(), batch)
    optimizer.step()
    optimizer.zero_grad()
    rec.step()
# --- end
if rec.args.eval:
    held_out = wl.eval_set()
    # --- eval code
    model.eval()
    eval_loader = accelerator.prepare(DataLoader(held_out, batch_size=wl.micro_batch, collate_fn=collate))
    total = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in eval_loader:
            pair = per_sample(model(batch["input_ids"]), batch["labels"])  # rec.
            sums, counts = accelerator.gather_for_metrics(pair)
            total += torch.tensor([sums.sum(), counts.sum(), len(counts)])
    rec.eval(total[0] / total[1], total[2])
    # --- end
rec.finish(accelerator.get_state_dict(model))
accelerator.end_training()
