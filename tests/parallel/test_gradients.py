"""Sums of gradients in buckets: one rank here; several in tests/verify."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kept_ranks import KeptRanks, group_of_all
from torch import nn
from torch.utils.checkpoint import checkpoint

from evenly.comm.groups import Group
from evenly.errors import RunError, UserError
from evenly.parallel.data import buckets, grouping
from evenly.parallel.data.buckets import Bucket, Slot, fill_buckets
from evenly.parallel.data.gradients import GradientSum
from evenly.parallel.data.squares import JOINED, SQUARED_AT_ONCE, squared_together, sum_of_squares


@pytest.fixture(params=[0, buckets.SMALL], autouse=True)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most elements of a parameter whose first gradient of a step autograd adds by itself."""
    monkeypatch.setattr(buckets, "SMALL", request.param)
    return request.param


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def expected(model: nn.Module, microbatches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    for x in microbatches:
        model(x).square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("accumulate_float64", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_microbatches_are_added_up_and_divided(
    accumulate_float64: bool, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "FIRST_BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(grouping, "BUCKET_BYTES", bucket_bytes)
    model = Two()
    for step in range(2):  # the second step must not see the first
        microbatches = [torch.randn(n, 3) for n in (4, 1, 2 + step)]
        wanted = expected(model, microbatches)
        total = GradientSum(model, group=Group.alone(), accumulate_float64=accumulate_float64)
        total.begin(rounds=len(microbatches))
        for number, x in enumerate(microbatches):
            if number == 2:
                total.expect_last()
            model(x).square().sum().backward()
        total.start_reduce()
        total.finish_reduce()
        norm = total.norm()
        total.divide(7.0)
        for name, p in model.named_parameters():
            if name == "unused":
                assert p.grad is None
            else:
                assert p.grad is not None and p.grad.dtype == torch.float32
                torch.testing.assert_close(p.grad, wanted[name] / 7.0)
        torch.testing.assert_close(
            norm.float(), torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted.values()]))
        )
        total.close()
        model.zero_grad()


@pytest.mark.parametrize("accumulate_float64", [False, True])
def test_gradients_of_autograd_and_of_backwards_that_write_them_are_added_up(accumulate_float64: bool) -> None:
    """In any order: b, autograd, which adds by itself; w, a backward that writes to `grad` past its hooks."""
    for order in ("bbb", "www", "bwb", "wbw", "bbw", "wbb", "wwb"):
        model = nn.ParameterList([nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3))])
        total = GradientSum(model, group=Group.alone(), accumulate_float64=accumulate_float64)
        total.begin(rounds=len(order))
        for number, how in enumerate(order):
            own, factor = model[0], 10.0**number
            if number == len(order) - 1:
                total.expect_last()
            if how == "b":
                (own.sum() * factor + model[1].sum()).backward()
            else:
                mine = torch.full_like(own, factor)
                own.grad = mine if own.grad is None else own.grad + mine
                model[1].sum().backward()
            total.finish_backward()
        total.start_reduce()
        total.finish_reduce()
        assert model[0].grad is not None and model[0].grad.tolist() == [111.0] * 5, order
        assert model[1].grad is not None and model[1].grad.tolist() == [3.0] * 3, order
        total.close()


