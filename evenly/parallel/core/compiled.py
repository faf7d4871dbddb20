"""Blocks, and large heads of awkward sizes, as compiled kernels, by `torch.compile`.

Kernels draw random numbers as the model's own operations do, so that masks are those of the plain run; sums are made in
another order, so results agree up to rounding. Which kernels run depends on the shapes that a rank has seen: a shape
that changes is compiled for any size from its second value on.

A forward of a block is one graph, or runs as it is written. So nothing of it has run where torch finds that it cannot
make one, and it may begin again. What the engine does around a block and in it stays out of the graph: what its code
sees of parameters is looked up before, layers with running statistics get their own before and are read after. While
one of the engine's modes watches functions of torch, blocks run as they are written.

Order: inside of what recomputes, before parameters are cut over ranks, whose hooks stay outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from evenly.errors import JobWarning, PlanError
from evenly.launcher.environment import cpp_compiler
from evenly.model.blocks import Block
from evenly.parallel.core.calls import Forward
from evenly.parallel.core.normalisation import Normalisation
from evenly.parallel.core.parameter_views import plain_dicts
from evenly.parallel.core.statistics import RunningStatistics
from evenly.torch_private import as_one_graph, function_modes, graph_errors, has_hooks

BACKEND: Any = "inductor"
ALIGNED = 8  # a size of which a GPU's fast kernels for 16 bits want a multiple
LARGE = 1 << 20  # numbers of a weight
MOST_LETTERS = 200  # of torch's reasons


def check_compilable(device: str) -> None:
    """Raises `PlanError` where compiled blocks would not run here."""
    missing = None
    if device == "cpu" and cpp_compiler() is None:
        missing = "a C++ compiler (g++, or what CXX names)"
    elif device != "cpu" and find_spec("triton") is None:
        missing = "triton"
    if missing is not None:
        raise PlanError("compile=blocks", f"{missing} is not installed", "install it, or leave out compile=blocks")


def unaligned_products(model: nn.Module, blocks: Sequence[Block], *, device: str, precision: str) -> list[Block]:
    """Large linear layers outside of the blocks, such as a head of 50257 tokens, that a GPU is slow to multiply by.

    Products of 16 bits whose sizes are no multiple of 8 run several times slower there, and torch's compiler pads them.
    """
    if device == "cpu" or not precision.endswith("16"):
        return []
    inside = {id(part) for block in blocks for part in block.module.modules()}
    return [
        Block(name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) not in inside and module.weight.numel() >= LARGE
        if module.in_features % ALIGNED or module.out_features % ALIGNED
    ]


class Compiler:
    """Compiles forwards of the blocks of a model, with `statistics` of it, when they are first called.

    each_size: whether every size gets a graph of its own, so that a forward that is repeated runs the same graph
    whatever ran in between. warns: whether this rank says which blocks run as they are written, one of each class.
    hindrance: why all have to, if they do.
    """

    def __init__(
        self, statistics: RunningStatistics, *, each_size: bool = False, warns: bool = True, hindrance: str = ""
    ) -> None:
        self._statistics, self._warns, self._hindrance = statistics, warns, hindrance
        self._how: dict[str, Any] = {"backend": BACKEND, "dynamic": False if each_size else None}
        if BACKEND == "inductor":
            self._how["options"] = {"fallback_random": True}
        self._warned: set[type] = set()

    def change(self, block: Block, forward: Forward) -> Forward:
        """What runs in place of `forward` of `block`."""
        kind = type(block.module)
        if self._hindrance:
            self.warn(block.name, kind, self._hindrance)
            return forward
        layers: list[Normalisation] = []
        for rule in self._statistics.rules_in(block.module):
            if not isinstance(rule, Normalisation) or not rule.prepare_graphs():
                self.warn(
                    block.name, kind, f"layer {rule.name} changes its buffers in a way that a graph would not hand on"
                )
                return forward
            layers.append(rule)
        return CompiledForward(block, forward, torch.compile(forward, **self._how), layers, self)

    def warn(self, name: str, kind: type, reason: str) -> None:
        """Says that the block `name`, of class `kind`, runs as it is written; once for each class."""
        if not self._warns or kind in self._warned:
            return
        self._warned.add(kind)
        code: Any = getattr(getattr(kind, "forward", None), "__code__", None)
        where = (code.co_filename, code.co_firstlineno) if code is not None else ("job", 0)
        text = f"compile=blocks: block {name}, of class {kind.__name__}, runs as it is written: {reason}"
        warnings.warn_explicit(text, JobWarning, *where)


class CompiledForward:
    """The `forward` of `block`, and `compiled`, what torch.compile makes of it.

    layers: those of the block that keep running statistics.
    """

    def __init__(
        self, block: Block, forward: Forward, compiled: Forward, layers: Sequence[Normalisation], compiler: Compiler
    ) -> None:
        self._forward, self._compiled, self._layers = forward, compiled, layers
        self._warn = partial(compiler.warn, block.name, type(block.module))  # `fully_shard` changes the class
        self._modules: list[nn.Module] = [*block.module.modules()]
        self._errors = graph_errors()
        self._has_graphs = False
        self._makes_graphs = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self._has_graphs or self._makes_graphs) or self._is_watched():
            return self._forward(*args, **kwargs)
        try:
            with self._outside_of_graph(), as_one_graph() if self._makes_graphs else _with_known_graphs():
                result = self._compiled(*args, **kwargs)
        except self._errors as problem:
            self._makes_graphs = False
            self._warn(" ".join(str(problem).split())[:MOST_LETTERS])
            return self._forward(*args, **kwargs)
        self._has_graphs = True
        return result

    def _is_watched(self) -> bool:
        if any(has_hooks(module) for module in self._modules[1:]):  # those of the block itself run around its forward
            self._warn("there are hooks in it, of which torch's graphs know those of one block")
            return True
        return any(type(mode).__module__.startswith("evenly.") for mode in function_modes())

    @contextmanager
    def _outside_of_graph(self) -> Generator[None]:
        for layer in self._layers:
            layer.begin_graph()
        try:
            with plain_dicts(self._modules):
                yield
        finally:
            for layer in self._layers:
                layer.end_graph()


def _with_known_graphs() -> Any:
    return torch.compiler.set_stance("eager_on_recompile")
