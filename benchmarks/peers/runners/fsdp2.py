"""Raw FSDP2: fully_shard on each block and on the root, gradient sync off while accumulating."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import torch
import torch.distributed as dist
from recorder import Recorder
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workloads import collate, loss, per_sample

rec = Recorder()
wl = rec.workload
train = rec.train_set()
# --- user code
dist.init_process_group("gloo")
accumulation = wl.accumulation(dist.get_world_size())
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = wl.model()
for block in getattr(model, "blocks", []):
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
sampler = DistributedSampler(train, shuffle=False)
loader = DataLoader(train, batch_size=wl.micro_batch, sampler=sampler, collate_fn=collate)
for i, batch in enumerate(loader):
    last = (i + 1) % accumulation == 0 or i + 1 == len(loader)
    model.set_requires_gradient_sync(last)
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
rec.finish(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
dist.destroy_process_group()
