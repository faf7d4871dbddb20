"""What the package does on a GPU and not elsewhere. Skipped without one: see tests/fake_cuda."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda.steps import TOKENS, make_job
from kept_ranks import KeptRanks
from parallel.test_repeated_forwards import gradients, named, positional
from torch import nn

import evenly
from evenly.comm.doctor import examine
from evenly.comm.exact_sum import ExactSum
from evenly.comm.host_numbers import on_device
from evenly.data.generators import seeded, undisturbed
from evenly.hardware.cluster_text import local_cluster
from evenly.hardware.probe import probe
from evenly.launcher.out_of_memory import is_out_of_memory
from evenly.parallel.data.gradients import sum_of_squares

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]

GPU = "cuda:0"


def steps(plan: str, **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    """The reports of the steps of a small job under `plan`, and its weights afterwards."""
    with evenly.start(replace(make_job(), **changes), plan=plan) as run:
        assert run.world.device == GPU
        reports = [run.step(batch) for batch in run.batches()]
        with run.whole_model(device="cpu") as model:
            return reports, {name: one.detach().double().numpy() for name, one in model.state_dict().items()}


def reports_of(plan: str, **changes: Any) -> list[tuple[float, float]]:
    return [(one.loss, one.grad_norm) for one in steps(plan, **changes)[0]]


@pytest.mark.parametrize(
    "plan",
    [
        "single recompute=full",
        "single recompute=selective",
        "single offload=optimizer",
        "data=1 zero=3",  # a process group of NCCL's with one rank
        "single offload=parameters zero=3",
        "single compile=blocks",
        "single exact=bitwise precision=float32",  # float64 has no wider type to add in
    ],
)
def test_plans_of_one_gpu_have_the_numbers_of_the_plain_one(ranks: KeptRanks, plan: str) -> None:
    precision = "float32" if "float32" in plan else "float64"  # dropout draws others for each
    plans = (f"single precision={precision}", plan if precision in plan else f"{plan} precision={precision}")
    [plain], [found] = (ranks.run(reports_of, one, size=1) for one in plans)
    for mine, expected in zip(found, plain, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5 if precision == "float32" else 1e-9)


class Reader(nn.Module):
    """Tokens (B, L) -> logits (B, L, TOKENS), by a recurrent layer, which cuDNN computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.head = nn.Embedding(TOKENS, 6), nn.LSTM(6, 5), nn.Linear(5, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.embed(tokens))[0])


@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
def test_a_recurrent_layer_has_the_weights_of_the_last_step(ranks: KeptRanks) -> None:
    plans = ("single precision=float64", "single zero=3 offload=parameters precision=float64")
    [plain], [found] = (ranks.run(weights_of_reader, one, size=1) for one in plans)
    for name, expected in plain.items():
        assert found[name] == pytest.approx(expected, rel=1e-9, abs=1e-12), name


def weights_of_reader(plan: str) -> dict[str, Any]:
    return steps(plan, model=Reader)[1]


def test_memory_is_the_allocators(ranks: KeptRanks) -> None:
    [[allocated, reported]] = ranks.run(reported_memory, size=1)
    assert 0 < allocated == reported


def reported_memory() -> list[int]:
    [*_, last] = steps("single")[0]
    return [torch.cuda.max_memory_allocated(), last.memory_bytes[0]]


def test_a_scale_that_overflows_is_halved_and_the_step_skipped(ranks: KeptRanks) -> None:
    [found] = ranks.run(overflowing, size=1)
    assert found["skipped"][0] == "overflow" and found["factor"] < found["first"]


def overflowing() -> dict[str, Any]:
    job = replace(make_job(), loss=large_loss)
    with evenly.start(job, plan="single precision=float16") as run:
        first = run.updaters.first.loss_scale.factor
        reports = [run.step(batch) for batch in run.batches()]
        return {
            "skipped": [one.skipped for one in reports],
            "first": first,
            "factor": run.updaters.first.loss_scale.factor,
        }


