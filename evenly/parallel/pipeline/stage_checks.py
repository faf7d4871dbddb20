"""What a model does that no cut into stages could keep: refused before anything is run."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

from torch import nn

from evenly.data.nest import tensors_in
from evenly.errors import PlanError
from evenly.parallel.core.parameter_views import local_tensor
from evenly.parallel.core.statistics import rules_of
from evenly.parallel.pipeline.model import StagedModel
from evenly.parallel.pipeline.remote_tensor import OTHER_PLAN, RUNNING_STAGE
from evenly.torch_private import TensorDict, has_hooks_for_all_ends, memory_key, renewed_attributes, tensor_dict


def check_can_be_staged(model: StagedModel) -> None:
    """Raises `PlanError` for code that would use other stages' parameters, and for hooks that no stage could run."""
    names = {memory_key(tensor): stage_tensor.name for tensor, stage_tensor in model.local_tensors()}
    for name, module in model.model.named_modules():
        known = {*get_args(TensorDict), *renewed_attributes(module)}
        for attribute, value in vars(module).items():
            found = () if attribute in known else tensors_in(value)
            if name_of := next((names[memory_key(tensor)] for tensor in found if memory_key(tensor) in names), None):
                raise PlanError(
                    RUNNING_STAGE,
                    f"{name or 'the model'} ({type(module).__name__}) keeps {name_of} in {attribute} too, "
                    "where stages that do not hold it would find it",
                    f"find it by its own name where it is used, or {OTHER_PLAN}",
                )
    blocks = {id(block.module) for block in model.blocks}
    for name, module in model.model.named_modules():
        holds_blocks = id(module) not in blocks and any(id(part) in blocks for part in module.modules())
        if holds_blocks and has_hooks_for_all_ends(module):
            raise PlanError(
                RUNNING_STAGE,
                f"{name or 'the model'} ({type(module).__name__}) has a backward hook, or a forward hook with "
                "always_call, and its blocks may lie on several stages",
                f"put it on the blocks or on what they consist of, or {OTHER_PLAN}",
            )


def check_rules_of_buffers(model: nn.Module, owners: Mapping[str, Sequence[int]]) -> None:
    """Raises `PlanError` where several stages would change buffers of one layer, each by its own calls only.

    owners: name of a buffer -> the stages that use it.
    """
    for rule in rules_of(model):
        for name in (f"{rule.name}.{buffer}".lstrip(".") for buffer in rule.buffers):
            if rule.module.training and len(owners.get(name, ())) > 1:
                stages = ", ".join(map(str, owners[name]))
                raise PlanError(
                    RUNNING_STAGE,
                    f"{rule.name} ({type(rule.module).__name__}) is called by stages {stages}, and each would change "
                    f"{name} by its own calls",
                    f"call it in one stage (split_points=), or {OTHER_PLAN}",
                )


@contextmanager
def same_modules(model: nn.Module) -> Generator[None]:
    """Raises `PlanError` where what runs within replaces modules or takes parameters out: no later forward is alike."""
    before = {name: id(module) for name, module in model.named_modules()}
    held = [(name, module, own) for name, module in model.named_modules() for own in tensor_dict(module, "_parameters")]
    yield
    taken = [f"{name}.{own}" for name, module, own in held if own not in tensor_dict(module, "_parameters")]
    if taken:
        raise PlanError(
            RUNNING_STAGE,
            f"its forward takes the parameter {taken[0]} out of its module (a parametrization within the forward?), "
            "which a stage that does not hold it cannot do",
            f"register the parametrization in the model's builder, or {OTHER_PLAN}",
        )
    after = {name: id(module) for name, module in model.named_modules()}
    if changed := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        raise PlanError(
            RUNNING_STAGE,
            f"its first forward replaces or adds modules ({changed[0]}), and draws for them once",
            f"let the model be from the start as it stays (a setting, or one forward in its builder), or {OTHER_PLAN}",
        )


@contextmanager
def buffers_kept(model: nn.Module) -> Generator[None]:
    """Gives modules back the buffers in whose place code within has put others, which have no numbers of the job."""
    before = [
        (module, name, local_tensor(module, name))
        for module in model.modules()
        for name in tensor_dict(module, "_buffers")
    ]
    try:
        yield
    finally:
        for module, name, buffer in before:
            if local_tensor(module, name) is not buffer:
                tensor_dict(module, "_buffers")[name] = buffer
