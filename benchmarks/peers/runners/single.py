"""One process, plain loop, exact token weighting over the global batch: the reference numbers."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import torch
from recorder import Recorder
from workloads import collate, loss, per_sample

rec = Recorder()
wl = rec.workload
train = rec.train_set()
# --- user code
model = wl.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
loader = torch.utils.data.DataLoader(train, batch_size=wl.micro_batch, collate_fn=collate)
batches = iter(loader)
for start in range(0, len(train), wl.global_batch):
    size = min(wl.global_batch, len(train) - start)
    step_batches = [next(batches) for _ in range(-(-size // wl.micro_batch))]
    total = sum(int((b["labels"] != -100).sum()) for b in step_batches)
    for batch in step_batches:
        value = loss(model(batch["input_ids"]), batch["labels"], "sum")
        (value / total).backward()
        rec.micro(value / (batch["labels"] != -100).sum(), batch)
    optimizer.step()
    optimizer.zero_grad()
    rec.step()
# --- end
if rec.args.eval:
    held_out = wl.eval_set()
    # --- eval code
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for batch in torch.utils.data.DataLoader(held_out, batch_size=wl.micro_batch, collate_fn=collate):
            sums, counts = per_sample(model(batch["input_ids"]), batch["labels"])
            total += torch.tensor([sums.sum(), counts.sum(), len(counts)])
    rec.eval(total[0] / total[1], total[2])
    # --- end
rec.finish(model.state_dict())
