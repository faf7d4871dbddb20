"""Numbers of the host on the way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(
    numbers: Sequence[float] | torch.Tensor, device: torch.device | str, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """`numbers` as a 1D tensor on `device`; the host does not wait until a GPU has them.

    A GPU copies memory that is page-locked by itself. Of any other torch waits for all that the GPU has yet to do.
    """
    found = torch.as_tensor(numbers, dtype=dtype)
    if found.device.type == "cpu" and torch.device(device).type == "cuda":
        return found.pin_memory().to(device, non_blocking=True)
    return found.to(device)
