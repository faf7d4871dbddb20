"""Training with parameters that are split over the tensor axis, held against one device."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from jobs import output_types
from jobs_tensor import TENSOR_JOBS, packed_job, threes_job
from kept_ranks import KeptRanks
from kept_references import References
from torch import nn

import evenly
from evenly.comm import collectives as comm_collectives
from evenly.comm import operations, shared_memory
from evenly.comm.shared_memory import SharedMemory
from evenly.engine import compose
from evenly.errors import EvenlyError
from evenly.parallel.data.ownership import Ownership
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_measured_reference

STEPS = 4  # the last has the short batch of the epoch


def prepared(path: str, **changes: Any) -> evenly.Job:
    name, _, kv_heads = path.partition("-")
    if kv_heads:
        changes["kv_heads"] = int(kv_heads)
    return TENSOR_JOBS[name](**{"precision": "float64", **changes})


def compared(name: str, plan: str, folder: Path) -> RankComparison:
    return compare_job(prepared(name), plan, STEPS, folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Of the jobs of this module."""
    return References(tmp_path_factory, prepared, STEPS)


@pytest.mark.full_but(
    "heads-4-tensor=2-*",
    "packed-tensor=2-*",
    "encoder-tensor=2-*",
    "norm first-tensor=2 *",
    "decoder-tensor=2-*",
    "threes-tensor=2-*",
    "packed-tensor=2 tensor_exclude=*",
    "packed-data=2 tensor=2 zero=3-*",
    "packed-data=1 tensor=2 zero=3 *",
    "heads-4-tensor=2 sequence*",
)
@pytest.mark.parametrize(
    ("name", "plan", "size", "sharded"),
    [
        ("heads-4", "tensor=2", 2, 0.95),
        ("heads-2", "tensor=2", 2, 0.95),
        ("heads-1", "tp", 2, 0.85),
        ("heads-2", "tp", 4, 0.8),
        ("packed", "tensor=2", 2, 0.95),
        ("packed", "tensor=4", 4, 0.95),
        ("encoder", "tensor=2", 2, 0.95),
        ("encoder", "tensor=4", 4, 0.95),
        ("norm first", "tensor=2 recompute=selective", 2, 0.95),
        ("norm first", "data=2 tensor=2 zero=3", 4, 0.95),
        ("norm first", "tensor=4", 4, 0.95),
        ("decoder", "tensor=2", 2, 0.95),
        ("decoder", "tensor=4", 4, 0.95),
        ("threes", "tensor=2", 2, 0.35),  # not the attention of three heads
        ("heads-4", "tensor=2 recompute=full", 2, 0.95),
        ("packed", "tensor=2 recompute=selective", 2, 0.95),
        ("packed", "tensor=2 offload=optimizer", 2, 0.95),
        ("packed", "tensor=2 tensor_exclude=embed.*|head.*", 2, 0.3),
        ("heads-2", "data=2 tensor=2", 4, 0.95),
        ("heads-2", "data=2 tensor=2 zero=1", 4, 0.95),
        ("packed", "data=2 tensor=2 zero=2", 4, 0.95),
        ("packed", "data=2 tensor=2 zero=3", 4, 0.95),
        ("heads-4", "data=2 tensor=2 zero=3 recompute=full", 4, 0.95),
        ("threes", "data=2 tensor=2 zero=1", 4, 0.95),
        ("packed", "data=1 tensor=2 zero=2", 2, 0.95),
        ("packed", "data=1 tensor=2 zero=3 offload=parameters", 2, 0.95),
        ("heads-4", "tensor=2 sequence_parallel=on", 2, 0.95),
        ("heads-2", "tensor=4 sequence_parallel=on", 4, 0.8),
        ("packed", "tensor=2 sequence_parallel=on recompute=full", 2, 0.95),
        ("encoder", "tensor=2 sequence_parallel=on", 2, 0.95),
        ("decoder", "tensor=4 sequence_parallel=on", 4, 0.95),
        ("packed", "data=2 tensor=2 zero=3 sequence_parallel=on", 4, 0.95),
    ],
)
def test_a_split_model_computes_what_one_device_does(
    name: str, plan: str, size: int, sharded: float, references: References, ranks: KeptRanks
) -> None:
    row = judge(plan, ranks.run(compared, name, plan, references(name), size=size))
    assert row.status == "equal", row.reason
    assert row.param_diff is not None
    assert 0 < row.param_diff < 1e-11
    assert row.sharded is not None
    assert row.sharded >= sharded


