"""A workload as a job for `evenly`. As it stands, `evenly verify` takes it: --set workload=W2s."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
import torch
from workloads import WORKLOADS, collate, loss

import evenly


# `record(mean_loss, batch)` is called for every microbatch; `count` cuts ragged batches by count too.
def job(workload="W1s", steps=3, count=False, evaluate=False, record=None):
    wl = WORKLOADS[workload]
    train = wl.train_set(steps)
    budget = None if count else wl.budget
    costs = {"cost": train.length, "microbatch_cost": budget} if wl.budget else {}

    # --- user code
    def summed(model, batch):
        if wl.vocab > 1000:
            hidden = model(batch["input_ids"], head=False)
            total = evenly.nn.linear_cross_entropy(hidden, model.head.weight, batch["labels"], reduction="sum")
        else:
            total = loss(model(batch["input_ids"]), batch["labels"], "sum")
        weight = (batch["labels"] != -100).sum()
        if record and model.training:  # rec.
            record(total.detach() / weight, batch)  # rec.
        return evenly.Loss(total, weight)

    return evenly.Job(
        model=wl.model, loss=summed, data=train, collate=collate, shuffle=False,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=wl.lr),
        global_batch=wl.global_batch, steps=steps, microbatch=None if budget else wl.micro_batch, **costs,
        eval_data=wl.eval_set() if evaluate else None,
        precision="float64" if wl.dtype is torch.float64 else "float32",
    )  # fmt: skip
    # --- end
