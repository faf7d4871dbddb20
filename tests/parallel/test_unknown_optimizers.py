"""Optimizers of which nothing is known: the numbers of one device under every plan, also after a resume, or refused."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn.functional import mse_loss

import evenly

STEPS, HALF = 6, 3
X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))


class Flattening(torch.optim.Optimizer):
    """Flattens parameters and looks at all of them together, as Prodigy does; its groups have no rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"scale": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        top = bottom = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                start = self.state[p].setdefault("start", p.flatten()[::2].clone())  # of a bias: one element, stride 2
                top += torch.dot(p.grad.flatten()[::2], start - p.flatten()[::2]).item()
                bottom += p.grad.abs().sum().item()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["scale"] * (1 + abs(top) / bottom))


class Stacked(torch.optim.Optimizer):
    """Keeps the momentum of a stack of like parameters in the state of the first of them."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        every = [*params]
        shapes = sorted({p.shape for p in every})
        super().__init__([{"params": [p for p in every if p.shape == shape]} for shape in shapes], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = torch.stack([p.grad for p in group["params"]])
            buffer = self.state[group["params"][0]].setdefault("momentum", torch.zeros_like(gradients))
            for p, update in zip(group["params"], buffer.mul_(0.9).add_(gradients), strict=True):
                p.sub_(update, alpha=group["lr"])


class Late(torch.optim.Optimizer):
    """Couples parameters from its fourth step on; keeps numbers, lists and tuples, of itself and of parameters."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "dtype": torch.float32})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        own = self.state["all"]
        own["step"] = own.get("step", 0) + 1
        total = torch.stack([p.grad.norm() for p in every]).norm() if own["step"] > 3 else torch.ones(())
        own.setdefault("norms", []).append(total.double())
        for p in every:
            moments = self.state[p].setdefault("moments", [torch.zeros_like(p), {"a.b": torch.zeros_like(p)}])
            moments[0].lerp_(p.grad, 0.3)
            moments[1]["a.b"].lerp_(p.grad.square(), 0.3)
            update = moments[0] / (1 + moments[1]["a.b"].sqrt()) / (1 + own["norms"][-1])
            p.sub_(update, alpha=self.param_groups[0]["lr"])


class Wrapper(torch.optim.Optimizer):
    """Wraps another, whose groups it shares; what it saves is the other's, in a form of its own."""

    def __init__(self, params: Any) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]
        self.base = torch.optim.AdamW(params, lr=0.1)
        self.defaults, self.state, self.param_groups = self.base.defaults, {}, self.base.param_groups  # type: ignore
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.done += 1
        for p, slow in zip((p for group in self.param_groups for p in group["params"]), self.slow, strict=True):
            if self.done % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": tuple(self.slow), "done": self.done}

    def load_state_dict(self, state: Any) -> None:
        every = (p for group in self.param_groups for p in group["params"])
        assert all(p.shape == slow.shape for p, slow in zip(every, state["slow"], strict=True))
        self.base.load_state_dict(state["base"])
        self.param_groups, self.slow, self.done = self.base.param_groups, [*state["slow"]], state["done"]


