"""What an optimizer asks of DTensors, or draws for them, is that of whole tensors.

torch's DTensors know operations that give tensors. A number asked of one (`.item()`) would be that of this rank's part,
and random numbers would be drawn for the part. Within `WholeNumbers` both are those of the whole, the same on all ranks
that run the same code from the same random stream. Tensors of the code's own are taken as whole.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from evenly.data.alone import all_ranks
from evenly.data.nest import map_tensors, tensors_in
from evenly.torch_private import NUMBERS_OF_TENSORS, TorchDispatchMode


class WholeNumbers(TorchDispatchMode):
    """A context manager, on all ranks that hold parts of the same tensors."""

    def __enter__(self) -> WholeNumbers:
        self._inner = ExitStack()
        self._inner.enter_context(implicit_replication())
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._inner.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = [one for one in tensors_in((args, kwargs)) if isinstance(one, DTensor)]
        if not parts or not (func in NUMBERS_OF_TENSORS or torch.Tag.nondeterministic_seeded in func.tags):
            return func(*args, **kwargs)
        result = func(*map_tensors(_full, args), **map_tensors(_full, kwargs))
        with all_ranks():
            cut = map_tensors(partial(_cut_as, parts[0]), result)
        return args[0].copy_(cut) if func.overloadpacket.__name__.endswith("_") else cut


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _cut_as(like: Any, drawn: torch.Tensor) -> torch.Tensor:
    """`drawn` cut over the ranks as `like` is, if it is of its shape."""
    if drawn.shape != like.shape:
        return drawn
    return distribute_tensor(drawn, like.device_mesh, like.placements, src_data_rank=None)
