"""A trial of an optimizer whose class is not known, on small parameters: it steps, is saved, and goes on as loaded."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from evenly.checkpoint.plain import decode, encode
from evenly.checkpoint.state import install, read_state, targets
from evenly.checkpoint.writer import form_of
from evenly.data.generators import undisturbed
from evenly.engine.faces import turn
from evenly.engine.updater import Updater
from evenly.errors import EvenlyError, UserError, describe
from evenly.parallel.core.param_groups import WholeParameter

LONGEST = 6  # of a dim of a small parameter
MOST_ELEMENTS = 1 << 24  # of parameters of their own shapes, where small ones do not do
MOST_STEPPED = 256  # parameters with gradients
SAVED, STEPS = 4, 12

Named = Sequence[tuple[str, WholeParameter]]


def try_optimizer(updater: Updater, *, saves: bool) -> None:
    """Raise `UserError` where the optimizer, whose class is not known, cannot step or does not come back when saved.

    saves: whether the run has checkpoints.
    """
    failed = Exception()
    with undisturbed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for longest in (LONGEST, None):
            if longest is None and sum(math.prod(shape) for *_, shape in updater.named_shapes()) > MOST_ELEMENTS:
                return
            named = _parameters(updater, longest)
            try:
                optimizer = updater.build(named)
                turn(optimizer, "train")
                _step(optimizer, named, 0, SAVED)
            except Exception as problem:  # code of the job: it may not do with small parameters
                failed = problem
                continue
            if saves:
                _try_saving(updater, optimizer, named, longest)
            return
    raise _refusal(updater, f"its step fails: {describe(failed)}", "use an optimizer with one gradient per step")


def _try_saving(updater: Updater, optimizer: Optimizer, named: Named, longest: int | None) -> None:
    turn(optimizer, "eval")
    tensors, values = read_state(nn.Module(), optimizer)
    forms = {name: form_of(tensor) for name, tensor in tensors.items()}
    text = json.dumps(encode(values, "the state of the optimizer"))
    again = _parameters(updater, longest)
    try:
        loaded = updater.build(again)
        filled = targets(nn.Module(), loaded, forms)
        with torch.no_grad():
            for name, target in filled.items():
                target.copy_(tensors[name])
            for (_, own), (_, other) in zip(again, named, strict=True):
                own.copy_(other)
        install(nn.Module(), loaded, filled, decode(json.loads(text)))
        for one, parameters in ((optimizer, named), (loaded, again)):
            turn(one, "train")
            _step(one, parameters, SAVED, STEPS)
    except EvenlyError:
        raise
    except Exception as problem:
        raise _refusal(updater, f"what it saves cannot be loaded: {describe(problem)}", ADVICE) from problem
    for (name, own), (_, other) in zip(again, named, strict=True):
        if not _same(own, other):
            raise _refusal(updater, f"saved and loaded, it steps {name} otherwise than without a stop", ADVICE)


ADVICE = (
    "let its state, or its state_dict(), hold all that its step goes by; or run without a folder, and so without saves"
)


def _refusal(updater: Updater, found: str, do: str) -> UserError:
    return UserError(f"optimizer {type(updater.optimizer).__name__}", found, do)


def _parameters(updater: Updater, longest: int | None) -> list[tuple[str, WholeParameter]]:
    """Return full parameters on the CPU in place of the updater's, with dims of at most `longest`."""
    draw = torch.Generator().manual_seed(0)
    found: list[tuple[str, WholeParameter]] = []
    for name, parameter, shape in updater.named_shapes():
        cut = [min(length, longest or length) for length in shape]
        small = WholeParameter.of(name, parameter)
        small.data = torch.randn(cut, generator=draw).to(parameter.dtype)
        found.append((name, small))
    return found


def _step(optimizer: Optimizer, named: Named, first: int, last: int) -> None:
    for number in range(first, last):
        draw = torch.Generator().manual_seed(number)
        for _, parameter in [one for one in named if one[1].requires_grad][:MOST_STEPPED]:
            parameter.grad = (0.1 * torch.randn(parameter.shape, generator=draw)).to(parameter.dtype)
        torch.manual_seed(number)
        optimizer.step()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    close = math.sqrt(torch.finfo(one.dtype).eps)
    return torch.allclose(one, other, rtol=close, atol=close * float(other.detach().abs().max()), equal_nan=True)
