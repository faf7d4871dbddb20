"""From a job to its model, optimizer and schedule on one rank, with the checks that need them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.data.generators import seeded
from evenly.data.stream import stream_key
from evenly.engine.precision import place_model
from evenly.errors import EvenlyError, PlanError, RunError, UserError, describe
from evenly.job import Job
from evenly.model.frozen import freeze
from evenly.model.modes import evaluating, has_own_modes, in_training
from evenly.model.overlap import find_overlapping
from evenly.model.phases import check_phases
from evenly.parallel.core.mutation_guard import check_memory, fingerprint, memory_of
from evenly.parallel.core.optimizer_kinds import is_changed, is_separable
from evenly.parallel.core.sharded_init import ShardedInit
from evenly.plan import Plan
from evenly.plan.schedule import splits_backward
from evenly.torch_private import gradient_hooks, has_accumulated_hooks

T = TypeVar("T")


def build_model(job: Job, *, precision: str, device: str | None) -> nn.Module:
    """The job's model in training mode on `device`, with initial values that depend on the seed alone.

    What the job has put into evaluation mode within a model in training mode stays in it.
    It is built on the CPU, whose random numbers are the same on every machine with the same torch, and stays there if
    `device` is None.
    """
    with seeded(stream_key(job.seed, "model")):
        model = call_job("model", job.model)
    expect_kind("model", model, nn.Module)
    _check_parameters(model)
    freeze(model, job.frozen)
    check_phases(model, job.phases)
    call_job("model", lambda: in_training(model))
    if job.eval_data is not None and has_own_modes(model):
        _check_modes(model)
    return place_model(model, precision, device)


def _check_modes(model: nn.Module) -> None:
    """Raise `UserError` where the job's own `train()` and `eval()` would move parameters in an evaluation."""
    try:
        twin = copy.deepcopy(model)
        before = memory_of(twin)
        with evaluating(twin):
            check_memory(twin, before)
        check_memory(twin, before)
    except UserError:
        raise
    except Exception:  # it cannot be copied, or not evaluated so early: an evaluation finds out
        return


