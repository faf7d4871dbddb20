"""A model that no rank holds whole has the values of one that a rank builds alone."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ALL_JOBS, Tower, tower_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.comm.connect import connect, disconnect
from evenly.comm.groups import Group
from evenly.engine.build import check_same_start
from evenly.errors import RunError
from evenly.launcher.environment import find_here
from evenly.parallel.core import sharded_init as parking
from evenly.parallel.core.mutation_guard import fingerprint
from evenly.parallel.core.sharded_init import ShardedInit
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference


class Constructed(nn.Module):
    """What constructors do: initialise twice, tie, copy, keep views and buffers, compute one weight from another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 8)
        self.head = nn.Linear(8, 37, bias=False)
        self.head.weight = self.embed.weight
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.register_buffer("table", torch.outer(torch.arange(9.0), torch.arange(7.0)))
        self.whole = nn.Parameter(torch.randn(6, 11))
        self.first_rows = self.whole.detach()[:2]  # a view
        self.half = nn.Conv1d(5, 7, 3, dtype=torch.bfloat16)
        self.apply(_initialise)
        with torch.no_grad():
            self.layers[0].linear1.weight.copy_(self.layers[1].linear2.weight.T * 2)
            self.layers[1].linear1.weight[3:].mul_(self.embed.weight.norm())
            self.whole.clamp_(min=0)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.5)


def built_parked(wrong: bool) -> list[str]:
    """Names of tensors that differ from those of the model built alone, and what else is wrong."""
    world = connect(find_here())
    torch.manual_seed(7)
    alone = Constructed()
    torch.manual_seed(8 if wrong and world.rank == 1 else 7)
    problems: list[str] = []

    class Watched(ShardedInit):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            whole = [large for large in self._large.values() if large.slice is None]
            problems.extend(["several are whole"] * (len(whole) > 1))
            return result

    with Watched(world.group("data"), least_bytes=100) as parked:
        model = Constructed()
        parked.freeze()
        kept = sum(tensor.nbytes for tensor in alone.state_dict().values() if tensor.nbytes >= 100)
        kept -= alone.embed.weight.nbytes  # tied, and listed twice
        if not 0.8 * kept < parked.offloaded_bytes <= kept:
            problems.append(f"{parked.offloaded_bytes} of {kept} bytes are parked")
        try:
            check_same_start(model, world, parked)
        except RunError as problem:
            problems.append(problem.found)
    problems += [n for n, t in alone.state_dict().items() if not torch.equal(t, model.state_dict()[n])]
    if model.head.weight is not model.embed.weight or model.first_rows.data_ptr() != model.whole.data_ptr():
        problems.append("a tie is lost")
    if not torch.equal(model.first_rows, alone.first_rows) or torch.rand(1) != torch.rand(1, generator=_after(alone)):
        problems.append("a view or the random stream differs")
    disconnect(world)
    return sorted(set(problems))


def _after(_: nn.Module) -> torch.Generator:
    """The stream as it stands behind the construction."""
    draw = torch.Generator()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        Constructed()
        draw.set_state(torch.get_rng_state())
    return draw


@pytest.mark.parametrize("size", [1, 3])
def test_a_constructor_gives_the_same_values_one_tensor_at_a_time(size: int, ranks: KeptRanks) -> None:
    assert ranks.run(built_parked, False, size=size) == [[]] * size


def test_ranks_that_draw_other_numbers_are_found_though_parked(ranks: KeptRanks) -> None:
    problems = ranks.run(built_parked, True, size=2)
    assert all(any("on rank 1 differs from rank 0's" in text for text in found) for found in problems)


def compare_parked(plan: str, folder: Path) -> RankComparison:
    parking.LEAST_BYTES = 200
    try:
        return compare_job(ALL_JOBS["tower"](precision="float64"), plan, 2, folder)
    finally:
        parking.LEAST_BYTES = 1 << 20


def test_a_run_that_starts_parked_computes_what_one_device_computes(ranks: KeptRanks, tmp_path: Path) -> None:
    keep_reference(ALL_JOBS["tower"](precision="float64"), 2, tmp_path / "reference")
    row = judge("zero3", ranks.run(compare_parked, "zero3", tmp_path, size=2))
    assert (row.status, row.reason) == ("equal", "")


def test_what_reads_memory_past_torch_finds_it() -> None:
    with ShardedInit(Group.alone("data"), least_bytes=100) as parked:
        tensors = [torch.full((50,), float(n)) for n in range(5)]
        copied = copy.deepcopy(tensors[0])
        assert tensors[1].tolist() == [1.0] * 50
        seen = tensors[2].numpy()
        others = [torch.zeros(60) for _ in range(2)]
        assert parked.offloaded_bytes == 240 + 2 * 200  # all but what was read, its copy, and the last
        seen += 1
        del others
    assert copied.eq(0).all() and tensors[2].eq(3).all() and tensors[4].eq(4).all()


def test_what_is_overwritten_may_be_read_too() -> None:
    with ShardedInit(Group.alone("data"), least_bytes=100):
        flat = torch.arange(36.0)
        others = [torch.ones(50)]  # parks what came before, each time
        flat.copy_(flat)
        others.append(torch.ones(50))
        flat[:9].zero_()
        others.append(torch.ones(50))
        flat.view(6, 6).T.copy_(flat.clone().view(6, 6))
    assert torch.equal(flat.view(6, 6), torch.arange(36.0).mul(torch.arange(36) >= 9).view(6, 6).T)


def test_what_a_rank_keeps_is_its_part() -> None:
    known = fingerprint(torch.ones(50))
    with ShardedInit(Group.alone("data"), least_bytes=100) as parked:
        first = torch.ones(50)
        second = torch.ones(60)
        assert parked.fingerprint(first) == known
        assert parked.fingerprint(second) is None
        assert first.untyped_storage().nbytes() == 0 and parked.offloaded_bytes == 200
        shaped = first.view(5, 10)
        assert first.untyped_storage().nbytes() == 0  # a view that needs no memory
        assert shaped[1].sum() == 10
        assert second.untyped_storage().nbytes() == 0
        del first, shaped
        assert parked.offloaded_bytes == 240
    assert torch.equal(second, torch.ones(60))


def kept_of_the_whole(plan: str) -> list[str]:
    """Parameters of the constructor's that still hold memory when the run has started."""
    built: list[tuple[str, weakref.ref[Any]]] = []

    def model() -> nn.Module:
        tower = Tower()
        built.extend((name, weakref.ref(p)) for name, p in tower.named_parameters())
        return tower

    with evenly.start(tower_job(model=model), plan=plan):
        gc.collect()
        return [name for name, reference in built if reference() is not None]


def test_nobody_holds_on_to_whole_parameters(ranks: KeptRanks) -> None:
    assert ranks.run(kept_of_the_whole, "zero3", size=2) == [[], []]
    assert ranks.run(kept_of_the_whole, "zero3 recompute=full offload=parameters", size=1) == [[]]
