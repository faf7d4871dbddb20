"""What is compared: each makes a function that trains one step on this rank, of the same model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import workload
from fake_world import pretend, with_losses_elsewhere, without_waiting
from torch import nn
from torch.nn.utils import clip_grad_norm_

HERE = Path(__file__).resolve().parent
Step = Callable[[], float]


@dataclass(frozen=True)
class Variant:
    """make: a step of a model of that kind. ranks: of the world. base: the plain loop it is compared with."""

    make: Callable[[str, ExitStack], Step]
    ranks: int = 1
    base: str = "plain"


def looped(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    clip: Callable[[], object] | None = None,
    not_yet: Callable[[bool], Any] = lambda last: nullcontext(),
) -> Step:
    """A loop by hand: two microbatches, clipping, AdamW. not_yet: a context for each, given whether it is the last."""
    own = list(parameters)
    optimizer, data = torch.optim.AdamW(own, lr=workload.LR), workload.Tokens()
    at = 0

    def step() -> float:
        nonlocal at
        total, tokens = 0.0, workload.MICROBATCHES * workload.LENGTH
        for number in range(workload.MICROBATCHES):
            batch = torch.stack([data[at]])
            at += 1
            with not_yet(number == workload.MICROBATCHES - 1):
                loss = loss_of(batch) / tokens
                loss.backward()
            total += loss.item()
        clip_grad_norm_(own, workload.CLIP_NORM) if clip is None else clip()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def plain(kind: str, _: ExitStack, layers: int = workload.LAYERS) -> Step:
    model = workload.model(kind, layers)
    return looped(model.parameters(), lambda batch: workload.summed_loss(model, batch))


def half(kind: str, contexts: ExitStack) -> Step:
    """What one of two stages has of the model."""
    return plain(kind, contexts, workload.LAYERS // 2)


def ddp_by_hand(kind: str, _: ExitStack) -> Step:
    dist.init_process_group()
    model = nn.parallel.DistributedDataParallel(workload.model(kind))
    model.register_comm_hook(None, summed)  # DDP's own wants a tensor of the work, and fake ones have none
    waiting: Callable[[bool], Any] = lambda last: nullcontext() if last else model.no_sync()  # noqa: E731
    return looped(model.parameters(), lambda batch: workload.summed_loss(model, batch), not_yet=waiting)


def summed(_, bucket):  # torch wants no annotations that are text
    dist.all_reduce(bucket.buffer(), async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


def fsdp_by_hand(kind: str, _: ExitStack) -> Step:
    """Gradients are reduced with every microbatch, as under zero3: no rank ever holds all of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group()
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), workload.model(kind)
    blocks: Any = model.blocks if kind == "gpt" else model.transformer.h
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return looped(model.parameters(), lambda batch: workload.summed_loss(model, batch))


def of_tensor_benchmark(name: str) -> Callable[[str, ExitStack], Step]:
    """`megatron` and `dtensor` of benchmarks/tensor, whose losses are means over the tokens of a microbatch."""

    def make(kind: str, contexts: ExitStack) -> Step:
        assert kind == "gpt", "written for the GPT of benchmarks/peers alone"
        sys.path.append(str(HERE.parent / "tensor"))
        import importlib

        import workloads

        form = workloads.Workload(
            "host", "windows", 2, 1, width=workload.WIDTH, layers=workload.LAYERS, heads=workload.HEADS,
            seq=workload.LENGTH,
        )  # fmt: skip
        if name == "dtensor":
            dist.init_process_group()
        named, mean_of, clip = importlib.import_module(name).contender(form, contexts)
        length = workload.LENGTH
        return looped(
            named.values(), lambda batch: mean_of(batch[:, :-1], batch[:, 1:].contiguous()) * length, clip=clip
        )

    return make


def evenly(plan: str, ranks: int = 1, data: int = 1) -> Callable[[str, ExitStack], Step]:
    """The same model as a job under `plan`. data: ranks among which microbatches are dealt."""

    def make(kind: str, contexts: ExitStack) -> Step:
        import evenly

        def loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
            return evenly.Loss(workload.summed_loss(model, batch), batch[:, 1:].numel())

        job = evenly.Job(
            model=lambda: workload.model(kind),
            loss=loss,
            data=workload.Tokens(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=workload.LR),
            global_batch=workload.MICROBATCHES * data,
            microbatch=1,
            steps=10**5,
            clip_norm=workload.CLIP_NORM,
            name="host",
        )
        if ranks > 1:
            without_waiting()
        if plan.startswith("pipeline"):
            with_losses_elsewhere()
        run = contexts.enter_context(evenly.start(job, plan=plan))
        batches = run.batches()
        return lambda: run.step(next(batches)).loss

    return make


VARIANTS = {
    "plain": Variant(plain),
    "plain-half": Variant(half),
    "single": Variant(evenly("single")),
    "recompute": Variant(evenly("single recompute=full")),
    "ddp": Variant(evenly("ddp", 2, 2), 2),
    "bitwise": Variant(evenly("ddp exact=bitwise", 2, 2), 2),
    "zero1": Variant(evenly("zero1", 2, 2), 2),
    "zero2": Variant(evenly("zero2", 2, 2), 2),
    "zero3": Variant(evenly("zero3", 2, 2), 2),
    "tensor=2": Variant(evenly("tensor=2", 2), 2),
    "tensor=2 sequence": Variant(evenly("tensor=2 sequence_parallel=on", 2), 2),
    "tensor=4": Variant(evenly("tensor=4", 4), 4),
    "pipeline=2": Variant(evenly("pipeline=2", 2), 2, base="plain-half"),
    "ddp by hand": Variant(ddp_by_hand, 2),
    "fsdp by hand": Variant(fsdp_by_hand, 2),
    "megatron": Variant(of_tensor_benchmark("megatron"), 2),
    "dtensor": Variant(of_tensor_benchmark("dtensor"), 2),
}


def make_step(name: str, kind: str, contexts: ExitStack) -> Step:
    """A step of variant `name` in this process, whose world is set up first."""
    variant = VARIANTS[name]
    torch.set_num_threads(1)
    if variant.ranks > 1:
        pretend(variant.ranks)
    return variant.make(kind, contexts)
