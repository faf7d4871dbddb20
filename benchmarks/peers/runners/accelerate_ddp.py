"""Accelerate: prepare() + accumulate(), as in its gradient accumulation guide.

--fsdp2 asks for FullyShardedDataParallelPlugin(fsdp_version=2)."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from recorder import Recorder
from torch.utils.data import DataLoader
from workloads import collate, loss, per_sample

rec = Recorder(("--fsdp2", {"action": "store_true"}))
wl = rec.workload
train = rec.train_set()
plugin = {}
if rec.args.fsdp2:
    plugin["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
# --- user code
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=wl.accumulation(rec.args.ranks), **plugin)
model = wl.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
loader = DataLoader(train, batch_size=wl.micro_batch, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        value = loss(model(batch["input_ids"]), batch["labels"])
        accelerator.backward(value)
        rec.micro(value, batch)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        rec.step()
# --- end
if rec.rank == 0:
    print("accelerate:", accelerator.distributed_type, type(model).__name__, accelerator.num_processes)
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
