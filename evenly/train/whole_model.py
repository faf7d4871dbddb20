"""The whole model on one device, whatever the plan: a module of the job's own class, to generate or draw samples with.

It is built by the job as the run's was, and filled tensor by tensor: a rank holds no more of what others have than one
full tensor at a time, and the module itself where it asked for it. Nothing of the engine is in it, and nothing that is
done to it comes back.

What is drawn within follows from the job's seed, the number of steps done and how often it was asked for since: the
same on all ranks. In a hook it is what the hook draws.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from evenly.comm.collectives import broadcast, gather_values
from evenly.data.generators import seeded, undisturbed_past_torch
from evenly.data.stream import stream_key
from evenly.engine.build import build_model
from evenly.errors import RunError, UserError
from evenly.parallel.core.memory import local
from evenly.torch_private import plain_name, without_subclasses

if TYPE_CHECKING:
    from evenly.parallel.pipeline.pipeline import Pipeline
    from evenly.train.run import Run


@contextmanager
def whole_model(run: Run, *, main_only: bool, device: str | None) -> Generator[nn.Module | None]:
    """The model of `run` after the steps done, in evaluation mode on `device`; a collective.

    main_only: whether the first rank alone gets it; the others get None, and wait for it at the end.
    """
    device = device or run.world.device
    model = None
    if run.world.is_main or not main_only:
        job = replace(run.job, model=lambda: _another(run.job.model(), run.model))
        with undisturbed_past_torch():
            model = build_model(job, precision=run.plan.precision, device=device)
    _fill(run, model)
    if model is not None:
        model.eval()  # after it is filled: eval() of a module may compute with its weights
    with nullcontext() if run.hooks.running else _drawing(run, device):
        yield model
    if main_only:
        gather_values(None, run.world.group("world"))


@contextmanager
def _drawing(run: Run, device: str) -> Generator[None]:
    """Within, all ranks draw the same."""
    key = stream_key(run.job.seed, "whole model", run.steps_done, run.wholes_made)
    run.wholes_made += 1
    with undisturbed_past_torch(), seeded(key, device):
        yield


def _fill(run: Run, model: nn.Module | None) -> None:
    """Copies the full tensors of all ranks into `model`."""
    targets = {} if model is None else dict(_named_tensors(model))
    with run.inside(), _evaluating(run), torch.no_grad():
        for name, whole in whole_tensors(run):
            if model is not None and (target := targets.pop(name, None)) is not None:
                with without_subclasses():
                    target.detach().copy_(whole)
            del whole
    if targets:
        raise UserError(
            "run.whole_model()",
            f"the job's model has built {min(targets)}, which the run's model has not",
            "let the job's model build the same module each time",
        )


def _evaluating(run: Run) -> AbstractContextManager[None]:
    """Within, the weights are those of evaluations; of an average they are."""
    averaged = run.weight_average is not None and run.weight_average.is_in_model
    return nullcontext() if averaged else run.updaters.evaluating()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    named = chain(model.named_parameters(), model.named_buffers())
    return ((plain_name(name), tensor) for name, tensor in named)


def whole_tensors(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter and buffer in full, tied ones once; a collective for each that no rank has alone."""
    pipeline = run.composed.pipeline
    if pipeline is not None:
        yield from _of_all_stages(run, pipeline)
        return
    for name, tensor in _named_tensors(run.model):
        yield name, run.composed.full_view(name, tensor)


def _of_all_stages(run: Run, pipeline: Pipeline) -> Iterator[tuple[str, torch.Tensor]]:
    own = dict(_named_tensors(run.model))
    own = {name: tensor for name, tensor in own.items() if name not in pipeline.placeholders}
    holders = gather_values([*own], pipeline.group)
    for name in dict.fromkeys(chain.from_iterable(holders)):
        position = next(place for place, names in enumerate(holders) if name in names)
        yield name, broadcast(_target(run, name, own.get(name), pipeline), position, pipeline.group)


def _target(run: Run, name: str, own: torch.Tensor | None, pipeline: Pipeline) -> torch.Tensor:
    """A full tensor, that of this rank if it has one; broadcasting replaces it, so a parameter itself is copied."""
    if own is None:
        return torch.empty_like(pipeline.placeholders[name], device=run.world.device).detach()
    with without_subclasses():
        whole = run.composed.full_view(name, own).detach().to(run.world.device)
        return whole.clone() if whole.data_ptr() == local(own).data_ptr() else whole


def _another(model: nn.Module, trained: nn.Module) -> nn.Module:
    """`model`, which the job has built. Raises `UserError` where it is built of what is being trained."""
    known = {id(module) for module in trained.modules()}
    if any(id(module) in known for module in model.modules()):
        raise UserError(
            "run.whole_model()",
            "the job's `model` returns the same module each time, which is being trained",
            "let it build a new module each time it is called",
        )
    return model


@contextmanager
def whole_parameters(run: Run) -> Generator[None]:
    """Have whole parameters of `run` within; between steps they are whole already."""
    if not run.composed.outside.shown or run.composed.outside.stepping:
        raise RunError(
            "run.whole_parameters()",
            "a step or an evaluation is under way, in which each rank computes with what it has of parameters",
            "enter it between steps: in a hook (on_step), or after run.step(batch) in a loop of your own",
        )
    composed, wholes = run.composed, run.composed.outside.wholes
    gathers = not wholes and (composed.in_step or composed.tensor is not None)
    with torch.no_grad(), without_subclasses():
        for name, p in run.model.named_parameters() if gathers else ():
            wholes[wholes.form(local(p))] = composed.full_view(name, p)
    try:
        yield
    finally:
        if gathers:
            wholes.clear()
