"""Running a model's own code on tensors that have a shape and a type but no numbers, and take no memory.

torch calls them fake tensors.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from evenly.data.generators import undisturbed
from evenly.torch_private import FAKE_TENSOR_LOGGER, fake_mode, masks_not_compared

Source = Literal["parameter", "buffer", "constant"]


class DeferredTensor(torch.Tensor):
    """A tensor whose numbers may come later: until then it has a shape, a type and a device alone."""

    @property
    def arrived(self) -> bool:
        """Whether it has numbers by now."""
        raise NotImplementedError


@cache
def shared_fake_mode() -> Any:
    """One for all forms that are kept: torch does not mix them."""
    return fake_mode()


def fake_tensor(tensor: torch.Tensor, fakes: Any, device: str = "cpu") -> torch.Tensor:
    """A tensor of the same shape, strides and type on `device`; of a parameter a parameter."""
    with fakes, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_model(model: nn.Module, fakes: Any, note: Callable[[torch.Tensor, Source, str], object]) -> nn.Module:
    """A copy of `model` that shares no tensor with it and has its ties.

    note: gets each tensor of the copy, what it is, and every name that it has ("" for a constant).
    """
    memo: dict[int, Any] = {}

    def stand_in(tensor: torch.Tensor, source: Source, name: str) -> None:
        if id(tensor) not in memo:
            memo[id(tensor)] = fake_tensor(tensor, fakes)
        note(memo[id(tensor)], source, name)

    for name, parameter in model.named_parameters(remove_duplicate=False):
        stand_in(parameter, "parameter", name)
    for name, buffer in model.named_buffers():
        stand_in(buffer, "buffer", name)
    for module in model.modules():
        for attribute in vars(module).values():
            if isinstance(attribute, torch.Tensor):
                stand_in(attribute, "constant", "")
    return copy.deepcopy(model, memo)


@contextmanager
def running_fake() -> Generator[None]:
    """Within, a model's code can run so, and disturbs no random state."""
    with _random_state_kept(), _quiet(), masks_not_compared():
        yield


@contextmanager
def _quiet() -> Generator[None]:
    """Within, torch does not log what fails for want of numbers: it is raised too."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _random_state_kept() -> Generator[None]:
    """On leaving, torch's, Python's and numpy's generators are as they were."""
    numpy: Any = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    try:
        with undisturbed():
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
