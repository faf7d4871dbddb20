"""Whether all ranks have made the same samples, which each of them takes its share of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from evenly.comm.collectives import gather_values
from evenly.comm.groups import Group
from evenly.errors import UserError
from evenly.parallel.core.mutation_guard import fingerprint


def check_same_samples(samples: Sequence[Any], group: Group) -> None:
    """Raises `UserError`, on all ranks alike, where a rank of `group` has others, or there are none; a collective."""
    ranks = gather_values([sample_print(one) for one in samples], group)
    if not any(ranks):
        raise UserError("run.batch(samples)", "there are no samples", "give it at least one")
    for rank, mine in enumerate(ranks):
        if mine == ranks[0]:
            continue
        same = zip(mine, ranks[0], strict=False)
        first = next((n for n, (a, b) in enumerate(same) if a != b), min(len(mine), len(ranks[0])))
        raise UserError(
            "run.batch(samples) of the same samples on all ranks",
            f"sample {first} on rank {rank} differs from rank 0's ({len(mine)} samples and {len(ranks[0])})",
            "draw them within run.whole_model() or in a hook, where all ranks draw the same",
        )


def sample_print(value: Any) -> int:
    """A number that depends on all tensors, arrays, numbers and texts in a sample; of other objects on their type."""
    digest = blake2b(digest_size=8)
    _add(value, digest)
    return int.from_bytes(digest.digest(), "little")


def _add(value: Any, digest: Any) -> None:
    if isinstance(value, torch.Tensor):
        parts: Any = (tuple(value.shape), str(value.dtype), fingerprint(value))
    elif isinstance(value, np.ndarray):
        parts = (value.shape, str(value.dtype), value.tobytes())
    elif isinstance(value, str | bytes | int | float | complex | bool | np.generic | None):
        parts = (type(value).__name__, value)
    else:
        parts = type(value).__name__
    digest.update(repr(parts).encode())
    if isinstance(value, Mapping):
        for key, one in value.items():  # pyright: ignore[reportUnknownVariableType]
            _add(key, digest)
            _add(one, digest)
    elif isinstance(value, list | tuple):
        for one in value:  # pyright: ignore[reportUnknownVariableType]
            _add(one, digest)
