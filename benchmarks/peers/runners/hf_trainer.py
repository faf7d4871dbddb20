"""Hugging Face Trainer with a compute_loss_func that uses num_items_in_batch.

--strategy picks train_sampling_strategy ("sequential" keeps the reference's data order;
"batch_rebalance" balances padded cost inside each global batch).  --every K saves a checkpoint
every K steps and resumes from the last one."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import functools

import torch
from recorder import Recorder
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import get_last_checkpoint
from workloads import collate, loss

rec = Recorder(("--strategy", {"default": "sequential"}), ("--every", {"type": int}))
wl = rec.workload
train = rec.train_set()

# It always shuffles; without that its global batches are the reference's.
if rec.args.strategy == "batch_rebalance":
    BatchRebalanceSampler.__init__ = functools.partialmethod(BatchRebalanceSampler.__init__, shuffle=False)


class Measure(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        rec.step()


# --- user code
class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = wl.model()

    def forward(self, input_ids):
        return {"logits": self.model(input_ids)}


def compute_loss(outputs, labels, num_items_in_batch=None):
    value = loss(outputs["logits"], labels, "sum")
    if model.training:  # rec.
        rec.micro(value / (labels != -100).sum(), labels)
    return value / num_items_in_batch


model = Wrapped()
arguments = TrainingArguments(
    output_dir=rec.out.with_suffix(".hf"), use_cpu=True, num_train_epochs=1,
    per_device_train_batch_size=wl.micro_batch, per_device_eval_batch_size=wl.micro_batch,
    gradient_accumulation_steps=wl.accumulation(rec.args.ranks), train_sampling_strategy=rec.args.strategy,
    learning_rate=wl.lr, weight_decay=0.01, max_grad_norm=0.0, lr_scheduler_type="constant",
    label_names=["labels"], report_to="none", save_strategy="steps" if rec.args.every else "no",
    save_steps=rec.args.every or 500,  # rec.
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=wl.lr)
trainer = Trainer(
    model, arguments, train_dataset=train, eval_dataset=wl.eval_set(), data_collator=collate,
    compute_loss_func=compute_loss, optimizers=(optimizer, None), callbacks=[Measure()],
)  # fmt: skip
resumes = rec.args.every and pathlib.Path(arguments.output_dir).is_dir()  # rec.
last = get_last_checkpoint(arguments.output_dir) if resumes else None
rec.offset = int(last.rsplit("-", 1)[1]) if last else 0
trainer.train(resume_from_checkpoint=last)
# --- end
if rec.args.eval:
    # --- eval code
    result = trainer.evaluate()
    # --- end
    rec.eval(result["eval_loss"], round(result["eval_runtime"] * result["eval_samples_per_second"]))
rec.finish({k.removeprefix("model."): v for k, v in trainer.model.state_dict().items()})