class Sizes(nn.Module):
    """Parameters of several sizes, one of which lies in memory otherwise than its shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.few = nn.ParameterList(nn.Parameter(torch.randn(5, 600, dtype=torch.float64)) for _ in range(9))
        self.many = nn.Parameter(torch.randn(9, 600, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(4, 600, dtype=torch.float64).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.many.cos() * x
        for number, one in enumerate(self.few):
            x = x + (one * (number + 1)).sin().sum(0)
        return x.square().mean() + (self.turned.T * x[0]).sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_parameter_gets_all_gradients_whatever_their_size_and_number_in_a_backward(reentrant: bool) -> None:
    model = Sizes()
    xs = [torch.randn(600, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def loss(x: torch.Tensor) -> torch.Tensor:
        if reentrant:  # each part is a backward of its own within the backward
            return model(x) + checkpoint(model, x * 0.5, use_reentrant=True) + checkpoint(model, -x, use_reentrant=True)
        return model(x) + model(x * 0.5) + model(-x)

    for x in xs:
        loss(x).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    total = GradientSum(model, group=Group.alone(), accumulate_float64=False)
    for _ in range(2):
        total.begin(rounds=len(xs))
        for x in xs:
            loss(x).backward()
            total.finish_backward()
        total.start_reduce()
        total.finish_reduce()
        for name, gradient in total.named_gradients():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-13, atol=1e-13)
    total.close()


TWO = {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_what_a_rank_has_used_is_known_before_anything_is_reduced() -> None:
    model = Two()
    total = GradientSum(model, group=Group.alone(), accumulate_float64=False)
    for x, wanted in ((torch.randn(4, 3), TWO), (None, set[str]()), (torch.randn(2, 3), TWO)):
        total.begin(rounds=2)
        if x is not None:
            model(x).sum().backward()
            total.finish_backward()
        assert total.used() == wanted
        total.start_reduce()
        total.finish_reduce()
    total.close()


@pytest.mark.parametrize(("ranks", "exact"), [(1, False), (2, False), (1, True)])
def test_small_gradients_are_left_to_autograd(
    ranks: int, exact: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where sums are exact, and in the last backward where buckets are sent as they fill up."""
    heard = [TWO, TWO, TWO] if exact or not small else [set[str](), set[str](), TWO if ranks > 1 else set[str]()]
    calls: list[str] = []
    take = GradientSum._take

    def noted(self: GradientSum, bucket: Bucket, slot: Slot, *rest: torch.Tensor) -> None:
        calls.append(slot.name)
        take(self, bucket, slot, *rest)

    monkeypatch.setattr(GradientSum, "_take", noted)
    model = Two()
    group = Group("data", range(ranks), own=0, handle=None, device=torch.device("cpu"))
    total = GradientSum(model, group=group, accumulate_float64=exact)
    for _ in range(2):
        total.begin(rounds=3)
        for number, names in enumerate(heard):
            calls.clear()
            if number == 2:
                total.expect_last()
            model(torch.randn(4, 3)).sum().backward()
            total.finish_backward()
            assert {*calls} == names, number
        if ranks == 1:
            total.start_reduce()
            total.finish_reduce()
    total.close()
    calls.clear()
    model(torch.randn(4, 3)).sum().backward()
    assert calls == []


def test_wide_sums_have_the_same_bits_in_any_order() -> None:
    numbers = [torch.randn(1000) * 10 ** random.Random(i).uniform(-4, 4) for i in range(9)]
    sums: list[torch.Tensor] = []
    for seed in range(5):
        parameter = nn.ParameterList([nn.Parameter(torch.zeros(1000))])
        total = GradientSum(parameter, group=Group.alone(), accumulate_float64=True)
        total.begin(rounds=9)
        for g in random.Random(seed).sample(numbers, 9):
            (parameter[0] * g).sum().backward()
        total.start_reduce()
        total.finish_reduce()
        total.divide(3.0)
        sums.append(parameter[0].grad.clone())
    assert all(torch.equal(s, sums[0]) for s in sums)


def test_a_step_without_a_backward_leaves_no_gradient() -> None:
    model = Two()
    total = GradientSum(model, group=Group.alone(), accumulate_float64=True)
    total.begin()
    total.start_reduce()
    total.finish_reduce()
    total.divide(1.0)
    assert all(p.grad is None for p in model.parameters())


def test_buckets_follow_the_backward() -> None:
    named = [(str(i), nn.Parameter(torch.zeros(n))) for i, n in enumerate((6_000_000, 10, 300_000, 5))]
    buckets = fill_buckets(named, Group.alone(), accumulate_float64=True)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["3"], ["2", "1", "0"]]
    assert all(bucket.sum_dtype == torch.float64 and bucket.dtype == torch.float32 for bucket in buckets)


