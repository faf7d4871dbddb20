"""Exact sums against rational numbers: any magnitude, order and grouping; over ranks in tests/parallel."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from evenly.comm import exact_sum
from evenly.comm.exact_reduce import exact_norm
from evenly.comm.exact_sum import ExactSum

ELEMENTS = 100


def wide(rng: random.Random) -> float:
    return rng.choice([-1, 1]) * rng.random() * 10 ** rng.uniform(-30, 30)


def tie(rng: random.Random) -> float:
    """A few such numbers add up to a tie of float32, and the small ones tip it."""
    return rng.choice([-1, 1]) * (2**24 + rng.randrange(64)) * 2.0 ** rng.choice([0, 0, 0, -24, -53, -60, -90, -172])


def subnormal(rng: random.Random) -> float:
    return rng.choice([-1, 1]) * rng.randrange(1 << 20) * 2.0 ** rng.choice([-149, -149, -120, -90, 0, 100])


def equal_size(rng: random.Random) -> float:
    return rng.gauss(0, 1)


def in_float32(number: Fraction) -> float:
    """`number` rounded to the nearest float32, ties to even."""
    size, exponent = abs(number), -126
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return math.copysign(float(round(size / Fraction(2) ** (exponent - 23)) * Fraction(2) ** (exponent - 23)), number)


def added(numbers: list[torch.Tensor], rng: random.Random) -> torch.Tensor:
    """The sum of `numbers` in a random order, in random groups, as ranks would make it."""
    groups = [ExactSum(torch.zeros(ELEMENTS, dtype=torch.float64)) for _ in range(rng.randint(1, 4))]
    for number in rng.sample(numbers, len(numbers)):
        rng.choice(groups).add(number)
    total, *others = groups
    pairs = torch.cat([other.pairs() for other in (ExactSum(total.high[:0]), *others)])
    for other in others:
        total.add(other.high)
    total.add_pairs(pairs)
    result = torch.empty(ELEMENTS)
    total.round_into(result)
    return result


def without_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_sum, "_rounds", None)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_sum, "CHUNK", 7)


@pytest.mark.parametrize("how", [lambda _: None, without_flag, small_chunks])
@pytest.mark.parametrize("kind", [wide, tie, subnormal, equal_size])
def test_a_sum_is_the_exact_one_rounded_once(
    kind: Callable[[random.Random], float], how: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    how(monkeypatch)
    rng = random.Random(1)
    for count in (1, 2, 3, 5, 16):
        numbers = [torch.tensor([kind(rng) for _ in range(ELEMENTS)], dtype=torch.float32) for _ in range(count)]
        exact = [sum(map(Fraction, column)) for column in zip(*(n.tolist() for n in numbers), strict=True)]
        expected = torch.tensor([in_float32(Fraction(one)) for one in exact], dtype=torch.float32)
        for _ in range(4):
            assert torch.equal(added(numbers, rng), expected)


def test_float64_alone_is_tipped() -> None:
    """What the tests above would not notice if their numbers were too tame."""
    rng = random.Random(1)
    numbers = [torch.tensor([tie(rng) for _ in range(9000)], dtype=torch.float32) for _ in range(5)]
    one, other = sum(n.double() for n in numbers), sum(n.double() for n in reversed(numbers))
    assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    assert (one.float() != other.float()).any()


def test_numbers_of_one_size_need_no_low_terms() -> None:
    total = ExactSum(torch.zeros(ELEMENTS, dtype=torch.float64))
    for seed in range(20):
        total.add(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)))
    assert not total.has_low_terms and total.pairs().shape == (0, 2)
    assert total.rounded().data_ptr() == total.high.data_ptr()


def test_there_are_never_more_than_eight_low_terms() -> None:
    rng = random.Random(2)
    total = ExactSum(torch.zeros(ELEMENTS, dtype=torch.float64))
    for _ in range(300):
        total.add(
            torch.tensor([math.ldexp(rng.choice([-1, 1]) * (1 + rng.random()), rng.randint(-149, 127))] * ELEMENTS)
        )
    if total._pairs:
        total._merge()
    assert 4 <= len(total.pairs()) / ELEMENTS <= 8


@pytest.mark.parametrize("first", [math.inf, math.nan, 1.0])
def test_what_is_not_finite_stays_so(first: float) -> None:
    numbers = [first, -math.inf, 1e30, 1e-30, 1.0]
    for seed in range(6):
        total = ExactSum(torch.zeros(1, dtype=torch.float64))
        for number in random.Random(seed).sample(numbers, len(numbers)):
            total.add(torch.tensor([number]))
        result = total.rounded().item()
        assert result == -math.inf if first == 1.0 else math.isnan(result)


def test_zeros_have_no_sign() -> None:
    for count in (1, 2):
        total = ExactSum(torch.full((3,), -0.0, dtype=torch.float64))
        for _ in range(count):
            total.add(torch.full((3,), -0.0))
        result = torch.empty(3)
        total.round_into(result)
        assert not torch.signbit(result).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    numbers = [torch.tensor([equal_size(rng) * 2.0 ** rng.choice([0, -60])] * 3).to(dtype) for _ in range(9)]
    results: list[list[float]] = []
    for seed in range(4):
        total = ExactSum(torch.zeros(3, dtype=torch.float64))
        for number in random.Random(seed).sample(numbers, len(numbers)):
            total.add(number)
        results.append(total.rounded().tolist())
    exact = sum(Fraction(number[0].item()) for number in numbers)
    assert all(result == results[0] for result in results)
    assert abs(Fraction(results[0][0]) - exact) <= abs(exact) * Fraction(2) ** -52


def test_the_exact_norm_is_that_of_rational_numbers() -> None:
    rng = random.Random(4)
    numbers = [wide(rng) for _ in range(500)] + [1e-45, 3e38, 0.0]
    tensor = torch.tensor(numbers, dtype=torch.float32)
    expected = math.sqrt(sum(Fraction(one) ** 2 for one in tensor.tolist()))
    assert exact_norm([tensor], None) == expected
    mixed = tensor[torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))]
    assert exact_norm([mixed[:100], mixed[100:].view(13, -1)], None) == expected