class Views(torch.optim.Optimizer):
    """Keeps tensors of many forms: views, strides, overlapping and expanded ones, of other types, in a queue."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"scale": torch.tensor([0.5, 0.25])})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, flat = self.state[p], p.grad.flatten()
                old = list(state.get("queue", ()))
                state["queue"] = deque([*old, p.grad.clone()], maxlen=2)
                state["expanded"] = flat[:1].clone().expand(3)
                state["overlapping"] = torch.cat([flat, flat]).as_strided((flat.numel(), 2), (1, 1))
                state["turned"], state["none"] = torch.stack([flat, flat]).T, p.new_empty(0, 3)
                state["bits"], state["low"] = flat > 0, flat.bfloat16()[::2]
                past = sum(float(one.sum()) for one in old) + float(state["overlapping"].sum() + state["low"].sum())
                p.sub_(p.grad * group["scale"][0] * 0.1 + 1e-4 * past)


class Counting(torch.optim.SGD):
    """Counts its steps where no checkpoint sees it, or keeps what none can hold."""

    def __init__(self, params: Any, kept: Any = None) -> None:
        super().__init__(params, lr=0.1)
        self.kept, self.count = kept, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / self.count)
            if self.kept is not None:
                self.count, self.state[p]["kept"] = 1, self.kept


class Failing(Counting):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Flattening, Stacked, Late, Wrapper, Views)}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 1))


def job(kind: str) -> evenly.Job:
    return evenly.Job(
        model=net, loss=lambda m, x: mse_loss(m(x)[:, 0], x.sum(1)), data=X, optimizer=KINDS[kind], global_batch=12,
        microbatch=3, shuffle=False, steps=STEPS, precision="float64",
    )  # fmt: skip


def plain(kind: str) -> dict[str, torch.Tensor]:
    model = net().double()
    optimizer = KINDS[kind](model.parameters())
    for step in range(STEPS):
        x = X[12 * (step % 2) :][:12].double()
        optimizer.zero_grad()
        mse_loss(model(x)[:, 0], x.sum(1)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def trained(kinds: list[str], plan: str, out: Path, last: int) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters after step `last`, by kind, going on from what is in the folder."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for kind in kinds:
        with evenly.start(job(kind), plan=plan, out=out / kind, steps=last, resume=last > HALF) as run:
            for batch in run.batches():
                run.step(batch)
            with run.whole_model() as model:
                found[kind] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def check(kinds: list[str], plans: tuple[str, str], ranks: KeptRanks, out: Path) -> None:
    for plan, last in zip(plans, (HALF, STEPS), strict=True):
        found = ranks.run(trained, kinds, plan, out, last, size=1 if plan.startswith("single") else 2)[0]
    for kind in kinds:
        for name, expected in plain(kind).items():
            assert (found[kind][name] - expected).abs().max() < 1e-9 * expected.abs().max(), (kind, name)


def test_an_optimizer_that_couples_parameters_goes_on_on_another_plan(ranks: KeptRanks, tmp_path: Path) -> None:
    check([*KINDS], ("zero2", "single"), ranks, tmp_path)


PAIRS = (
    *(("single", "zero3"), ("ddp", "tensor=2"), ("zero1", "zero1"), ("zero3", "ddp"), ("tensor=2", "zero2")),
    ("zero3", "tensor=2"),
)


@pytest.mark.full
@pytest.mark.parametrize("plans", PAIRS)
def test_an_optimizer_of_which_nothing_is_known_has_the_numbers_of_one_device(
    plans: tuple[str, str], ranks: KeptRanks, tmp_path: Path
) -> None:
    check([*KINDS], plans, ranks, tmp_path)


@pytest.mark.full
def test_a_pipeline_refuses_an_optimizer_of_which_nothing_is_known(ranks: KeptRanks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="under pipeline=2"):
        ranks.run(trained, ["Late"], "pipeline=2", tmp_path, HALF, size=2)


REFUSED = {
    "not saved": (Counting, "saved and loaded, it steps 0.weight otherwise than without a stop"),
    "an object": (lambda p: Counting(p, [object()]), "it is a object"),
    "sparse": (lambda p: Counting(p, torch.eye(2).to_sparse()), "it is torch.float32 of layout torch.sparse_coo"),
    "complex": (lambda p: Counting(p, torch.eye(2, dtype=torch.complex128)), "it is torch.complex128"),
    "a closure": (Failing, "its step fails: TypeError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_step_or_be_saved_is_refused_before_the_first_step(case: str, tmp_path: Path) -> None:
    make, said = REFUSED[case]
    with pytest.raises(evenly.UserError, match=said), evenly.start(replace(job("Late"), optimizer=make), out=tmp_path):
        pass


@pytest.mark.full
def test_offloaded_it_steps_on_the_host(ranks: KeptRanks, tmp_path: Path) -> None:
    check([*KINDS], ("single offload=optimizer", "single"), ranks, tmp_path)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def in_phases(plan: str, out: Path, last: int) -> dict[str, torch.Tensor]:
    phases = {
        one: evenly.Phase(parameters=f"{one}.*", loss=lambda m, x: mse_loss(m(x)[:, 0], x.sum(1)), optimizer=make)
        for one, make in (("first", Late), ("second", lambda p: torch.optim.AdamW(p, lr=0.01)))
    }
    both = evenly.Job(
        model=Two, data=X, phases=phases, global_batch=12, microbatch=3, shuffle=False, steps=STEPS, precision="float64"
    )
    with evenly.start(both, plan=plan, out=out, steps=last, resume=last > HALF) as run:
        for batch in run.batches():
            run.step(batch)
        with run.whole_model() as model:
            return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.full
def test_one_phase_of_two_has_such_an_optimizer(ranks: KeptRanks, tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for pair in (("single", "single"), ("zero2", "zero3"), ("tensor=2", "single")):
        for plan, last in zip(pair, (HALF, STEPS), strict=True):
            one = ranks.run(in_phases, plan, tmp_path / pair[0], last, size=1 if plan == "single" else 2)[0]
        found.append(one)
    assert all(torch.allclose(one[n], p, rtol=1e-9, atol=1e-12) for one in found[1:] for n, p in found[0].items())