@pytest.mark.parametrize(
    ("dtype", "elements", "accumulate_float64", "slots"),
    [
        (torch.float32, 3, True, [1]),
        (torch.float32, 3, False, [1]),  # small enough to be widened
        (torch.float32, 300_000, False, [1, 0]),
        (torch.float32, 300_000, True, [1, 0]),
        (torch.float64, 300_000, False, [1]),
    ],
)
def test_the_last_bucket_is_of_float64(
    dtype: torch.dtype, elements: int, accumulate_float64: bool, slots: list[int]
) -> None:
    group = Group("data", range(2), own=0, handle=None, device=torch.device("cpu"))
    named = [("a", nn.Parameter(torch.zeros(elements, dtype=dtype)))]
    buckets = fill_buckets(named, group, accumulate_float64=accumulate_float64)
    assert [len(bucket.slots) for bucket in buckets] == slots
    assert buckets[-1].sum_dtype == torch.float64 and buckets[0].dtype == dtype


def test_buckets_with_a_tail_come_last_and_the_callers_numbers_in_the_last() -> None:
    ours, theirs = (Group(name, range(2), own=0, handle=None, device=torch.device("cpu")) for name in ("data", "some"))
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(300_000)), "b": nn.Parameter(torch.zeros(3))})
    total = GradientSum(model, group=ours, groups={"b": theirs}, accumulate_float64=False)
    total.begin(numbers=5)
    found = [(bucket.group, [slot.name for slot in bucket.slots], bucket.tail.numel()) for bucket in total.buckets]
    assert found == [(ours, ["a"], 0), (theirs, ["b"], 1), (ours, [], 1 + 5)]


def test_what_one_rank_has_is_not_widened() -> None:
    named = [("a", nn.Parameter(torch.zeros(3)))]
    buckets = fill_buckets(named, Group.alone(), accumulate_float64=False)
    assert [(len(bucket.slots), bucket.sum_dtype) for bucket in buckets] == [(1, torch.float32)]
    assert fill_buckets([], Group.alone(), accumulate_float64=False) == []


@pytest.mark.parametrize("accumulate_float64", [False, True])
def test_numbers_come_back_whatever_their_count(accumulate_float64: bool) -> None:
    model = Two()
    total = GradientSum(model, group=Group.alone(), accumulate_float64=accumulate_float64)
    for count in (1, 50, 0, 49):
        numbers = torch.randn(count, dtype=torch.float64)
        total.begin(numbers=count)
        total.expect_last()
        model.b.bias.sum().backward()
        total.start_reduce(numbers if count % 2 else numbers.tolist())
        assert total.finish_reduce() == numbers.tolist()
        total.divide(2.0)
        assert model.b.bias.grad.tolist() == [0.5, 0.5] and model.a.bias.grad is None


def test_small_neighbours_are_squared_together() -> None:
    assert squared_together([3, JOINED - 3, 1, JOINED + 1, 2, 5]) == [[0, 1], [2], [3], [4, 5]]
    torch.manual_seed(0)
    shapes = [(3, 2), (7,), (SQUARED_AT_ONCE + 5,), (), (4, 5), (0,)]
    numbers = [torch.randn(shape, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    numbers.append(torch.randn(5, 3).t())
    exact = math.fsum(float(one) ** 2 for tensor in numbers for one in tensor.flatten().tolist())
    found = sum_of_squares(iter(numbers))
    assert found.dtype is torch.float64 and float(found) == pytest.approx(exact, rel=1e-13)
    assert float(sum_of_squares([])) == 0


def test_parameters_of_several_types_are_kept_apart() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(3).double())})
    total = GradientSum(model, group=Group.alone(), accumulate_float64=True)
    total.begin()
    total.expect_last()
    (model["a"].sum() + 2 * model["b"].sum()).backward()
    total.start_reduce()
    total.finish_reduce()
    total.divide(1.0)
    assert model["a"].grad.dtype == torch.float32 and model["b"].grad.dtype == torch.float64
    assert model["b"].grad.tolist() == [2.0, 2.0, 2.0]


def test_a_gradient_that_arrives_twice_in_the_only_round_is_refused() -> None:
    parameter = nn.ParameterList([nn.Parameter(torch.zeros(3))])
    total = GradientSum(parameter, group=Group.alone(), accumulate_float64=True)
    total.begin(rounds=1)
    parameter[0].sum().backward()
    with pytest.raises(RunError, match="a second time within one backward"):
        parameter[0].sum().backward()