def large_loss(model: Any, batch: torch.Tensor) -> evenly.Loss:
    return evenly.Loss(model(batch[:, :-1]).float().square().sum() * 1e3, 1)


def test_the_host_waits_three_times_a_step(ranks: KeptRanks) -> None:
    [found] = ranks.run(waits, size=1)
    assert found == 3


def waits() -> int:
    """As torch counts them."""
    with evenly.start(make_job(), plan="single") as run:
        batches = run.batches()
        run.step(next(batches))
        batch = next(batches)
        with warnings.catch_warnings(record=True, action="always") as caught, reporting("warn"):
            run.step(batch)
        return sum("called a synchronizing" in str(one.message) for one in caught)


@contextmanager
def reporting(how: str) -> Iterator[None]:
    """Within, torch warns, or raises, where the host waits; it warns too that it may not notice all such places."""
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode(how)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_go_to_a_gpu_without_a_wait() -> None:
    with reporting("error"):
        found = on_device([1.0, 2.5], GPU)
    assert found.tolist() == [1.0, 2.5] and found.dtype is torch.float64


def test_random_numbers_of_the_gpu_are_seeded_and_put_back() -> None:
    def drawn() -> list[float]:
        return torch.rand(3, device=GPU).tolist()

    with seeded(7, GPU):
        first = drawn()
    with undisturbed(GPU):
        before = drawn()
    assert drawn() == before
    with seeded(7, GPU):
        assert drawn() == first


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("call", [positional, named])
def test_a_block_that_is_computed_again_draws_the_same_numbers(call: Any, recompute: str) -> None:
    plain, found = (gradients(drawn_like, call, how, GPU) for how in ("none", recompute))
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def drawn_like(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


def test_squares_take_no_copy_of_a_tensor(ranks: KeptRanks) -> None:
    [taken] = ranks.run(bytes_of_squares, 1 << 24, size=1)
    assert taken < 1 << 20


def bytes_of_squares(length: int) -> int:
    given = torch.ones(length, device=GPU)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert float(sum_of_squares([given])) == length
    return torch.cuda.max_memory_allocated() - before


def test_squares_and_exact_sums_are_those_of_the_cpu() -> None:
    numbers = [torch.randn(n) * 10.0**k for k, n in enumerate((5, 70_001, 3))]
    there = sum_of_squares(one.to(GPU) for one in numbers)
    assert there.is_cuda and float(there) == pytest.approx(float(sum_of_squares(numbers)), rel=1e-12)
    sums = [ExactSum(torch.zeros(70_001, dtype=torch.float64, device=device)) for device in ("cpu", GPU)]
    for one in (numbers[1], numbers[1] * 1e-9, -numbers[1]):
        for total in sums:
            total.add(one.to(total.high.device))
    assert torch.equal(sums[0].rounded(), sums[1].rounded().cpu())


def test_no_room_is_recognized() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**46, dtype=torch.uint8, device=GPU)
    assert is_out_of_memory(caught.value)


def test_the_machine_is_described() -> None:
    cluster = local_cluster()
    assert cluster.devices == torch.cuda.device_count() and cluster.kind != "cpu"
    assert any(one.name == GPU for one in examine({}, probe=False))
    rates = probe("cuda")
    assert set(rates.matmul) == {"float32", "tf32", "float16", "bfloat16"} and (rates.memory or 0) > 1e10


def test_a_run_goes_on_from_its_checkpoint(ranks: KeptRanks, tmp_path: Path) -> None:
    [[expected, found]] = ranks.run(resumed, tmp_path, size=1)
    assert found == pytest.approx(expected, rel=1e-9)


def resumed(out: Path) -> list[float]:
    job = replace(make_job(), precision="float64")
    with evenly.start(job, plan="single", out=out / "whole") as run:
        expected = [run.step(batch).loss for batch in run.batches()]
    with evenly.start(job, plan="single", out=out / "halves", steps=1) as run:
        run.step(next(run.batches()))
    with evenly.start(job, plan="data=1 zero=3", out=out / "halves", resume=True) as run:
        return [expected[-1], run.step(next(run.batches())).loss]