@pytest.mark.full_but("packed-*")
@pytest.mark.parametrize("way", ["marks", "meetings over gloo", "gloo"])
@pytest.mark.parametrize(
    ("name", "plan", "size"),
    [("packed", "tensor=2", 2), ("decoder", "tensor=4", 4), ("norm first", "data=2 tensor=2 zero=3 recompute=full", 4)],
)
def test_the_way_of_sums_makes_no_difference(
    name: str, plan: str, size: int, way: str, references: References, ranks: KeptRanks
) -> None:
    row = judge(plan, ranks.run(compared_by_way, name, plan, references(name), way, size=size))
    assert row.status == "equal", row.reason


def compared_by_way(name: str, plan: str, folder: Path, way: str) -> RankComparison:
    """All sums of the tensor axis go that way; in memory that ranks share, or over gloo alone."""
    add_up, sums = SharedMemory.add_up, Counter[str]()

    def counted(memory: SharedMemory, *given: Any) -> float:
        sums["marks" if memory.marks is not None else "meetings over gloo"] += 1
        return add_up(memory, *given)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(SharedMemory, "add_up", counted))
        if way == "meetings over gloo":
            patches.enter_context(mock.patch.object(platform, "machine", lambda: "aarch64"))
            patches.enter_context(mock.patch.object(shared_memory, "WORTH_BYTES", 1))
        elif way == "gloo":
            patches.enter_context(mock.patch.object(compose, "share_memory", lambda _: None))  # pyright: ignore
        found = compared(name, plan, folder)
    assert (sums[way] >= 4 * BLOCKS * STEPS) == (way != "gloo")
    assert not {*sums} - {way}
    return found


def test_sixteen_bits_agree_up_to_rounding(tmp_path: Path, ranks: KeptRanks) -> None:
    keep_measured_reference(prepared("packed", precision="bfloat16"), STEPS, tmp_path, ["forward"])
    row = judge("tensor=2", ranks.run(compared_in_bfloat16, tmp_path))
    assert row.status in ("equal", "rounding"), row.reason
    assert row.bits_differ is None


def compared_in_bfloat16(folder: Path) -> RankComparison:
    return compare_job(prepared("packed", precision="bfloat16"), "tensor=2", STEPS, folder, "forward")


# ------------------------------------------------------------------------------------------------- communication
def collectives(name: str, plan: str) -> Counter[str]:
    """On the tensor axis in one microbatch: in which pass, and over activations or over what is smaller."""
    found: Counter[str] = Counter()
    within = ["forward"]

    def counted(operation: Any, kind: str) -> Callable[..., Any]:
        begin = operation.begin

        def count(tensor: torch.Tensor, group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.name == "tensor" and tensor.is_floating_point() and tensor.dim() > 0:
                size = "" if tensor.dim() > 2 else "small "
                found[f"{within[0]} {size}{kind}"] += 1
            return begin(tensor, group, *args, **kwargs)

        return count

    with evenly.start(prepared(name, global_batch=4), plan=plan, steps=1) as run:
        executor: Any = run.executor
        backward = executor._backward

        def noted(loss: evenly.Loss, scale: float) -> None:
            within[0] = "backward"
            backward(loss, scale)
            within[0] = "update"

        executor._backward = noted
        with pytest.MonkeyPatch.context() as patch:
            for kind in ("all_reduce", "all_gather", "reduce_scatter"):
                operation = getattr(operations, kind)
                patch.setattr(operation, "begin", counted(operation, kind))
            patch.setattr(comm_collectives, "sum_at_once", lambda tensor, group: operations.all_reduce(tensor, group))
            for batch in run.batches():
                run.step(batch)
    return found


BLOCKS = 2


@pytest.mark.full_but("packed")
@pytest.mark.parametrize("name", ["heads-4", "packed", "encoder", "norm first"])
def test_a_block_sums_twice_forward_and_twice_backward(name: str, ranks: KeptRanks) -> None:
    for found in ranks.run(collectives, name, "tensor=2"):
        assert found == {
            "forward all_reduce": 2 * BLOCKS + 1,  # and the lookup
            "forward small all_reduce": 2,  # of the loss
            "backward all_reduce": 2 * BLOCKS + 1,  # and what goes into the head
            "update small all_reduce": 2,  # losses and weights, the norm
        }


@pytest.mark.full_but("heads-4-*")
@pytest.mark.parametrize(("name", "positions"), [("heads-4", 1), ("packed", 0), ("encoder", 0), ("norm first", 0)])
def test_along_the_sequence_a_sum_is_half_scattered_and_half_gathered(
    name: str, positions: int, ranks: KeptRanks
) -> None:
    for found in ranks.run(collectives, name, "tensor=2 sequence_parallel=on"):
        activations = {what: count for what, count in found.items() if "small" not in what}
        assert activations == {
            "forward reduce_scatter": 2 * BLOCKS + 1,
            "forward all_gather": 2 * BLOCKS + 1,
            "backward reduce_scatter": 2 * BLOCKS + 1,
            "backward all_gather": 2 * BLOCKS
            + 1
            + positions,  # the gradient of whole positions, of which a part is added
        }


def norm_of_whole_parameters() -> float:
    """Of a gradient that the ranks should hold alike, and that came out one bit apart."""
    with evenly.start(prepared("packed"), plan="tensor=2") as run:
        group = run.world.group("tensor")
        gradient = torch.tensor([1.0 + group.position * 2.0**-52], dtype=torch.float64)
        return float(Ownership(tensor_group=group).norm([("weight", gradient)]))


def test_all_ranks_have_one_norm(ranks: KeptRanks) -> None:
    assert ranks.run(norm_of_whole_parameters) == [1.0, 1.0]


# --------------------------------------------------------------------------------------------------- checkpoints
def train(name: str, plan: str, steps: int, out: Path | None, resume: bool) -> dict[str, Any]:
    """The whole tensors after `steps` steps."""
    with evenly.start(prepared(name), plan=plan, out=out, steps=steps, resume=resume) as run:
        for batch in run.batches():
            run.step(batch)
        if out is not None and not resume:
            run.save()
        named = {n: t.detach().clone() for n, t in run.model.named_parameters()}
        return {n: run.composed.full_view(n, t) for n, t in named.items()}


@pytest.mark.full_but("tensor=2-2-ddp-1", "data=2 tensor=2 zero=3-4-zero2-2")
@pytest.mark.parametrize(
    ("first", "size", "then", "size_then"),
    [
        ("tensor=2", 2, "ddp", 1),
        ("ddp", 2, "tensor=2", 2),
        ("data=2 tensor=2", 4, "tensor=4", 4),
        ("tensor=2", 2, "data=2 tensor=2 zero=1", 4),
        ("data=2 tensor=2 zero=3", 4, "zero2", 2),
    ],
)
def test_a_run_goes_on_under_another_plan(
    first: str, size: int, then: str, size_then: int, tmp_path: Path, ranks: KeptRanks
) -> None:
    expected = ranks.run(train, "packed", "ddp", 6, None, False, size=1)[0]
    ranks.run(train, "packed", first, 3, tmp_path / "run", False, size=size)
    for found in ranks.run(train, "packed", then, 6, tmp_path / "run", True, size=size_then):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() < 1e-11, name


# ------------------------------------------------------------------------------------------------------ refusals
class Numbers(nn.Module):
    """Its code asks for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(hidden / x.abs().max().item())


class Filters(nn.Module):
    """Nothing in it can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.norm = nn.Conv1d(1, 3, 5), nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.filter(x[:, None]).flatten(1))


