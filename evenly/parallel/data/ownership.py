"""Which of a model's parameters a rank has, and the norm of the gradients of all ranks together."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch

from evenly.comm.collectives import all_reduce
from evenly.comm.groups import Group
from evenly.comm.host_numbers import on_device
from evenly.parallel.data.squares import sum_of_squares


def norm_of_shards(gradients: Iterable[torch.Tensor], group: Group) -> torch.Tensor:
    """Norm of the `gradients` of all ranks of `group`, each with its own shards; a scalar in float64."""
    squares = sum_of_squares(gradients).to(group.device)
    return all_reduce(squares, group, label="norm of the gradient").sqrt()


@dataclass(frozen=True)
class Ownership:
    """Which of a model's parameters this rank has, and whole or in part.

    split_names, tensor_group: parameters that are split over `tensor_group`; it replicates all others.
    pipeline_group:    ranks that hold the other stages' parameters; None without pipeline.
    counted_elsewhere: tied parameters whose gradient another rank of `pipeline_group` counts in the norm.
    """

    split_names: Container[str] = ()
    tensor_group: Group | None = None
    pipeline_group: Group | None = None
    counted_elsewhere: Container[str] = ()

    def counts_all(self, names: Iterable[str]) -> bool:
        """Whether this rank has all of these parameters whole, and counts them in the norm."""
        return not any(name in self.split_names or name in self.counted_elsewhere for name in names)

    def norm(
        self, gradients: Iterable[tuple[str, torch.Tensor | None]], shard_group: Group | None = None
    ) -> torch.Tensor:
        """Norm of the gradients of the full parameters; a scalar in float64.

        gradients: this rank's, by name. shard_group: the ranks that they are sharded over, if they are.
        """
        found = [(name, g) for name, g in gradients if g is not None and name not in self.counted_elsewhere]
        sums = [sum_of_squares(g for name, g in found if (name in self.split_names) is part) for part in (True, False)]
        where = next((g.device for _, g in found), sums[0].device)  # a sum of nothing is on the CPU
        squares = torch.stack([on_device(one, where) for one in sums])
        if shard_group is not None:
            squares = all_reduce(squares.to(shard_group.device), shard_group, label="norm of the gradient")
        if (group := self.tensor_group) is not None:
            squares = squares.to(group.device, copy=True)
            if group.position > 0:  # replicated gradients count once
                squares[1].zero_()  # what is assigned is copied from the host, which waits for the GPU
            squares = all_reduce(squares, group, label="norm of the gradient")
        total = squares.sum()
        if (group := self.pipeline_group) is not None:
            total = all_reduce(total.to(group.device, copy=True), group, label="norm of the gradient")
        return total.sqrt()