def build_optimizer(
    job: Job, named: Sequence[tuple[str, nn.Parameter]], plan: Plan, context: AbstractContextManager[None] | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over all parameters of the model, `named`.

    Raises `UserError` if it cannot step them as `plan` says.
    Parameters of other ranks are on the meta device, so that the job can sort all into groups.
    context: within which the job's code runs.
    """
    with seeded(stream_key(job.seed, "optimizer", 0)), context or nullcontext():
        optimizer = call_job("optimizer", lambda: job.build_optimizer(named))
    expect_kind("optimizer", optimizer, torch.optim.Optimizer)
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise UserError(f"optimizer {type(optimizer).__name__}", "it has no param_groups or no state", "give it both")
    if plan.pipeline.active and not is_separable(optimizer):
        hooks = " with hooks or a step of its own" if is_changed(optimizer) else ""
        raise UserError(
            f"optimizer {type(optimizer).__name__}{hooks} under pipeline={plan.pipeline.size}",
            "it may look at all parameters together, and each rank has those of its stages",
            "use an optimizer of torch.optim as it is, or a plan without pipeline",
        )
    _check_eps(optimizer)
    known = {id(p) for _, p in named}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            "the job's optimizer", "it holds parameters that are not the model's", "give it the `params` passed in"
        )
    choose_kernels(optimizer, plan)
    return optimizer


# Their fused kernels compute the same up to rounding. The one of SGD fails where some parameters get their momentum
# buffer later than others.
FUSED = (torch.optim.Adam, torch.optim.AdamW)


def check_offload(optimizer: torch.optim.Optimizer, offload: str) -> None:
    """Raises `UserError` for an optimizer that would need the ranks' GPUs for what lies on the host."""
    if offload != "none":
        raise UserError(
            f"optimizer {type(optimizer).__name__} under offload={offload}",
            "it may need whole parameters, and each rank has a part of them on the host",
            "use an optimizer of torch.optim that treats every element by itself (AdamW, SGD), or no offload",
        )


def choose_kernels(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Lets `optimizer` use fused kernels where the job does not choose and the numbers stay right, and only there.

    A fused kernel passes over each parameter once, separate operations a dozen times. But it ignores strides: where a
    gradient has other strides than its parameter the result is wrong, on the CPU without an error. And the last
    elements of a tensor can round differently from those in the middle.
    """
    for group in optimizer.param_groups:
        contiguous = all(p.stride() == torch.empty(p.shape, device="meta").stride() for p in group["params"])
        safe = plan.exact != "bitwise" and contiguous
        if group.get("fused") and not safe:
            group["fused"] = None
        is_open = group.get("fused") is None and group.get("foreach") is None and not group.get("differentiable")
        # A fused kernel computes in at least float32: of narrower types single operations round more.
        full_precision = all(p.dtype in (torch.float32, torch.float64) for p in group["params"])
        if safe and is_open and type(optimizer) in FUSED and full_precision:
            group["fused"] = True


def _check_eps(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UserError` where `eps`, which keeps Adam from dividing by zero, is 0 in the dtype of the weights."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        for dtype in {p.dtype for p in group["params"]} if isinstance(eps, float) and eps > 0 else ():
            if torch.tensor(eps, dtype=dtype) == 0:
                raise UserError(
                    f"optimizer {type(optimizer).__name__} with eps={eps:g}",
                    f"that is 0 in {str(dtype).removeprefix('torch.')}, the dtype of its weights",
                    "give it a larger eps, 1e-4 say, or use precision=float16 or pure-bfloat16",
                )


def _check_parameters(model: nn.Module) -> None:
    """Raises `UserError` for parameters that cannot be trained as they are."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            found, do = "it has no shape yet", "call the model once where it is built, or give its layers their sizes"
        elif parameter.is_complex():
            found, do = f"it is of {parameter.dtype}", "hold its parts as real numbers (torch.view_as_real)"
        elif has_accumulated_hooks(parameter):
            found = "it has a hook for its accumulated gradient, which would see one microbatch's"
            do = "change the loss instead, or clip by the job's clip_norm"
        else:
            continue
        raise UserError(f"training parameter {name}", found, do)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and (tensor.layout != torch.strided or tensor.is_nested):
            do = "register it with persistent=False if it is made anew each time, or keep its indices and values"
            raise UserError(f"keeping {name} of the model", f"it is of layout {tensor.layout}, not strided", do)
    if overlapping := find_overlapping(model):
        raise UserError(
            f"training parameter {overlapping[1]}",
            f"it shares memory with {overlapping[0]} and is another parameter, which would be stepped by itself",
            f"make it the same parameter ({overlapping[1]} = {overlapping[0]}), or give it a copy of the values",
        )


def refuse_gradient_hooks(model: nn.Module, plan: Plan, shared: Container[str] = ()) -> None:
    """Raises `PlanError` where hooks for gradients would be bypassed, or see what is no whole gradient.

    shared: names of the parameters that several stages hold.
    """
    split = plan.pipeline.active and splits_backward(plan.pipeline.schedule)
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter) and (split or name in shared or plan.offload == "parameters"):
            raise PlanError(
                f"plan {plan}",
                f"parameter {name} has a hook for its gradient, which no rank has whole",
                "change the loss instead, or use ddp, zero1 or zero2",
            )


def refuse_layouts(model: nn.Module, plan: Plan) -> None:
    """Raise `PlanError` for a buffer that is not strided, and for a packed weight that would be cut."""
    for name, one in model.named_buffers():
        if one.layout != torch.strided:
            raise PlanError(f"plan {plan}", f"buffer {name} is of layout {one.layout}", "keep it in an attribute")
    cuts = plan.data.zero_stage == 3 or plan.pipeline.active
    for name, one in model.named_parameters() if cuts else ():
        own = type(one).__module__.partition(".")[0] not in ("torch", "evenly")  # bitsandbytes' Params4bit, say
        if own and not (one.is_floating_point() or one.is_complex()):
            found = (
                f"parameter {name}, a {type(one).__name__} of {one.dtype}, is packed: its numbers are not its elements"
            )
            raise PlanError(f"plan {plan}", found, "use plan ddp, zero2 or tensor, which leave a frozen weight whole")


def check_same_start(model: nn.Module, world: World, init: ShardedInit | None = None) -> None:
    """Raises `RunError`, on all ranks alike, if a parameter or buffer, or their order, differs between ranks."""
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    offloaded = {name: None if init is None else init.fingerprint(t) for name, t in state.items()}
    mine = {name: fingerprint(t) if (known := offloaded[name]) is None else known for name, t in state.items()}
    order = [name for name, _ in model.named_parameters()]
    prints = gather_values({"the order of its parameters": order, **mine}, world.group("files"))
    for rank, theirs in enumerate(prints):
        for name in prints[0]:
            if theirs.get(name) != prints[0][name]:
                raise RunError(
                    "every rank must start from the same model",
                    f"{name} on rank {rank} differs from rank 0's",
                    "let the job's model draw from torch, random and numpy only, which are seeded",
                )


def call_job(field: str, function: Callable[[], T]) -> T:
    """Calls a function of the job; an exception becomes a `UserError` that names the field."""
    try:
        return function()
    except EvenlyError:
        raise
    except Exception as problem:
        raise UserError(f"calling the job's {field}", describe(problem), "run it by itself to find out") from problem


def expect_kind(field: str, value: Any, kind: type) -> None:
    """Raises `UserError` where a function of the job has returned a `value` of another kind."""
    if not isinstance(value, kind):
        raise UserError(
            f"the job's {field} must return a {kind.__module__}.{kind.__qualname__}",
            f"it returned a {type(value).__name__}",
            "return the object itself",
        )
