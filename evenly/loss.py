"""What a job's loss function returns: a sum, and what the sums of all microbatches are divided by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

UNDIVIDED = -(2.0**60)  # in the place of the weight of a sum: no weight is negative


@dataclass(frozen=True)
class Loss:
    """The loss of one microbatch as a sum, never as a mean.

    total:  scalar tensor, the sum of the losses of everything that counts in the microbatch.
    weight: number or scalar tensor, how much counts (samples, tokens). The loss of a step is
            sum(total) / sum(weight) over all microbatches of all ranks.
    metrics: further figures by name, each a pair of numbers or scalar tensors: a sum, and the count that it is divided
            by. That of a step or an evaluation is sum(sums) / sum(counts), as of the loss. All microbatches have the
            same names. No gradient flows.
    outputs: in an evaluation, what `Job.evaluate` needs of every sample: a nest of tuples, mappings and dataclasses
            with tensors whose first dim is the samples of the microbatch, and lists of one item per sample.
    """

    total: torch.Tensor
    weight: torch.Tensor | float
    metrics: Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]] = dataclasses.field(
        default_factory=dict[str, "tuple[torch.Tensor | float, torch.Tensor | float]"]
    )
    outputs: Any = None

    @property
    def added_weight(self) -> torch.Tensor | float:
        """The weight where it adds up over microbatches, else 0."""
        return 0.0 if isinstance(self.weight, float) and self.weight == UNDIVIDED else self.weight


@dataclass(frozen=True)
class Sum(Loss):
    """The loss of one microbatch where that of a step or an evaluation is the sum over all, and is not divided.

    Its fields are those of `Loss`, without the weight.
    """

    weight: float = dataclasses.field(default=UNDIVIDED, init=False)


@dataclass(frozen=True)
class JointLoss:
    """The losses of several phases, added: what is traced of a step that has them all."""

    losses: Sequence[Callable[[Any, Any], Any]]

    def __call__(self, model: Any, batch: Any) -> Loss:
        found = [loss(model, batch) for loss in self.losses]
        return Loss(sum(one.total if isinstance(one, Loss) else one for one in found), 1.0)  # pyright: ignore
