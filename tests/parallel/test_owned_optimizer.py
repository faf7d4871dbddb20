"""Optimizers that need whole parameters, dealt whole to ranks or on all: which ones, and the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_tensor import heads_job
from kept_ranks import KeptRanks, group_of_all
from torch import nn

import evenly
from evenly.parallel.core.optimizer_kinds import is_separable
from evenly.parallel.data.grouping import deal_out
from evenly.parallel.data.owned_optimizer import OwnedOptimizer, RowExchange
from evenly.parallel.data.row_layout import RowLayout
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, compare_steps, keep_measured_reference
from evenly.verify.reference import reference_steps
from evenly.verify.tasks import PlanSteps

STEPS = 4


class OneByOne(torch.optim.Optimizer):
    """Calls `update` for each parameter with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, parameter.grad, self.state[parameter])

    def update(self, group: Any, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
        raise NotImplementedError


class Shampoo(OneByOne):
    """A preconditioner for each side of a matrix, of which roots are taken."""

    def update(self, group: Any, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
        if parameter.dim() == 2:
            for key, side in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
                state[key] = state.get(key, 0.1 * torch.eye(len(side), dtype=side.dtype)) + side
            gradient = self.root(state["left"]) @ gradient @ self.root(state["right"])
        parameter.sub_(gradient, alpha=group["lr"])

    def root(self, matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors * values.pow(-0.25) @ vectors.T


class Lars(OneByOne):
    """A trust ratio, as a Python number, and a momentum."""

    def update(self, group: Any, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
        trust = parameter.norm().item() / (gradient.norm().item() + 1.0)
        state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(parameter)) + trust * gradient
        state["steps"] = state.get("steps", 0) + 1
        parameter.sub_(state["momentum"], alpha=group["lr"])


class AdamMini(OneByOne):
    """One second moment for each row."""

    def update(self, group: Any, parameter: torch.Tensor, gradient: torch.Tensor, state: Any) -> None:
        square = gradient.square().flatten(1).mean(1) if gradient.dim() > 1 else gradient.square().mean()
        state["square"] = 0.9 * state.get("square", torch.zeros_like(square)) + 0.1 * square
        scale = state["square"].sqrt().add(1e-3)
        parameter.sub_(gradient / (scale.view(-1, *[1] * (gradient.dim() - 1)) if gradient.dim() > 1 else scale) * 1e-2)


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Shampoo": Shampoo,
    "Lars": Lars,
    "AdamMini": AdamMini,
    "Adafactor": torch.optim.Adafactor,
    "Rprop": torch.optim.Rprop,
}


class OwnAdafactor(torch.optim.Adafactor):
    """A class of which nothing is known."""


def test_only_torchs_own_classes_as_they_are_may_be_taken_apart() -> None:
    parameters = [nn.Parameter(torch.ones(3, 2))]
    assert is_separable(torch.optim.Adafactor(parameters)) and is_separable(torch.optim.Muon(parameters))
    assert is_separable(torch.optim.AdamW(parameters))
    assert not is_separable(OwnAdafactor(parameters)) and not is_separable(Shampoo(parameters))
    for changed in (torch.optim.Adafactor(parameters), torch.optim.SGD(parameters)):
        changed.register_step_pre_hook(lambda *_: None)
        assert not is_separable(changed)
    made = torch.optim.Adafactor(parameters)
    made.state[parameters[0]]["step"] = torch.zeros(())
    assert not is_separable(made)


SHAPES = {"a": (5, 3), "b": (1, 2, 2), "c": (7,), "d": (2, 4), "e": (4, 1)}


def there_and_back() -> list[str]:
    """Which of the parameters this rank got whole, after their pieces came back as they were."""
    with group_of_all() as group:
        draw = torch.Generator().manual_seed(0)
        dtypes = {"c": torch.bfloat16, "d": torch.bfloat16}
        whole = {n: torch.randn(shape, generator=draw).to(dtypes.get(n)) for n, shape in SHAPES.items()}
        owners = deal_out({name: one.nbytes for name, one in whole.items()}, group.size)
        exchange = RowExchange(SHAPES, owners, group)
        own = {n: RowLayout.of(shape, group.size).own(group.position) for n, shape in SHAPES.items()}
        pieces = {name: one[own[name]].clone() for name, one in whole.items()}
        found = exchange.to_owners(pieces)
        assert all(torch.equal(one, whole[name]) for name, one in found.items())
        back = {name: torch.full_like(piece, torch.nan) for name, piece in pieces.items()}
        exchange.to_pieces(found, back)
        assert all(torch.equal(back[name], piece) for name, piece in pieces.items())
        assert exchange.to_owners({}) == {}
        return [*found]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_come_together_at_one_rank_and_go_back(size: int, ranks: KeptRanks) -> None:
    found = ranks.run(there_and_back, size=size)
    assert sorted(name for names in found for name in names) == sorted(SHAPES)


def job(name: str) -> evenly.Job:
    def make(named_parameters: Any) -> torch.optim.Optimizer:
        named = [*named_parameters]
        first, other = ([p for n, p in named if n.startswith("blocks.0") is chosen] for chosen in (True, False))
        kind: Any = WHOLE[name]
        return kind([{"params": first, "lr": 3e-3}, {"params": other}])

    return heads_job(optimizer=make, precision="float64", steps=STEPS, frozen={"blocks.1.norm.*": 2, "place": None})


def references(names: list[str], folder: Path) -> None:
    for name in names:
        keep_measured_reference(job(name), STEPS, folder / name, ["sums"])


def compare(names: list[str], plan: str, folder: Path) -> dict[str, RankComparison]:
    return {name: compare_job(job(name), plan, STEPS, folder / name) for name in names}


OWN = ["Shampoo", "Lars", "AdamMini"]


NAMES = [*OWN, "Adafactor", "Rprop"]


@pytest.mark.full_but("zero1-*", "zero3-*")
@pytest.mark.parametrize(
    ("plan", "size", "names"),
    [
        ("ddp", 2, OWN),
        ("zero1", 2, NAMES),
        ("zero2", 3, NAMES),
        ("zero3", 2, NAMES),
        ("hsdp", 4, OWN[:1]),
        ("data=2 pipeline=2 zero=1", 4, ["Adafactor"]),
    ],
)
def test_every_plan_of_the_data_axis_has_the_numbers_of_one_device(
    plan: str, size: int, names: list[str], ranks: KeptRanks, tmp_path: Path
) -> None:
    ranks.run(references, names, tmp_path, size=1)
    compared = ranks.run(compare, names, plan, tmp_path, size=size)
    rows = {name: judge(plan, [one[name] for one in compared]) for name in names}
    assert {name: (row.status, row.reason) for name, row in rows.items()} == dict.fromkeys(names, ("equal", ""))


def compare_part(name: str, plan: str, first: int, last: int, folder: Path, out: Path) -> RankComparison:
    part = PlanSteps(plan, first, last, out)  # type: ignore[arg-type]
    return compare_steps(job(name), part, STEPS, folder / name)


@pytest.mark.full_but("plans0")
@pytest.mark.parametrize("plans", [("zero1", "zero3", "ddp"), ("ddp", "zero2", "zero3")])
def test_state_goes_on_under_another_plan(plans: tuple[str, ...], ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(references, ["Shampoo"], tmp_path, size=1)
    for done, plan in enumerate(plans):
        last = done + 1 if done < 2 else STEPS
        sizes = {"zero3": 3}
        args = ("Shampoo", plan, done, last, tmp_path, tmp_path / "out")
        row = judge(plan, ranks.run(compare_part, *args, size=sizes.get(plan, 2)))
        assert (row.status, row.reason) == ("equal", ""), plan


def state_of(plan: str) -> tuple[set[str], int]:
    """The names of what this rank keeps state of, and how many bytes."""
    with evenly.start(job("Adafactor"), plan=plan) as run:
        run.step(next(iter(run.batches())))
        assert isinstance(run.updaters.first._sharded, OwnedOptimizer)
        with run.inside():
            kept: dict[Any, Any] = {p: state for p, state in run.optimizer.state.items() if state}
        tensors = [value for state in kept.values() for value in state.values()]
        return {parameter.stands_for for parameter in kept}, sum(tensor.nbytes for tensor in tensors)


@pytest.mark.full_but("zero3")
@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_state_is_at_one_rank_alone(plan: str, ranks: KeptRanks) -> None:
    expected = next(iter(reference_steps(job("Adafactor"), 1))).state
    (one, some), (other, rest) = ranks.run(state_of, plan, size=2)
    assert not one & other
    assert one | other == {name.partition(" of ")[2] for name in expected}
    assert some + rest == sum(tensor.nbytes for tensor in expected.values())
