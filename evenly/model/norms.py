"""Normalisation layers, and which of them keep statistics of what they have seen."""

from __future__ import annotations

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS + INSTANCE_NORMS) and module.running_mean is not None
