"""The table of operations of the tensor axis, walked: every entry computes on parts what torch computes on the whole.

Each name is called on a split tensor and on the full one. Then models `Linear -> f -> Linear` run under `tensor=2`, for
every function of elements and its in-place form: to the numbers of one device, or they are refused before a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.comm.connect import connect, disconnect
from evenly.errors import UserError
from evenly.launcher.environment import find_here
from evenly.parallel.tensor.axis import Axis, is_split
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.ops import IN_PLACE, LINEAR_CROSS_ENTROPY, OPS, POINTWISE, POSITIONS, UNARY, functions_of
from evenly.torch_private import GROUPED_PRODUCT

T = torch.Tensor
SHAPE = (4, 6, 5)
CUT = 1  # the dim of SHAPE that is split

# How names are called that do not take one, two or three tensors of one shape; x has SHAPE, and dim 1 is split.
CALLS: dict[str, Callable[[Callable[..., Any], T], Any]] = {
    "to": lambda f, x: f(x, torch.float32),
    "type": lambda f, x: f(x, torch.float32),
    "where": lambda f, x: f(x, x > 0.5, -x) if f is T.where else f(x > 0.5, x, -x),
    "masked_fill": lambda f, x: f(x, x > 0.5, 2.0),
    "masked_fill_": lambda f, x: f(x.clone(), x.detach() > 0.5, 2.0),
    "threshold": lambda f, x: f(x, 0.5, 0.1),
    "threshold_": lambda f, x: f(x.clone(), 0.5, 0.1),
    **{name: lambda f, x: f(x, 0.2, 0.8) for name in ("clamp", "clip")},
    **{name: lambda f, x: f(x.clone(), 0.2, 0.8) for name in ("clamp_", "clip_")},
    "lerp": lambda f, x: f(x, -x, 0.3),
    "full_like": lambda f, x: f(x, 2.0),
    "fill": lambda f, x: f(x, 2.0),
    "fill_": lambda f, x: f(x.clone(), 2.0),
    "dropout": lambda f, x: f(x, 0.3, True),
    "expand": lambda f, x: f(x.unsqueeze(0), 3, *SHAPE),
    "broadcast_to": lambda f, x: f(x, (3, *SHAPE)),
    "expand_as": lambda f, x: f(x, torch.zeros(3, *SHAPE)),
    "new_full": lambda f, x: f(x, (2, 3), 1.0),
    **{name: lambda f, x: f(x, (2, 3)) for name in ("new_zeros", "new_ones")},
    "view": lambda f, x: f(x, 4, 6, 5, 1),
    "reshape": lambda f, x: f(x, (2, 2, 6, 5)),
    **{name: lambda f, x: f(x, torch.zeros(2, 2, 6, 5)) for name in ("view_as", "reshape_as")},
    "unflatten": lambda f, x: f(x, 0, (2, 2)),
    "unsqueeze": lambda f, x: f(x, 1),
    **{name: lambda f, x: f(x, 0, 1) for name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis")},
    **{name: lambda f, x: f(x[0]) for name in ("t", "T", "H")},
    "permute": lambda f, x: f(x, (2, 0, 1)),
    "repeat": lambda f, x: f(x, 2, 3, 1),
    "tile": lambda f, x: f(x, (3, 1)),
    "repeat_interleave": lambda f, x: f(x, 2, dim=1),
    **{name: lambda f, x: f(x.transpose(0, 1)) for name in ("tril", "triu")},
    "pad": lambda f, x: f(x, (1, 2)),
    **{name: lambda f, x: f(x, 2) for name in ("softmax", "log_softmax", "softmin", "cumsum", "cumprod")},
    "flip": lambda f, x: f(x, [2]),
    "logcumsumexp": lambda f, x: f(x, 2),
    "narrow": lambda f, x: f(x, 2, 1, 3),
    "topk": lambda f, x: f(x, 2),
    "normalize": lambda f, x: f(x, dim=2),
    "roll": lambda f, x: f(x, 1, 2),
    **{name: lambda f, x: f(x, 2) for name in ("amax", "amin", "argmax", "argmin", "prod", "nansum", "nanmean", "any")},
    **{
        name: lambda f, x: f(x, 2) for name in ("all", "logsumexp", "var", "std", "var_mean", "std_mean", "sum", "mean")
    },
    **{name: lambda f, x: f(x, 2) for name in ("count_nonzero", "median", "max", "min")},
    "norm": lambda f, x: f(x, 2, 2),
    **{name: lambda f, x: f(x, [2, 3], 2) for name in ("split", "split_with_sizes")},
    "unsafe_split": lambda f, x: f(x, 2, 2),
    **{name: lambda f, x: f(x, 2, 2) for name in ("chunk", "unsafe_chunk")},
    "glu": lambda f, x: f(x, 0),
    "unbind": lambda f, x: f(x, 2),
    **{name: lambda f, x: f([x, -x], 2) for name in ("cat", "concat", "concatenate", "stack")},
    "__getitem__": lambda f, x: f(x, (slice(1, 3), slice(None), None, 2)),
    "index_select": lambda f, x: f(x, 2, torch.tensor([4, 0, 4])),
    "select": lambda f, x: f(x, 2, 1),
    **{name: lambda f, x: f(x, (5,)) for name in ("layer_norm", "rms_norm")},
    "linear": lambda f, x: f(x, torch.ones(3, 5, dtype=x.dtype)),
    **{name: lambda f, x: f(x, torch.ones(5, 3, dtype=x.dtype)) for name in ("matmul", "__matmul__")},
    "__rmatmul__": lambda f, x: f(x, torch.ones(4, 3, 6, dtype=x.dtype)),
    "mm": lambda f, x: f(x[0], torch.ones(5, 3, dtype=x.dtype)),
    "bmm": lambda f, x: f(x, x.transpose(1, 2).detach().contiguous() * 2),
    "addmm": lambda f, x: f(torch.ones(3, dtype=x.dtype), x[0], torch.ones(5, 3, dtype=x.dtype)),
    "baddbmm": lambda f, x: f(
        torch.ones(3, dtype=x.dtype), batch1=x, batch2=torch.ones(4, 5, 3, dtype=x.dtype), beta=2, alpha=3
    ),
    "einsum": lambda f, x: f("bi...,bio->b...o", x, torch.ones(4, 6, 3, dtype=x.dtype)),
    "scaled_dot_product_attention": lambda f, x: f(x[:, :, None], x[:, :, None] * 2, x[:, :, None] * 3),
    **{
        f"conv{n}d": lambda f, x, n=n: f(torch.ones(2, 6, *[9] * n, dtype=x.dtype), x[(..., *[None] * (n - 1))])
        for n in (1, 2, 3)
    },
    "batch_norm": lambda f, x: f(x, torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype), training=True),
    "group_norm": lambda f, x: f(x, 2),
    **{
        name: lambda f, x, n=int(name[-2]): f(x[(..., *[None] * (n - 1))].expand(*SHAPE, *[4] * (n - 1)), 2)
        for name in POSITIONS.split()
        if name.endswith("d")
    },
    **{name: lambda f, x: f(x, scale_factor=2) for name in ("interpolate", "upsample")},
    "embedding": lambda f, x: f(torch.tensor([1, 3]), x[0]),
    "cross_entropy": lambda f, x: f(x[..., 0], torch.tensor([0, 5, 2, 3])),
    LINEAR_CROSS_ENTROPY: lambda f, x: f(x[1, :3].detach(), x[0], torch.tensor([0, 5, -100])),
}
# Nothing passes through what makes a tensor of its own from numbers, and what has no numbers cannot be compared.
WITHOUT_A_SPLIT = {
    *[
        "zeros",
        "ones",
        "empty",
        "full",
        "eye",
        "arange",
        "linspace",
        "tensor",
        "as_tensor",
        "scalar_tensor",
        "new_tensor",
    ]
}
WITHOUT_A_SPLIT |= {"rand", "randn", "randint", "randperm", "empty_like", "new_empty"}
# Their dims are forbidden to a split where they need it whole; the rule here is what is done on parts.
GATHERED = {"bmm"}
ELSEWHERE = set() if torch.cuda.is_available() else {"cuda"}
ELSEWHERE |= {"grouped_mm", GROUPED_PRODUCT}  # of some shapes and types only: test_experts


@contextmanager
def axis_of_all() -> Iterator[Axis]:
    world = connect(find_here())
    try:
        yield Axis(world.group("world"))
    finally:
        disconnect(world)


KINDS: tuple[Callable[[T], T], ...] = (
    lambda x: x,
    lambda x: x.detach(),
    lambda x: (x * 8).long() + 1,
    lambda x: x > 0.5,
)


def called(name: str, function: Callable[..., Any], x: T) -> Any:
    """`function` of `x`, with further tensors of its shape as far as it takes them; integers where it wants these."""
    if name in CALLS:
        return CALLS[name](function, x)
    return call_as(*pattern(function, name), name, function, x)


def pattern(function: Callable[..., Any], name: str) -> tuple[int, int]:
    """Which of KINDS, and how many tensors, the function takes, and differentiates where it can."""
    for kind, count in [(kind, count) for kind in range(len(KINDS)) for count in (1, 2, 3)]:
        try:
            found = tensors_of(call_as(kind, count, name, function, (sample() * 1.0).requires_grad_() * 1.0))
            if found and found[0].requires_grad:
                found[0].sum().backward()
        except (TypeError, RuntimeError):
            continue
        if found:
            return kind, count
    raise AssertionError(f"no arguments for {name}")


def call_as(kind: int, count: int, name: str, function: Callable[..., Any], x: T) -> Any:
    first = KINDS[kind](x)
    others = [(first * (n + 2) if first.dtype != torch.bool else ~first) for n in range(count - 1)]
    mine = first.clone() if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") else first
    return function(mine, *others)


def tensors_of(result: Any) -> list[T]:
    return [one for one in (result if isinstance(result, list | tuple) else [result]) if isinstance(one, T)]


def sample() -> T:
    return torch.rand(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.9 + 0.05


def names_that_differ(names: list[str]) -> dict[str, str]:
    wrong: dict[str, str] = {}
    with axis_of_all() as axis:
        for name in names:
            for function in functions_of(name, OPS[name].homes):
                try:
                    problem = difference(name, function, axis)
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    wrong[name] = problem
    return wrong


def difference(name: str, function: Callable[..., Any], axis: Axis) -> str:
    whole, given = sample().requires_grad_(), sample().requires_grad_()
    part = axis.part(given * 1.0, Layout.of(CUT, 1, SHAPE[CUT], 1, axis.group.size))
    torch.manual_seed(3)
    expected = tensors_of(called(name, function, whole * 1.0))
    torch.manual_seed(3)
    found = tensors_of(called(name, function, part))
    if not any(is_split(one) for one in found) and name not in GATHERED and not name.startswith("new_"):
        full = OPS[name].execute.__name__ in (
            "sum_or_mean",
            "einsum",
            "cross_entropy",
            "linear_cross_entropy",
            "matmul_reversed",
            "embedding",
            "convolution",
        )
        if not full:
            return "its result is not split"
    for mine, theirs in zip(found, expected, strict=True):
        mine_full = axis.gather_full(mine) if is_split(mine) else mine
        if mine_full.shape != theirs.shape or mine_full.dtype != theirs.dtype:
            return f"shape {tuple(mine_full.shape)} {mine_full.dtype}, not {tuple(theirs.shape)} {theirs.dtype}"
        if not torch.allclose(mine_full.double(), theirs.double(), rtol=1e-12, atol=1e-12, equal_nan=True):
            return "its numbers differ"
    losses = [sum(one.double().nansum() for one in side if one.requires_grad) for side in (found, expected)]
    if isinstance(losses[1], T) and losses[1].requires_grad:
        for loss in losses:
            loss.backward()  # type: ignore[union-attr]
        if not torch.allclose(given.grad, whole.grad, rtol=1e-12, atol=1e-12, equal_nan=True):  # type: ignore[arg-type]
            return "its gradient differs"
    return ""


def test_every_operation_computes_on_parts_what_torch_computes_on_the_whole(ranks: KeptRanks) -> None:
    names = sorted({*OPS} - WITHOUT_A_SPLIT - ELSEWHERE)
    assert ranks.run(names_that_differ, names) == [{}, {}]


def types_that_differ(names: list[str], dtype: torch.dtype) -> dict[str, str]:
    """Of results under autocast, of arguments of `dtype`."""
    wrong: dict[str, str] = {}
    with axis_of_all() as axis, torch.autocast("cpu", torch.bfloat16):
        for name in names:
            for function in functions_of(name, OPS[name].homes):
                part = axis.part(sample().to(dtype), Layout.of(CUT, 1, SHAPE[CUT], 1, axis.group.size))
                try:
                    expected = [one.dtype for one in tensors_of(called(name, function, sample().to(dtype)))]
                except RuntimeError:  # not of this type
                    continue
                found = [one.dtype for one in tensors_of(called(name, function, part))]
                if found != expected:
                    wrong[name] = f"{found}, not {expected}"
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_results_the_types_that_they_have_on_one_device(dtype: torch.dtype, ranks: KeptRanks) -> None:
    names = sorted({*OPS} - WITHOUT_A_SPLIT - ELSEWHERE)
    assert ranks.run(types_that_differ, names, dtype) == [{}, {}]


def added_in_16_bits() -> tuple[T, T]:
    """A product and a bias that are split alike, and the same of whole tensors."""
    with axis_of_all() as axis, torch.autocast("cpu", torch.bfloat16):
        x, weight, bias = sample()[:, 0].float(), sample()[0].t().float(), torch.arange(6.0)
        parts = [axis.part(one, Layout.of(one.dim() - 1, 1, 6, 1, axis.group.size)) for one in (weight, bias)]
        return axis.gather_full(torch.addmm(parts[1], x, parts[0])), torch.addmm(bias, x, weight)


def test_a_split_bias_is_added_to_its_part_of_a_product_in_16_bits(ranks: KeptRanks) -> None:
    for found, expected in ranks.run(added_in_16_bits):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------------------- in a model
ELEMENTWISE = sorted({name for name, op in OPS.items() if op.execute.__name__ in ("elementwise", "in_place")})


class Branches(nn.Module):
    """`Linear -> f -> Linear` for each of several functions."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.first = nn.ModuleList(nn.Linear(5, 6) for _ in names)
        self.last = nn.ModuleList(nn.Linear(6, 3) for _ in names)

    def forward(self, x: T) -> T:
        return sum(  # type: ignore[return-value]
            last(applied(name, first(x)).to(x.dtype).nan_to_num(0.0, 0.0, 0.0)).square().sum(-1)
            for name, first, last in zip(self.names, self.first, self.last, strict=True)
        )


