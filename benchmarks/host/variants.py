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
from names import ALL_AXES, DDP, DTENSOR, FSDP, HALF, LOOP, LOOPED, MEGATRON, QUARTER, SCHEDULES, plan_of, rival_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

HERE = Path(__file__).resolve().parent
Step = Callable[[], float]
Make = Callable[[str, ExitStack], Step]


@dataclass(frozen=True)
class Variant:
    """make: a step of a model of that kind. ranks: of the world."""

    make: Make
    ranks: int = 1


def looped(
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    microbatches: int = workload.MICROBATCHES,
    clip: Callable[[], object] | None = None,
    not_yet: Callable[[bool], Any] = lambda last: nullcontext(),
) -> Step:
    """A loop by hand: microbatches, clipping, AdamW. not_yet: a context for each, given whether it is the last."""
    own = list(parameters)
    optimizer, data = torch.optim.AdamW(own, lr=workload.LR), workload.Tokens()
    at = 0

    def step() -> float:
        nonlocal at
        total, tokens = 0.0, microbatches * workload.LENGTH
        for number in range(microbatches):
            batch = torch.stack([data[at]])
            at += 1
            with not_yet(number == microbatches - 1):
                loss = loss_of(batch) / tokens
                loss.backward()
            total += loss.item()
        clip_grad_norm_(own, workload.CLIP_NORM) if clip is None else clip()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def plain(kind: str, _: ExitStack) -> Step:
    model = workload.model(kind)
    return looped(model.parameters(), lambda batch: workload.summed_loss(model, batch))


def first_stage(ranks: int) -> Make:
    """The first stage on one of `ranks`: the gradient of what it gives is of ones, as it is received elsewhere."""

    def make(_: str, __: ExitStack) -> Step:
        part = workload.Stage(ranks)
        return looped(part.parameters(), lambda batch: part(batch[:, :-1]).sum(), microbatches=workload.PIPELINED)

    return make


def pipelining(ranks: int, schedule: str) -> Make:
    """The first rank under `torch.distributed.pipelining`, with what a loop by hand does around its schedules."""

    def make(_: str, __: ExitStack) -> Step:
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
            ScheduleInterleavedZeroBubble,
        )

        dist.init_process_group()
        stages, count = ranks * LOOPED.get(schedule, 1), workload.PIPELINED
        parts = [workload.Stage(stages, number) for number in range(0, stages, ranks)]
        ids = torch.zeros(1, workload.LENGTH, dtype=torch.int64)
        given = parts[0](ids).detach().requires_grad_()
        own_stages = [
            PipelineStage(
                part, number, stages, torch.device("cpu"), input_args=given if number else ids, output_args=given
            )
            for part, number in zip(parts, range(0, stages, ranks), strict=True)
        ]
        how: Any = {"loss_fn": F.cross_entropy, "scale_grads": False}  # the last stage's
        runner = {
            "gpipe": lambda: ScheduleGPipe(own_stages[0], count, **how),
            "1f1b": lambda: Schedule1F1B(own_stages[0], count, **how),
            "zero-bubble": lambda: ScheduleInterleavedZeroBubble(own_stages, count, **how),
            "interleaved": lambda: ScheduleInterleaved1F1B(own_stages, count, **how),
        }[schedule]()
        own = [parameter for part in parts for parameter in part.parameters()]
        optimizer, data = torch.optim.AdamW(own, lr=workload.LR), workload.Tokens()
        at = 0

        def step() -> float:
            nonlocal at
            batch = torch.stack([data[at + number] for number in range(count)])
            at += count
            runner.step(batch[:, :-1])
            norm = nn.utils.get_total_norm([parameter.grad for parameter in own if parameter.grad is not None])
            numbers = torch.stack([torch.zeros(()), norm.square()])  # the loss, which the last stage has, and squares
            dist.all_reduce(numbers)
            nn.utils.clip_grads_with_norm_(own, workload.CLIP_NORM, numbers[1].sqrt())
            optimizer.step()
            optimizer.zero_grad()
            return float(numbers[0])

        return step

    return make


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


def of_tensor_benchmark(name: str) -> Make:
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


def evenly(plan: str, *, data: int = 1, stages: int = 1) -> Make:
    """The same model as a job under `plan`. data: ranks among which microbatches are dealt. stages: on all ranks."""

    def make(kind: str, contexts: ExitStack) -> Step:
        import evenly

        def loss(model: nn.Module, batch: torch.Tensor) -> evenly.Loss:
            return evenly.Loss(workload.summed_loss(model, batch), batch[:, 1:].numel())

        microbatches = workload.MICROBATCHES if stages == 1 else workload.PIPELINED
        job = evenly.Job(
            model=lambda: workload.model(kind),
            loss=loss,
            data=workload.Tokens(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=workload.LR),
            global_batch=microbatches * data,
            microbatch=1,
            steps=10**5,
            clip_norm=workload.CLIP_NORM,
            name="host",
        )
        without_waiting()
        asked = plan
        if stages > 1:
            with_losses_elsewhere()
            begins = range(workload.LAYERS // stages, workload.LAYERS, workload.LAYERS // stages)
            asked = f"{plan} split_points={'|'.join(map(str, begins))}"
        run = contexts.enter_context(evenly.start(job, plan=asked))
        batches = run.batches()
        return lambda: run.step(next(batches)).loss

    return make


VARIANTS = {
    LOOP: Variant(plain),
    HALF: Variant(first_stage(2)),
    QUARTER: Variant(first_stage(4)),
    **{plan: Variant(evenly(plan)) for plan in ("single", "single recompute=full")},
    **{plan: Variant(evenly(plan, data=2), 2) for plan in ("ddp", "ddp exact=bitwise", "zero1", "zero2", "zero3")},
    **{plan: Variant(evenly(plan), 2) for plan in ("tensor=2", "tensor=2 sequence_parallel=on")},
    "tensor=4": Variant(evenly("tensor=4"), 4),
    ALL_AXES: Variant(evenly(ALL_AXES, data=2, stages=2), 8),
    DDP: Variant(ddp_by_hand, 2),
    FSDP: Variant(fsdp_by_hand, 2),
    MEGATRON: Variant(of_tensor_benchmark("megatron"), 2),
    DTENSOR: Variant(of_tensor_benchmark("dtensor"), 2),
}
for _ranks, _schedules in SCHEDULES.items():
    for _schedule in _schedules:
        _plan = plan_of(_ranks, _schedule)
        VARIANTS[_plan] = Variant(evenly(_plan, stages=_ranks * LOOPED.get(_schedule, 1)), _ranks)
        VARIANTS[rival_of(_ranks, _schedule)] = Variant(pipelining(_ranks, _schedule), _ranks)


def make_step(name: str, kind: str, contexts: ExitStack) -> Step:
    """A step of variant `name` in this process, whose world is set up first."""
    variant = VARIANTS[name]
    torch.set_num_threads(1)
    if variant.ranks > 1:
        pretend(variant.ranks)
    return variant.make(kind, contexts)
