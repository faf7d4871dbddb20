"""Split tensors in code that is transformed: equal to one device, or refused, though their derivation foresaw none."""

from __future__ import annotations

import torch
import torch._dynamo  # as a run has it
from jobs_transformed import MIXES, Part
from kept_ranks import KeptRanks

from evenly.comm.connect import connect, disconnect
from evenly.errors import RunError
from evenly.launcher.environment import find_here
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.model import SplitModel

HIDDEN = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
# Own functions, whose backward would see a part; checkpoints by reentry are such.
REFUSED = {*("own function", "own function of detached", "recomputed by reentry")}


def of_all(names: list[str]) -> dict[str, str]:
    world = connect(find_here())
    torch.compiler.set_stance("force_eager")  # as a run has it under tensor
    try:
        group = world.group("world")
        return {name: of_one(name, group) for name in names}
    finally:
        disconnect(world)


def of_one(name: str, group) -> str:  # type: ignore[no-untyped-def]
    part, whole = Part(MIXES[name]).double(), Part(MIXES[name]).double()
    layouts = {key: Layout.of(dim, 1, 10, 1, group.size) for key, dim in HIDDEN.items()}
    split = SplitModel(part, layouts, group)
    split.show_parameters(part)
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    try:
        found = part(given)
        with split.axis:
            found.square().sum().backward()
    except RunError as problem:
        return f"refused: {problem}"
    finally:
        split.close()
    wanted = whole(expected)
    wanted.square().sum().backward()
    pairs = {"output": (found, wanted), "input": (given.grad, expected.grad)}
    for key, parameter in whole.named_parameters():
        pairs[key] = split.full_view(key, dict(part.named_parameters())[key].grad), parameter.grad
    off = {key: float((one - other).detach().abs().max()) for key, (one, other) in pairs.items()}
    return "equal" if max(off.values()) < 1e-12 else f"different: {off}"


def test_transformed_code_meets_whole_tensors_or_is_refused(ranks: KeptRanks) -> None:
    for found in ranks.run(of_all, [*MIXES], limit_s=120):
        wrong = {
            name: outcome
            for name, outcome in found.items()
            if not outcome.startswith("refused: " if name in REFUSED else "equal")
        }
        assert wrong == {}
