"""Parameters that several stages share: their gradients are summed over the ranks that hold them.

They are summed after the data axis has reduced and sharded them, so that ranks exchange only what they step, and in
rank order, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from evenly.comm.collectives import recv, send
from evenly.comm.groups import Group
from evenly.comm.transport import Pending


class Ties:
    """The tied parameters of a model over `group`, the pipeline axis.

    owners: name of a parameter -> the positions of the ranks that hold it, ascending; those with several are summed.
    """

    def __init__(self, owners: Mapping[str, Sequence[int]], group: Group) -> None:
        self._group = group
        self._owners = {name: [*ranks] for name, ranks in sorted(owners.items()) if len(ranks) > 1}

    @property
    def names(self) -> list[str]:
        return [*self._owners]

    @property
    def everywhere(self) -> list[str]:
        return [name for name, ranks in self._owners.items() if len(ranks) == self._group.size]

    @property
    def counted_elsewhere(self) -> set[str]:
        mine = self._group.position
        return {name for name, ranks in self._owners.items() if mine in ranks[1:]}

    def flags(self, used: Iterable[str]) -> list[float]:
        """1 for each of `names` that this rank used, else 0."""
        found = set(used)
        return [float(name in found) for name in self._owners]

    def used(self, flags: Iterable[float]) -> set[str]:
        return {name for name, flag in zip(self._owners, flags, strict=True) if flag > 0}

    @torch.no_grad()
    def sum(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Sums each tied gradient, by name, over the ranks that hold it, in place."""
        mine, by_name = self._group.position, dict(gradients)
        for number, (name, ranks) in enumerate(self._owners.items()):
            gradient = by_name.get(name)
            if mine not in ranks or gradient is None:
                continue
            received: dict[int, Pending[torch.Tensor]] = {}
            for rank in ranks:
                if rank != mine:
                    buffer = torch.empty_like(gradient, memory_format=torch.contiguous_format)
                    received[rank] = recv.begin(buffer, rank, self._group, tag=number)
            # After what comes, as in `transport.post_exchange`: both ways of a network are used at the same time.
            sent = [send.begin(gradient, rank, self._group, tag=number) for rank in received]
            # All add in the order of ranks, so that all have the same bits.
            parts = [gradient if rank == mine else received[rank].wait() for rank in ranks]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            for pending in sent:
                pending.wait()
            gradient.copy_(total)