def test_a_gradient_that_arrives_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(grouping, "BUCKET_BYTES", 1)
    monkeypatch.setattr(Bucket, "_begin_sum", lambda _: None)
    model = Two()
    model.unused.requires_grad_(False)  # its bucket would come first, and never be full
    group = Group("data", range(2), own=0, handle=None, device=torch.device("cpu"))
    total = GradientSum(model, group=group, accumulate_float64=False)
    total.begin()
    total.expect_last()
    x = torch.randn(4, 3, requires_grad=True)
    twice = checkpoint(model, x, use_reentrant=True) + checkpoint(model, x, use_reentrant=True)
    with pytest.raises(RunError, match="a second time within one backward"):
        twice.sum().backward()


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="none of its parameters requires a gradient"):
        GradientSum(nn.ReLU(), group=Group.alone(), accumulate_float64=False)


def test_a_parameter_thawed_midway_is_refused() -> None:
    model = Two()
    model.a.weight.requires_grad_(False)
    total = GradientSum(model, group=Group.alone(), accumulate_float64=False)
    total.begin()
    model.a.weight.requires_grad_(True)
    with pytest.raises(RunError, match=r"a\.weight was frozen"):
        total.start_reduce()
        total.finish_reduce()
        total.divide(1.0)


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    total = GradientSum(model, group=Group.alone(), accumulate_float64=False)
    total.begin()
    with pytest.raises(RunError, match="dense gradients"):
        model(torch.tensor([1, 2])).sum().backward()


class Expert(nn.Module):
    """Scales by one parameter, and by that of an expert where it is hit."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.expert = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, *, hit: bool) -> torch.Tensor:
        return self.all * x * self.expert if hit else self.all * x


def experts_of_pairs(hitting: list[int]) -> tuple[list[float], dict[str, torch.Tensor | None]]:
    """Ranks 0 and 1 replicate one expert, 2 and 3 another; the ranks in `hitting` use theirs."""
    with group_of_all() as group:
        pair = group.mesh({"expert": 2, "data": 2})["data"]
        model = Expert()
        gradients = GradientSum(model, group=group, accumulate_float64=False, groups={"expert": pair})
        gradients.begin(numbers=1)
        gradients.expect_last()
        x = torch.full((3,), float(group.position + 1), dtype=torch.float64)
        model(x, hit=group.position in hitting).sum().backward()
        gradients.start_reduce([10.0])
        return gradients.finish_reduce(), {name: p.grad for name, p in model.named_parameters()}


def test_a_bucket_is_summed_over_its_own_group(ranks: KeptRanks) -> None:
    found = ranks.run(experts_of_pairs, [0, 1], size=4)
    for rank, (numbers, gradients) in enumerate(found):
        assert numbers == [40.0]
        torch.testing.assert_close(gradients["all"], torch.full((3,), 10.0, dtype=torch.float64))
        if rank < 2:
            torch.testing.assert_close(gradients["expert"], torch.full((3,), 3.0, dtype=torch.float64))
        else:  # the flag of another expert must not count
            assert gradients["expert"] is None
    one = [gradients["expert"] for _, gradients in ranks.run(experts_of_pairs, [0, 3], size=4)]
    assert [float(gradient[0]) for gradient in one] == [1.0, 1.0, 4.0, 4.0]


def negative_zeros() -> torch.Tensor:
    """The exact sum of a gradient of -0.0 on each rank."""
    with group_of_all() as group:
        parameter = nn.ParameterList([nn.Parameter(torch.zeros(3))])
        total = GradientSum(parameter, group=group, accumulate_float64=True)
        total.begin(rounds=1)
        (parameter[0] * -0.0).sum().backward()
        total.start_reduce()
        total.finish_reduce()
        return parameter[0].grad


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sum_of_zeros_is_positive(size: int, ranks: KeptRanks) -> None:
    for total in ranks.run(negative_zeros, size=size):
        assert total.tolist() == [0.0] * 3 and not total.signbit().any()
