"""Several devices in one process: the numbers of one device, no operation across devices, memory where it belongs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from jobs import ALL_JOBS, Block, classifier_job
from torch import nn
from torch.nn import functional as F

import evenly
from evenly.errors import PlanError
from evenly.parallel.core.memory import HOST, MemoryCounter, on
from evenly.parallel.data.replicas import GatheredReplica, Replicas
from evenly.train.step import counting_memory
from evenly.verify.compare import judge
from evenly.verify.ranks import compare_job, keep_measured_reference, keep_reference

STEPS = 5
PLANS = ["dp replicas=2", "balanced-dp replicas=3", "replicas=5 output_device=4"]  # a short batch has 3 microbatches


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.full_but("classifier", "tower")
@pytest.mark.parametrize("name", ALL_JOBS)
def test_replicas_compute_what_one_device_computes(name: str, tmp_path: Path) -> None:
    job = ALL_JOBS[name](precision="float64")
    keep_reference(job, STEPS, tmp_path / "reference")
    for plan in PLANS + ["balanced-dp replicas=2 recompute=full"] * (name == "tower"):
        row = judge(plan, [compare_job(job, plan, STEPS, tmp_path)])
        assert (row.status, row.reason) == ("equal", ""), plan
        assert row.param_diff is not None and row.param_diff < 1e-10


@pytest.mark.full_but("float32")
@pytest.mark.parametrize("precision", ["float32", "float16", "pure-bfloat16"])
def test_replicas_have_the_bits_of_one_device(precision: str, tmp_path: Path) -> None:
    for job in (factory(precision=precision) for factory in ALL_JOBS.values()):
        keep_measured_reference(job, STEPS, tmp_path, ["sums"])
        for plan in ("single", *PLANS):
            row = judge(plan, [compare_job(job, f"{plan} exact=bitwise", STEPS, tmp_path)])
            assert (row.status, row.bits_differ) == ("equal", 0), row


@pytest.mark.full_but("language")
@pytest.mark.parametrize("name", ALL_JOBS)
def test_no_operation_mixes_tensors_of_two_devices(name: str) -> None:
    for plan in PLANS:
        with evenly.start(ALL_JOBS[name](), plan=plan) as run, counting_memory(run) as counter:
            for batch in run.batches():
                run.step(batch)
            run.evaluate()
        assert set(counter.peaks) - {HOST} == set(range(run.plan.devices or 0)) and not counter.mixed


class Named(NamedTuple):
    logits: torch.Tensor
    sizes: dict[str, Any]


class Odd(nn.Module):
    """Keyword arguments in, a nest out; an attribute that the loss reads."""

    temperature = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, *, points: torch.Tensor, shifts: list[torch.Tensor]) -> Named:
        return Named(self.layer(points) + shifts[0], {"count": torch.tensor(len(points)), "name": "odd"})


def odd_loss(model: Any, batch: Any) -> evenly.Loss:
    x, y = batch
    result = model(points=x, shifts=[x.new_ones(3)])
    assert isinstance(result, Named) and result.sizes["name"] == "odd"
    total = F.cross_entropy(result.logits / model.temperature, y, reduction="sum")
    return evenly.Loss(total, result.sizes["count"])


def test_keyword_arguments_and_nested_outputs_are_carried(tmp_path: Path) -> None:
    job = classifier_job(model=Odd, loss=odd_loss, precision="float64")
    keep_reference(job, 2, tmp_path / "reference")
    assert judge("dp", [compare_job(job, "dp replicas=3", 2, tmp_path)]).status == "equal"


def test_a_gathered_replica_is_called_on_its_own_device() -> None:
    numbers: list[int] = []

    class Seen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            numbers.extend(counter._numbers([x, torch.zeros(2)]))
            return x * 2

    with MemoryCounter() as counter:
        x = torch.ones(2, requires_grad=True)
        y = GatheredReplica(Seen(), (1, "cpu"), (0, "cpu"))(x)
        assert set(numbers) == {1} and counter._numbers([y]) == {0}
        y.sum().backward()
        assert x.grad is not None and counter._numbers([x.grad]) == {0}


def test_replicas_follow_the_first() -> None:
    modules = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    replicas = Replicas(modules, ["cpu"] * 3)
    with torch.no_grad():
        modules[0][0].weight.fill_(7)
        modules[0][1].running_mean.fill_(5)
    assert not any(r.module[0].weight.eq(7).any() for r in replicas[1:])
    replicas.refresh()
    for replica in replicas:
        assert replica.module[0].weight.eq(7).all() and replica.module[1].running_mean.eq(5).all()


class Cut(nn.Module):
    """Computes with an attribute that is a view of a weight, which a copy of the module would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.rows = self.layer.weight.detach()[:3]
        self.lock = threading.Lock()  # and what cannot be copied at all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layer(x), self.rows)


