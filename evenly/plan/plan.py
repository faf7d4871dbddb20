"""How a run is split, with nothing left open. Made by `PlanSpec.complete`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from evenly.errors import PlanError
from evenly.job import Precision
from evenly.plan.axes import DataAxis, DeviceReplicas, PipelineAxis, TensorAxis
from evenly.plan.schedule import splits_backward

Exact = Literal["bitwise", "rounding"]
Recompute = Literal["none", "selective", "full"]
Compile = Literal["off", "blocks"]
Offload = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan that runs.

    data, tensor, pipeline: the axes of the device mesh. replicas: devices that share one process instead.
    microbatch: samples of one forward pass; None where the job itself cuts its batches, by its own size or by cost.
    recompute:  which activations of the model's blocks the backward pass computes again: "none", "selective" all but
                those of matrix products and attention, "full" all.
    compile:    "blocks" runs the model's blocks as kernels of torch.compile, "off" as they are written.
    offload:    what is stored in the host's memory next to a GPU: "none"; "optimizer" its state, and the update is
                computed there; "parameters" those too, one block of them on the GPU at a time.
    precision:  of the forward and backward pass.
    exact:      "bitwise" adds gradients exactly, so that training has the same bits on any number of ranks;
                "rounding" adds them in their own type, and plans agree up to rounding.

    Raises `PlanError` where no wider type or no fixed order of additions exists that "bitwise" needs.
    """

    data: DataAxis
    tensor: TensorAxis
    pipeline: PipelineAxis
    replicas: DeviceReplicas
    microbatch: int | None
    recompute: Recompute
    compile: Compile
    offload: Offload
    precision: Precision
    exact: Exact

    def __post_init__(self) -> None:
        if self.exact == "bitwise" and (found := self._not_bitwise()):
            problem, remedy = found
            raise PlanError(f"plan {self}", problem, f"use exact=rounding, or {remedy}")

    def _not_bitwise(self) -> tuple[str, str] | None:
        """Why ranks cannot agree bit by bit, and what to do besides exact=rounding; None where they can."""
        if self.precision == "float64":
            return (
                "bitwise equality adds gradients in a wider type, and float64 has none",
                "precision=float32 (verify: --dtype float32); with exact=rounding plans agree to about 1e-12",
            )
        if self.precision.startswith("pure-") and self.data.zero_stage:
            return (
                "torch's kernels round the last elements of a 16-bit tensor in another way, and shards end elsewhere",
                "plan ddp, or precision=bfloat16, which updates float32 weights",
            )
        if self.tensor.active:
            return (
                "sums within the model are made of as many parts as there are ranks on the tensor axis",
                "a plan without the tensor axis",
            )
        if self.pipeline.active:
            return (
                "gradients of what several stages share are added up in the order of the stages",
                "a plan without pipeline",
            )
        if self.compile == "blocks":
            return (
                "which kernels a rank has compiled depends on the shapes that it has seen, and so do the last bits",
                "leave out compile=blocks",
            )
        return None

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis of the device mesh, outermost first."""
        # Neighbours on the tensor axis communicate most, those on the pipeline axis least.
        axes = {"pipeline": self.pipeline.size} if self.pipeline.active else {}
        axes["data"] = self.data.size
        return {**axes, "tensor": self.tensor.size} if self.tensor.active else axes

    @property
    def ranks(self) -> int:
        """World size: the product of the axes."""
        return math.prod(self.axes.values())

    @property
    def splits_backward(self) -> bool:
        """Whether a stage's backward runs in two parts; not with recomputation, which both would do, nor of compiled
        blocks, whose backward is one function.
        """
        whole = self.recompute != "none" or self.compile == "blocks"
        return self.pipeline.active and splits_backward(self.pipeline.schedule) and not whole

    @property
    def sums_locally(self) -> bool:
        """Whether autograd adds up the gradients of a step by itself, since no other rank or replica adds to them."""
        alone = self.data.size == 1 and self.replicas.count == 1 and not self.data.zero_stage
        return alone and self.exact != "bitwise" and not self.splits_backward

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all parameters, and all of the optimizer's state with them."""
        return not (self.data.zero_stage or self.tensor.active or self.pipeline.active or self.offload != "none")

    @property
    def devices(self) -> int:
        """Devices that the plan uses, over ranks and replicas."""
        return self.ranks * self.replicas.count

    @property
    def words(self) -> dict[str, Any]:
        """Keys and values of the plan's text, defaults left out but for those that decide the numbers."""
        axes = (self.data, self.tensor, self.pipeline, self.replicas)
        found = {key: value for axis in axes for key, value in axis.words()}
        if self.microbatch is not None:
            found["microbatch"] = self.microbatch
        options = {"recompute": self.recompute, "compile": self.compile, "offload": self.offload}
        found |= {key: value for key, value in options.items() if value not in ("none", "off")}
        return {**found, "precision": self.precision, "exact": self.exact}

    def with_stages(self, blocks: Sequence[int]) -> Plan:
        """The same with so many blocks in each stage of the pipeline."""
        return replace(self, pipeline=replace(self.pipeline, split_points=tuple(accumulate(blocks[:-1]))))

    def with_speeds(self, speeds: Sequence[float]) -> Plan:
        """The same with shares by these speeds of the ranks of the data axis; even ones where all are equal."""
        return replace(self, data=replace(self.data, speeds=tuple(speeds) if len({*speeds}) > 1 else ()))

    def __str__(self) -> str:
        return " ".join(f"{key}={in_words(value)}" for key, value in self.words.items())


def in_words(value: Any) -> str:
    """A value as a plan's text has it: tuples with | between their elements, true and false as on and off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "|".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
