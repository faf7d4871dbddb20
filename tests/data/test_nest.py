"""Nests of tensors."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from evenly.data.nest import has_tensor


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Kept:
    one: Any
    other: Any = 3


PLAIN, OTHER = torch.zeros(2), nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    "nest",
    [
        OTHER,
        (PLAIN, OTHER),
        [PLAIN, [PLAIN, (OTHER,)]],
        {"a": PLAIN, "b": {"c": OTHER}},
        OrderedDict(a=OTHER),
        Pair(PLAIN, OTHER),
        Kept(PLAIN, [OTHER]),
        ((), {"x": Kept(OTHER)}),
    ],
)
def test_a_tensor_of_a_class_is_found_wherever_it_is(nest: Any) -> None:
    assert has_tensor(nn.Parameter, nest)
    assert has_tensor(torch.Tensor, nest)


@pytest.mark.parametrize("nest", [PLAIN, (PLAIN, 3, None), [], {"a": [PLAIN]}, Kept(PLAIN), "text", Kept])
def test_others_are_not_taken_for_it(nest: Any) -> None:
    assert not has_tensor(nn.Parameter, nest)
