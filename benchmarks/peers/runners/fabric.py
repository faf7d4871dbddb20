"""Lightning Fabric with strategy ddp, which starts its second process itself."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import lightning as L
import torch
from recorder import Recorder
from torch.utils.data import DataLoader
from workloads import collate, loss, per_sample

rec = Recorder()
wl = rec.workload
train = rec.train_set()
# --- user code
fabric = L.Fabric(accelerator="cpu", devices=rec.args.ranks, strategy="ddp")
fabric.launch()
accumulation = wl.accumulation(fabric.world_size)
model = wl.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(train, batch_size=wl.micro_batch, collate_fn=collate))
for i, batch in enumerate(loader):
    last = (i + 1) % accumulation == 0 or i + 1 == len(loader)
    with fabric.no_backward_sync(model, enabled=not last):
        value = loss(model(batch["input_ids"]), batch["labels"])
        # The guide's example does not divide; with a plain SGD one must.
        fabric.backward(value / accumulation)
    rec.micro(value, batch)
    if last:
        optimizer.step()
        optimizer.zero_grad()
        rec.step()
# --- end
if rec.args.eval:
    held_out = wl.eval_set()
    # --- eval code
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)
    loader = fabric.setup_dataloaders(DataLoader(held_out, batch_size=wl.micro_batch, collate_fn=collate))
    with torch.no_grad():
        for batch in loader:
            sums, counts = per_sample(model(batch["input_ids"]), batch["labels"])
            total += torch.tensor([sums.sum(), counts.sum(), len(counts)])
    total = fabric.all_reduce(total, reduce_op="sum")
    rec.eval(total[0] / total[1], total[2])
    # --- end
rec.finish(model.state_dict())
