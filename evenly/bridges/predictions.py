"""Predictions and labels of an evaluation: by sample on the ranks, in the end the padded arrays of `EvalPrediction`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

PADDING = -100  # as transformers pads what it gathers


def samples_of(nest: Any) -> Any:
    """A nest of tensors of a microbatch, with a list of one tensor per sample in place of each."""
    if isinstance(nest, torch.Tensor):
        return [*nest.detach().unbind()]
    if isinstance(nest, Mapping):
        return {key: samples_of(value) for key, value in nest.items()}
    return tuple(map(samples_of, nest))


def padded_arrays(nest: Any) -> Any:
    """The inverse for a whole evaluation: numpy arrays (samples, ...), padded where samples differ in their shapes."""
    if isinstance(nest, Mapping):
        return {key: padded_arrays(value) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(map(padded_arrays, nest))
    return _padded([torch.as_tensor(sample).numpy() for sample in nest])


def _padded(samples: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    shape = (max(sizes) for sizes in zip(*(sample.shape for sample in samples), strict=True))
    whole = np.full((len(samples), *shape), PADDING, dtype=samples[0].dtype)
    for number, sample in enumerate(samples):
        whole[(number, *map(slice, sample.shape))] = sample
    return whole
