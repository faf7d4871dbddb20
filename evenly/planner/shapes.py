"""A known shape as a cost source of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from evenly.hardware.devices import Device
from evenly.job import Precision
from evenly.model.parts import ModelCosts
from evenly.plan import Plan
from evenly.planner.footprint import footprints
from evenly.planner.prediction import MemoryByCause
from evenly.planner.shape import Shape
from evenly.planner.speeds import Library
from evenly.planner.training_config import TrainingConfig
from evenly.planner.transformer import Kernels, Split, transformer_parts


@dataclass(frozen=True)
class ShapeSource:
    """Implements `CostSource`."""

    shape: Shape
    kernels: Kernels = field(default_factory=Kernels)
    note: str = ""

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def blocks(self) -> int:
        return self.shape.layers + self.shape.encoder_layers

    @property
    def sequence(self) -> int | None:
        """Tokens; patches of an image are no sequence that anyone counts."""
        return self.shape.sequence if self.shape.vocab else None

    @property
    def precision(self) -> Precision:
        return "float16" if self.note else "bfloat16"

    @property
    def microbatch(self) -> int | None:
        return None

    def loads(self, replicas: int, *, filled: bool) -> tuple[()]:
        """None: all are alike."""
        return ()

    def on(self, device: Device) -> ShapeSource:
        """Return it in float16, with a note, where such devices have no units for bfloat16."""
        lacks = "bfloat16" not in device.flops and "float16" in device.flops
        return replace(
            self, note=f"a {device.name} has no bfloat16: precision=float16 where none is stated" if lacks else ""
        )

    @property
    def is_run(self) -> bool:
        return False

    def tensor_sizes(self, most: int) -> Sequence[int]:
        shape = self.shape
        widths = (shape.heads, shape.kv_heads, shape.expert_ffn or shape.ffn)
        return [size for size in range(1, most + 1) if not any(width % size for width in widths)]

    def refusal(self, plan: Plan) -> str | None:
        """Experts are found by their tokens' numbers, which a stage that lacks them has not."""
        if self.shape.experts > 1 and plan.pipeline.active:
            return "a block whose experts depend on numbers is not cut into stages"
        return None

    def layers(self, plan: Plan, device: Device) -> None:
        """Nobody runs a shape: the cost model cuts it."""

    def parts(self, plan: Plan, config: TrainingConfig) -> ModelCosts:
        """Its parts; computed once for equal configs."""
        # Patches of an image are as many as its shape says, whatever counts as tokens.
        seen = config if self.shape.vocab else replace(config, sequence=self.shape.sequence)
        return _parts(self.shape, self.split(seen), self.kernels)

    def split(self, config: TrainingConfig) -> Split:
        return split_of(config)

    def least_parts(self, plan: Plan, config: TrainingConfig) -> ModelCosts | None:
        """None: its parts are there at once."""
        return None

    def memory(
        self, plan: Plan, config: TrainingConfig, layers: Sequence[int], library: Library, ranks: Sequence[int] = ()
    ) -> list[MemoryByCause]:
        """By what the library holds in memory."""
        return footprints(self.parts(plan, config), layers, config, library.holdings, ranks)


def split_of(config: TrainingConfig) -> Split:
    return Split(
        samples=config.microbatch,
        sequence=config.sequence,
        tensor=config.tensor,
        split_sequence=config.split_sequence,
        dtype=config.dtype,
        element_bytes=4 if config.dtype == "float32" else 8 if config.dtype == "float64" else 2,
    )


@lru_cache(maxsize=512)
def _parts(shape: Shape, split: Split, kernels: Kernels) -> ModelCosts:
    return transformer_parts(shape, split, kernels)
