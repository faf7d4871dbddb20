"""Raw torch DDP as in the official tutorials: DistributedSampler, mean loss, no_sync accumulation."""

import contextlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from recorder import Recorder
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workloads import collate, loss, per_sample

rec = Recorder()
wl = rec.workload
train = rec.train_set()
timeout = timedelta(seconds=int(os.environ["PEER_TIMEOUT"])) if "PEER_TIMEOUT" in os.environ else None
# --- user code
dist.init_process_group("gloo", timeout=timeout)
accumulation = wl.accumulation(dist.get_world_size())
model = DistributedDataParallel(wl.model())
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
sampler = DistributedSampler(train, shuffle=False)
loader = DataLoader(train, batch_size=wl.micro_batch, sampler=sampler, collate_fn=collate)
for i, batch in enumerate(loader):
    last = (i + 1) % accumulation == 0 or i + 1 == len(loader)
    with contextlib.nullcontext() if last else model.no_sync():
        value = loss(model(batch["input_ids"]), batch["labels"])
        (value / accumulation).backward()
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
    sampler = DistributedSampler(held_out, shuffle=False)
    with torch.no_grad():
        for batch in DataLoader(held_out, batch_size=wl.micro_batch, sampler=sampler, collate_fn=collate):
            sums, counts = per_sample(model(batch["input_ids"]), batch["labels"])
            total += torch.tensor([sums.sum(), counts.sum(), len(counts)])
    dist.all_reduce(total)
    rec.eval(total[0] / total[1], total[2])
    # --- end
rec.finish(model.module.state_dict())
dist.destroy_process_group()
