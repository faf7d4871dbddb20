"""Whether a model computes in a narrower type than it is asked to, as norms that are written for 16-bit weights do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evenly.torch_private import TO_COPY, TorchDispatchMode


class DowncastWatch(TorchDispatchMode):
    """A context manager; `found` names the type that float64 numbers were turned into within, empty for none."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs `func`, and looks at what becomes of float64."""
        result = func(*args, **(kwargs or {}))
        converts = func is TO_COPY.default and args[0].dtype == torch.float64
        if converts and result.dtype.is_floating_point and result.dtype != torch.float64:
            self.found = str(result.dtype).removeprefix("torch.")
        return result
