"""Names of torch that changed between its releases, each behind one name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# Renamed in torch 2.13, which warns about the older name.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
