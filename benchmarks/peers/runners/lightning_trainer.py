"""Lightning Trainer with strategy ddp, its own launcher.  --bare: no logger, bar, checkpoint.

use_distributed_sampler stays on: it leaves a DistributedSampler given by the user alone."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import os
from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from recorder import Recorder
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from workloads import collate, loss

rec = Recorder(("--bare", {"action": "store_true"}))
wl = rec.workload
train = rec.train_set()


class Measure(L.Callback):
    steps = 0

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            rec.step()


strategy, bare = "ddp", {}
if "PEER_TIMEOUT" in os.environ:
    strategy = DDPStrategy(timeout=timedelta(seconds=int(os.environ["PEER_TIMEOUT"])))
if rec.args.bare:
    bare = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


# --- user code
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = wl.model()

    def training_step(self, batch, index):
        value = loss(self.model(batch["input_ids"]), batch["labels"])
        self.log("train_loss", value)
        rec.micro(value, batch)
        return value

    def validation_step(self, batch, index):
        value = loss(self.model(batch["input_ids"]), batch["labels"])
        self.log("val_loss", value, batch_size=len(batch["labels"]), sync_dist=True)
        seen.append(len(batch["labels"]))  # rec.

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=wl.lr)

    # By default the Trainer shuffles the training set even where the loader does not.
    def train_dataloader(self):
        sampler = DistributedSampler(train, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(train, batch_size=wl.micro_batch, sampler=sampler, collate_fn=collate)


trainer = L.Trainer(
    accelerator="cpu", devices=rec.args.ranks, strategy=strategy, max_epochs=1,
    accumulate_grad_batches=wl.accumulation(rec.args.ranks),
    default_root_dir=rec.out.with_suffix(".lightning"), callbacks=[Measure()], **bare,  # rec.
)  # fmt: skip
module, seen = Module(), []
trainer.fit(module)
# --- end
if rec.args.eval:
    held_out = wl.eval_set()
    # --- eval code
    result = trainer.validate(module, DataLoader(held_out, batch_size=wl.micro_batch, collate_fn=collate))
    # --- end
    rec.eval(result[0]["val_loss"], trainer.strategy.reduce(torch.tensor(float(sum(seen))), reduce_op="sum"))
rec.finish({k.removeprefix("model."): v for k, v in module.state_dict().items()})
