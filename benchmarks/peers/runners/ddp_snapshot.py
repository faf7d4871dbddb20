"""Raw DDP with the fault-tolerance tutorial's snapshot, but every --every steps instead of epochs.

For `torchrun --max-restarts`: loads the snapshot if there is one and continues after it."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import torch
import torch.distributed as dist
from recorder import Recorder
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from workloads import collate, loss

rec = Recorder(("--every", {"type": int, "default": 5}))
wl = rec.workload
train = rec.train_set()
snapshot = rec.out.with_suffix(".snapshot")
# --- user code
dist.init_process_group("gloo")
accumulation = wl.accumulation(dist.get_world_size())
model = wl.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
step = 0
if snapshot.exists():
    saved = torch.load(snapshot)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
model = DistributedDataParallel(model)
rec.offset = step
rest = Subset(train, range(step * wl.global_batch, len(train)))
loader = DataLoader(rest, wl.micro_batch, sampler=DistributedSampler(rest, shuffle=False), collate_fn=collate)
for i, batch in enumerate(loader):
    value = loss(model(batch["input_ids"]), batch["labels"])
    (value / accumulation).backward()
    rec.micro(value, batch)
    if (i + 1) % accumulation == 0:
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % rec.args.every == 0 and dist.get_rank() == 0:
            weights, state = model.module.state_dict(), optimizer.state_dict()  # rec.
            torch.save({"model": weights, "optimizer": state, "step": step}, snapshot)
        rec.step()
# --- end
rec.finish(model.module.state_dict())
dist.destroy_process_group()
