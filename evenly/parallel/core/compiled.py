"""Blocks as compiled kernels, by `torch.compile`.

Kernels draw random numbers as the model's own operations do, so that masks are those of the plain run; sums are made in
another order, so results agree up to rounding. Which kernels run depends on the shapes that a rank has seen: a shape
that changes is compiled for any size from its second value on.

Order: around what recomputes, so that one graph holds both passes; before parameters are cut over ranks, whose hooks
stay outside.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from evenly.errors import PlanError
from evenly.launcher.environment import cpp_compiler
from evenly.model.blocks import find_blocks
from evenly.parallel.core.calls import Forward
from evenly.parallel.core.statistics import rules_of

BACKEND = "inductor"


def compiling(forward: Forward) -> Forward:
    """`forward`, compiled when it is first called."""
    # torch looks at the gradients of what goes into a block, and warns that there are none.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    how: dict[str, Any] = {"options": {"fallback_random": True}} if BACKEND == "inductor" else {}
    return torch.compile(forward, backend=BACKEND, **how)


def check_compilable(model: nn.Module, device: str) -> None:
    """Raises `PlanError` where compiled blocks would not run here, or would lose what a layer keeps."""
    missing = None
    if device == "cpu" and cpp_compiler() is None:
        missing = "a C++ compiler (g++, or what CXX names)"
    elif device != "cpu" and find_spec("triton") is None:
        missing = "triton"
    if missing is not None:
        raise PlanError("compile=blocks", f"{missing} is not installed", "install it, or leave out compile=blocks")
    for block in find_blocks(model):
        for rule in rules_of(block.module):
            raise PlanError(
                "compile=blocks",
                f"layer {block.name}.{rule.name} keeps running statistics, which a compiled block would not hand on",
                "leave out compile=blocks",
            )
