"""Parameters of other stages, as code between steps finds them: what it may change, and that no number comes of one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from evenly.errors import RunError
from evenly.parallel.core.between_steps import Outside, RemoteParameter, show_remote


def remote(outside: Outside) -> RemoteParameter:
    found: RemoteParameter = show_remote(nn.Parameter(torch.ones(3, 2, device="meta")), "block.weight", outside)
    return found


def test_no_number_comes_of_it_and_it_is_not_saved() -> None:
    parameter = remote(Outside(shown=True))
    for ask in (lambda: float(parameter.norm()), lambda: parameter.tolist(), lambda: parameter + torch.ones(2)):
        with pytest.raises(RunError, match=r"of parameter block.weight outside of a loss"):
            ask()
    for one in (parameter, parameter.detach().clone()):
        with pytest.raises(RunError, match=r"saving of parameter block.weight"):
            pickle.dumps(one)


def test_its_shape_is_known_and_a_change_is_left_to_its_rank() -> None:
    parameter = remote(Outside(shown=True))
    with torch.no_grad():
        assert parameter.mul_(2) is parameter
        parameter.copy_(torch.zeros(3, 2))
    assert parameter.shape == (3, 2) and type(parameter.sum(0)) is RemoteParameter
    assert type(copy.deepcopy(parameter)) is RemoteParameter