def applied(name: str, h: T) -> T:
    """The method of this name, or the function, of an activation between 0 and 1."""
    function = functions_of(name, OPS[name].homes)[-1]
    return tensors_of(called(name, function, h.sigmoid() * 0.9 + 0.05))[0]


def job_of(names: list[str]) -> evenly.Job:
    data = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return evenly.Job(
        model=lambda: Branches(names),
        loss=lambda model, x: evenly.Loss(model(x).sum(), len(x)),
        data=list(data),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        global_batch=4,
        steps=2,
        precision="float64",
        seed=5,
    )


def trained(names: list[str], plan: str) -> dict[str, T] | str:
    """The parameters after two steps; why such a model is refused, if it is."""
    try:
        with evenly.start(job_of(names), plan=plan) as run:
            for batch in run.batches():
                run.step(batch)
            full = {name: run.composed.full_view(name, p.detach()) for name, p in run.model.named_parameters()}
            return {name: tensor.clone() for name, tensor in full.items()}
    except UserError as refused:
        return str(refused)


def branches_that_differ(groups: list[list[str]], expected: list[dict[str, T]]) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for names, single in zip(groups, expected, strict=True):
        found = trained(names, "tensor=2")
        if isinstance(found, str):
            wrong[", ".join(names)] = f"refused: {found}"
            continue
        for name, tensor in single.items():
            if (found[name] - tensor).abs().max() > 1e-12 * max(1.0, float(tensor.abs().max())):
                wrong[names[int(name.split(".")[1])]] = f"{name} differs"
    return wrong


