"""Blocks as compiled kernels: the numbers of one device, dropout on, under every way to cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import Classifier, classifier_job, tower_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.errors import PlanError, RunError
from evenly.launcher.environment import cpp_compiler
from evenly.parallel.core import compiled
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference

STEPS = 3


def job() -> evenly.Job:
    return tower_job(precision="float64")


def compare(plan: str, folder: Path, backend: str) -> tuple[RankComparison, int]:
    """And how many graphs were compiled."""
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **how: object) -> object:
        from torch._dynamo.backends.registry import lookup_backend

        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs, **how)

    torch.compiler.reset()
    before, compiled.BACKEND = compiled.BACKEND, counted
    try:
        return compare_job(job(), plan, STEPS, folder), len(graphs)
    finally:
        compiled.BACKEND = before


@pytest.mark.parametrize(
    ("plan", "size"),
    [
        ("balanced-dp replicas=2", 1),
        ("ddp", 2),
        ("zero2 recompute=selective", 2),
        ("zero3 recompute=full", 2),
        ("zero3 offload=parameters", 1),
    ],
)
def test_graphs_of_blocks_compute_what_one_device_does(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    plan += " compile=blocks"
    keep_reference(job(), STEPS, tmp_path / "reference")
    traces, graphs = zip(*ranks.run(compare, plan, tmp_path, "aot_eager", size=size), strict=True)
    row = judge(plan, list(traces))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert all(count > 0 for count in graphs)


class Dropping(nn.Module):
    """One kind of block, few kernels: each takes a C++ compiler seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.skipif(cpp_compiler() is None, reason="kernels for the CPU need a C++ compiler")
def test_kernels_draw_and_compute_what_the_blocks_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv(
        "TORCHINDUCTOR_VEC_ISA_OK", "1"
    )  # else it compiles a trial, which takes minutes on some machines
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # for two files it is not worth it
    torch.compiler.reset()
    small = classifier_job(model=Dropping, precision="float64", microbatch=5, steps=2)
    keep_reference(small, 2, tmp_path / "reference")
    row = judge("single", [compare_job(small, "single compile=blocks", 2, tmp_path)])
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert [*(tmp_path / "kernels").rglob("*.so")]


class Normed(nn.Module):
    """Blocks that keep running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Counting(nn.Module):
    """A block that changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().mean(0)
        return self.feed(x)


class Counted(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))


def test_blocks_that_keep_statistics_are_refused() -> None:
    with (
        pytest.raises(PlanError, match=r"layer blocks\.0\.1 keeps running statistics"),
        evenly.start(classifier_job(model=Normed), plan="single compile=blocks"),
    ):
        pass


def test_models_without_blocks_are_refused() -> None:
    with (
        pytest.raises(PlanError, match=r"compile=blocks\n.*no repeated blocks"),
        evenly.start(classifier_job(model=Classifier), plan="single compile=blocks"),
    ):
        pass


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlanError, match=r"a C\+\+ compiler"):
        compiled.check_compilable(nn.Linear(2, 2), "cpu")


def count(plan: str) -> str:
    compiled.BACKEND = "aot_eager"
    torch.compiler.reset()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("evenly.train.run.check_model", lambda *_: {})  # which finds it before the first step
            run = evenly.start(classifier_job(model=Counted), plan=plan)
        with run:
            try:
                run.step(next(run.batches()))
            except RunError as problem:  # here, so that the run ends as if nothing had failed
                return str(problem)
            return "nothing"
    finally:
        compiled.BACKEND = "inductor"


def test_a_buffer_that_a_graph_changes_is_found(ranks: KeptRanks) -> None:
    for text in ranks.run(count, "ddp compile=blocks", size=2):
        assert "buffer blocks.0.seen changes in the forward pass" in text
