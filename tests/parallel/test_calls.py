"""What a block draws does not depend on what ran before it."""

from __future__ import annotations

from typing import Any

import torch
from jobs import tower_job
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenly
from evenly.data.generators import undisturbed
from evenly.model.blocks import find_blocks
from evenly.parallel.core.calls import BlockCalls, WrappedForwards, own_forward
from evenly.verify.reference import named_state


class Noisy(nn.Module):
    """Adds noise, and keeps what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand([])
        self.drawn.append(float(noise))
        return x + noise


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))
        self.after: list[float] = []

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
            self.after.append(float(torch.rand([])))
        return x


def drawn(key: int, skip: int = -1) -> tuple[list[list[float]], list[float]]:
    model = Chain()
    calls = BlockCalls(find_blocks(model), "cpu")
    with undisturbed(), calls.drawing(key):
        model(torch.ones(3), skip)
    return [block.drawn for block in model.blocks], model.after  # pyright: ignore[reportReturnType]


def test_a_block_draws_the_same_whether_or_not_another_ran_before() -> None:
    blocks, after = drawn(7)
    assert len({*blocks[0], *blocks[1], *blocks[2], *after}) == 6
    assert drawn(7) == (blocks, after)
    without, after_without = drawn(7, skip=0)
    assert without == [[], blocks[1], blocks[2]]
    assert after_without[1:] == after[1:]
    assert drawn(8)[0] != blocks


def test_a_block_that_is_called_twice_draws_twice() -> None:
    model = Chain()
    calls = BlockCalls(find_blocks(model), "cpu")
    with undisturbed(), calls.drawing(7):
        model(model(torch.ones(3)))
    first = [block.drawn[0] for block in model.blocks]  # pyright: ignore
    assert first == [numbers[0] for numbers in drawn(7)[0]]
    assert all(len(set(block.drawn)) == 2 for block in model.blocks)  # pyright: ignore


def test_outside_of_a_microbatch_the_generator_is_the_callers_own() -> None:
    model = Chain()
    calls = BlockCalls(find_blocks(model), "cpu")
    with undisturbed(), calls.drawing(7):
        model(torch.ones(3))
    with undisturbed():
        torch.manual_seed(3)
        expected = [float(torch.rand([])) for _ in range(6)]
        torch.manual_seed(3)
        model.after.clear()
        model(torch.ones(3))
    seen = [
        number for block, after in zip(model.blocks, model.after, strict=True) for number in (block.drawn[1], after)
    ]  # pyright: ignore
    assert seen == expected
    calls.close()
    assert all(block._compiled_call_impl is None for block in model.blocks)


def test_what_ran_in_the_place_of_a_call_still_does() -> None:
    """`module.compile()` puts it there."""
    model = Chain()
    before: Any = model.blocks[1]
    before._compiled_call_impl = lambda x: 2 * before._call_impl(x)
    calls = BlockCalls(find_blocks(model), "cpu")
    with undisturbed(), calls.drawing(7):
        twice = model(torch.zeros(3))
    calls.close()
    drawn = [block.drawn[0] for block in model.blocks]  # pyright: ignore
    assert torch.allclose(twice, torch.full((3,), 2 * (drawn[0] + drawn[1]) + drawn[2]))
    assert before._compiled_call_impl is not None and model.blocks[0]._compiled_call_impl is None


class Multiplied(Noisy):
    """Its backward needs what it drew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (super().forward(x) - x)


class Checkpointed(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Multiplied() for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return checkpoint(super().forward, x, skip, use_reentrant=False)


def test_a_block_that_the_model_computes_again_draws_the_same() -> None:
    """Where it is called several times, as often as in the forward; torch has restored the seed before each."""
    model = Checkpointed()
    calls = BlockCalls(find_blocks(model), "cpu")
    with undisturbed():
        with calls.drawing(7):
            first = model(torch.ones(3, requires_grad=True)).sum()
        with calls.drawing(8):
            model(torch.ones(3))
        before = [list(block.drawn) for block in model.blocks], list(model.after)
        first.backward()
    assert [len(drawn) for drawn in before[0]] == [4, 2, 2]
    first_block = model.blocks[0].drawn
    assert sorted(first_block[4:]) == sorted(first_block[:2]) and first_block[0] != first_block[1]
    assert [block.drawn[2:] for block in model.blocks[1:]] == [block.drawn[:1] for block in model.blocks[1:]]
    assert model.after[6:] == model.after[:2]  # the last is not needed


def test_a_run_remembers_the_calls_of_one_step() -> None:
    remembered: list[int] = []
    with evenly.start(tower_job(steps=3), plan="single") as run:
        for batch in run.batches():
            run.step(batch)
            remembered.append(len(run.composed.calls[0]._begun) // len(batch.share.microbatches))
    assert remembered == [remembered[0]] * 3 and remembered[0] > 0


def test_blocks_get_the_forward_back_that_they_had() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    own: Any = lambda x: -x  # noqa: E731
    model[1].forward = own
    model[2] = compiled = torch.compile(model[2], backend="eager")  # pyright: ignore[reportArgumentType]
    before = compiled.forward

    def twice(_: Any, forward: Any) -> Any:
        return lambda x: 2 * forward(x)

    x = torch.ones(2, 3)
    wrapped = WrappedForwards(find_blocks(model), [twice, twice], asked="recompute=full")
    torch.testing.assert_close(model[0](x), 4 * own_forward(model[0])(x))
    torch.testing.assert_close(model[1](x), -4 * x)
    assert own_forward(model[1]) is own
    assert own_forward(model[2]) is compiled._orig_mod
    for _ in range(2):
        wrapped.close()
        assert model[1].forward is own and compiled.forward is before and "forward" not in vars(model[0])
    assert own_forward(model[1]) is own


def test_state_of_a_compiled_block_has_the_name_of_what_was_compiled() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(3, 3, bias=False), backend="eager"))  # pyright: ignore
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    next(model.parameters()).grad = torch.ones(3, 3)
    optimizer.step()
    assert [*named_state(model, optimizer)] == ["momentum_buffer of 0.weight"]