def test_a_replica_keeps_what_hangs_together(tmp_path: Path) -> None:
    job = classifier_job(model=Cut, precision="float32")  # another would be cast, and torch does not cast the view
    keep_reference(job, 3, tmp_path / "reference")
    for plan in ("single exact=bitwise", "balanced-dp replicas=3 exact=bitwise"):
        assert judge(plan, [compare_job(job, plan, 3, tmp_path)]).bits_differ == 0


def test_a_model_that_is_the_same_each_time_is_refused() -> None:
    model = nn.Linear(5, 3)
    with pytest.raises(PlanError, match="weight is the same tensor in all"):
        evenly.start(classifier_job(model=lambda: model), plan="dp replicas=2")


# --- memory ---------------------------------------------------------------------------------------------


def wide_job() -> evenly.Job:
    """Outputs far larger than the model, as of a large vocabulary."""
    return classifier_job(
        model=lambda: nn.Linear(5, 3000),
        eval_data=None, global_batch=36, microbatch=9, steps=1, schedule=None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip


def peaks_of(plan: str) -> list[int]:
    with evenly.start(wide_job(), plan=plan) as run, counting_memory(run) as counter:
        for batch in run.batches():
            run.step(batch)
    return [counter.peak_bytes(number) for number in range(run.plan.devices or 0)]


def test_gathered_outputs_burden_one_device_and_kept_ones_none() -> None:
    for gather in (0, 2):
        peaks = peaks_of(f"replicas=4 output_device={gather}")
        assert peaks.index(max(peaks)) == gather and max(peaks) > 1.3 * sum(peaks) / 4
    peaks = peaks_of("balanced-dp replicas=4")
    assert max(peaks) < 1.05 * sum(peaks) / 4


def test_memory_is_counted_from_allocation_to_release() -> None:
    with MemoryCounter() as counter:
        counter.category = "activations"
        x = torch.zeros(100)
        y = x.view(10, 10)[3:]  # of the same storage
        counter.category = "temporaries"
        z = x.double()
        assert counter.now == {(0, "activations"): 400, (0, "temporaries"): 800}
        del z
        assert counter.now[0, "temporaries"] == 0
        with on(1):
            other = torch.zeros(5, dtype=torch.int8)
        del x
        assert counter.now[0, "activations"] == 400
        assert not counter.mixed
        y[0, :5] + other
        assert counter.mixed == {"aten.add.Tensor of devices [0, 1]"}
        del y
        assert counter.now[0, "activations"] == 0
        counter.track([other], "optimizer", 3)
        assert counter.now[1, "temporaries"] == 0 and counter.now[3, "optimizer"] == 5
    assert counter.peaks[0] == {"activations": 400, "temporaries": 800} and counter.peak_bytes(0) == 1200


def test_a_storage_that_is_resized_counts_its_size_of_now() -> None:
    with MemoryCounter() as counter:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert counter.now[0, "activations"] == 0
        x.untyped_storage().resize_(400)
        assert counter.now[0, "parameters"] == 400 and counter.now[0, "activations"] == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_activations_and_the_optimizer_are_told_apart() -> None:
    job = ALL_JOBS["tower"](model=lambda: nn.Sequential(nn.Embedding(11, 6), Block(6), nn.Linear(6, 11)))
    with evenly.start(job, plan="single exact=rounding") as run, counting_memory(run) as counter:
        for batch in run.batches():
            run.step(batch)
    parameters = sum(p.nbytes for p in run.model.parameters())
    used = sum(p.nbytes for p in run.model.parameters() if p.grad is not None)
    peak = counter.peaks[0]
    assert peak["parameters"] == parameters
    assert 2 * used <= peak["optimizer"] <= 2 * used + 100  # AdamW: two moments and a count per parameter
    assert peak["activations"] > peak["parameters"]