REFUSED: dict[str, tuple[Callable[[], evenly.Job], str, str]] = {
    "nothing": (lambda: threes_job(model=Filters), "tensor=2", "no parameter of the model can be split over 2 ranks"),
    "all-whole": (packed_job, "tensor=2 tensor_exclude=*", "is excluded by '*'"),
    "misspelt": (packed_job, "tensor=2 tensor_exclude=heed.weight", "close: head.weight"),
}


def refusal(name: str) -> str:
    job, plan, _ = REFUSED[name]
    try:
        with evenly.start(job(), plan=plan):
            return "nothing"
    except EvenlyError as problem:
        return str(problem)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_on_all_ranks(name: str, ranks: KeptRanks) -> None:
    said = ranks.run(refusal, name)
    assert said[0] == said[1]
    assert REFUSED[name][2] in said[0]


def trained_by_numbers(plan: str) -> tuple[float, float]:
    with evenly.start(threes_job(model=Numbers), plan=plan, steps=2) as run:
        losses = [run.step(batch).loss for batch in run.batches()]
        return losses[-1], run.composed.sharded


def test_code_that_asks_for_numbers_is_split(ranks: KeptRanks) -> None:
    ((alone, _),) = ranks.run(trained_by_numbers, "single", size=1)
    for loss, share in ranks.run(trained_by_numbers, "tensor=2"):
        assert abs(loss - alone) < 1e-12 and share > 0.8


def types_of(name: str, plan: str) -> list[tuple[str, list[torch.dtype]]]:
    return output_types(prepared(name, precision="bfloat16"), plan)


@pytest.mark.full_but("heads-2", "decoder")
@pytest.mark.parametrize("name", ["heads-2", "packed", "encoder", "decoder", "threes"])
def test_results_of_modules_in_16_bits_have_the_types_that_they_have_on_one_device(name: str, ranks: KeptRanks) -> None:
    (alone,) = ranks.run(types_of, name, "single", size=1)
    assert {one for _, types in alone for one in types} >= {torch.bfloat16}
    assert ranks.run(types_of, name, "tensor=2") == [alone, alone]
