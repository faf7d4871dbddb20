"""DeepSpeed on its CPU accelerator (DS_ACCELERATOR=cpu, gloo), --stage 0..3."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import deepspeed
import torch
from recorder import Recorder
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workloads import collate, loss, per_sample

rec = Recorder(("--stage", {"type": int, "default": 0}))
wl = rec.workload
train = rec.train_set()
# --- user code
deepspeed.init_distributed()
accumulation = wl.accumulation(deepspeed.comm.get_world_size())
config = {
    "train_batch_size": wl.global_batch,
    "train_micro_batch_size_per_gpu": wl.micro_batch,
    "gradient_accumulation_steps": accumulation,
    "gradient_clipping": 0.0,  # its default is 1.0, which the reference does not do
    "zero_optimization": {"stage": rec.args.stage},
}
model = wl.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
sampler = DistributedSampler(train, shuffle=False)
loader = DataLoader(train, batch_size=wl.micro_batch, sampler=sampler, collate_fn=collate)
for batch in loader:
    value = loss(engine(batch["input_ids"]), batch["labels"])
    engine.backward(value)
    rec.micro(value, batch)
    last = engine.is_gradient_accumulation_boundary()  # rec.
    engine.step()
    if last:  # rec.
        rec.step()
# --- end
if rec.args.eval:
    held_out = wl.eval_set()
    # --- eval code
    engine.eval()
    total = torch.zeros(3, dtype=torch.float64)
    sampler = DistributedSampler(held_out, shuffle=False)
    with torch.no_grad():
        for batch in DataLoader(held_out, batch_size=wl.micro_batch, sampler=sampler, collate_fn=collate):
            sums, counts = per_sample(engine(batch["input_ids"]), batch["labels"])
            total += torch.tensor([sums.sum(), counts.sum(), len(counts)])
    deepspeed.comm.all_reduce(total)
    rec.eval(total[0] / total[1], total[2])
    # --- end
if rec.args.stage == 3:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        rec.finish({k: v.clone() for k, v in engine.module.state_dict().items()})
else:
    rec.finish(engine.module.state_dict())
deepspeed.comm.destroy_process_group()