@pytest.mark.full_but("some")
@pytest.mark.parametrize("which", ["some", "all"])
def test_a_function_between_two_layers_has_the_numbers_of_one_device(which: str, ranks: KeptRanks) -> None:
    left_out = {"empty_like", "acosh", "acosh_", *ELSEWHERE}  # no numbers, and none between 0 and 1
    wanted = [name for name in ELEMENTWISE if name not in left_out][:: 10 if which == "some" else 1]
    groups = [wanted[n : n + 24] for n in range(0, len(wanted), 24)]
    (expected,) = ranks.run(trained_alone, groups, size=1)
    assert ranks.run(branches_that_differ, groups, expected) == [{}, {}]


def trained_alone(groups: list[list[str]]) -> list[Any]:
    return [trained(names, "single") for names in groups]


def test_the_table_names_what_torch_has() -> None:
    for name, op in OPS.items():
        assert functions_of(name, op.homes), name
    assert not {*POINTWISE.split()} & {*UNARY.split()} and {*IN_PLACE.split()} <= {*OPS}
    assert F.embedding in functions_of("embedding", OPS["embedding"].homes)


@pytest.mark.parametrize("name", ["square_", "multiply_", "log1p_", "atan", "hypot_"])
def test_a_split_passes_through_forms_of_every_kind(name: str, ranks: KeptRanks) -> None:
    found = ranks.run(share_of, name)
    assert found == [found[0]] * 2 and found[0] > 0.9


def share_of(name: str) -> float:
    with evenly.start(job_of([name]), plan="tensor=2") as run:
        for batch in run.batches():
            run.step(batch)
        return run.composed.sharded
