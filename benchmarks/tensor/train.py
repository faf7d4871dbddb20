"""Trains a model as one contender does: single, megatron, dtensor or evenly; started, paused and timed by speed.py."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "peers"))
sys.path.append(str(Path(__file__).parents[1] / "peers" / "runners"))

import torch
from recorder import Recorder
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from workloads import Workload, collate, loss


def single(workload: Workload, contexts: ExitStack):
    """Parameters by name; the mean loss of ids and labels; clipping to a norm of 1. contexts: of all steps."""
    model = workload.model()
    named = dict(model.named_parameters())
    return named, lambda ids, labels: loss(model(ids), labels), lambda: clip_grad_norm_(named.values(), 1.0)


def by_hand(rec: Recorder) -> Iterator[float]:
    """The loss of step after step."""
    make = single if rec.args.kind == "single" else importlib.import_module(rec.args.kind).contender
    with ExitStack() as contexts:
        named, loss_of, clip = make(rec.workload, contexts)
        optimizer = torch.optim.AdamW(named.values(), lr=rec.workload.lr)
        for batch in DataLoader(rec.train_set(), batch_size=rec.workload.micro_batch, collate_fn=collate):
            value = loss_of(batch["input_ids"], batch["labels"])
            value.backward()
            clip()
            optimizer.step()
            optimizer.zero_grad()
            yield value.item()


def evenly(rec: Recorder) -> Iterator[float]:
    """The same of the unmodified model under EVENLY_PLAN."""
    from evenly_job import job

    import evenly

    work = replace(job(rec.args.workload, rec.steps), clip_norm=1.0)
    with evenly.start(work, plan=os.environ["EVENLY_PLAN"]) as run:
        for batch in run.batches():
            yield run.step(batch).loss


def main() -> None:
    rec = Recorder(("kind", {}))
    labels = torch.zeros(rec.workload.micro_batch, rec.workload.seq)
    for value in evenly(rec) if rec.args.kind == "evenly" else by_hand(rec):
        if rec.rank == 0:  # every rank has the whole batch
            rec.micro(torch.tensor(value), labels)
        rec.step()
    rec.finish()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
