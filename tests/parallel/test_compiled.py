"""Blocks as compiled kernels: the numbers of one device, dropout on, under every way to cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Classifier, classifier_job, tower_job
from jobs_pipeline import Block, Chain, text_job
from kept_ranks import KeptRanks
from torch import nn

import evenly
from evenly.errors import PlanError, RunError
from evenly.launcher.environment import cpp_compiler
from evenly.model.blocks import find_blocks
from evenly.parallel.core import compiled
from evenly.verify.compare import RankComparison, judge
from evenly.verify.ranks import compare_job, keep_reference

STEPS = 3


def ragged_job() -> evenly.Job:
    """Of many shapes, each of which has a graph of its own or one for any size."""
    return tower_job(precision="float64")


class Short(Chain):
    def __init__(self) -> None:
        super().__init__(Block() for _ in range(4))


def even_job() -> evenly.Job:
    return text_job(model=Short, precision="float64", name="short")


@contextmanager
def counted(backend: str) -> Generator[list[torch.fx.GraphModule]]:
    """Within, blocks are compiled by `backend`; the graphs are in the list."""
    graphs: list[torch.fx.GraphModule] = []

    def compile_counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **how: object) -> object:
        from torch._dynamo.backends.registry import lookup_backend

        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs, **how)

    torch.compiler.reset()
    before, compiled.BACKEND = compiled.BACKEND, compile_counted
    try:
        yield graphs
    finally:
        compiled.BACKEND = before


def compare(make: Callable[[], evenly.Job], plan: str, folder: Path) -> tuple[RankComparison, int]:
    """And how many graphs were compiled."""
    with counted("aot_eager") as graphs:
        return compare_job(make(), plan, STEPS, folder), len(graphs)


def check(make: Callable[[], evenly.Job], plan: str, size: int, ranks: KeptRanks, folder: Path) -> None:
    """That ranks compile, and have the numbers of one device."""
    keep_reference(make(), STEPS, folder / "reference")
    traces, graphs = zip(*ranks.run(compare, make, plan, folder, size=size), strict=True)
    row = judge(plan, list(traces))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert all(count > 0 for count in graphs), graphs


@pytest.mark.full_but("even_job-ddp-2", "even_job-zero3 offload*", "even_job-pipeline=2-2", "ragged_job-balanced*")
@pytest.mark.parametrize(
    ("make", "plan", "size"),
    [
        (ragged_job, "balanced-dp replicas=2", 1),
        (even_job, "ddp", 2),
        (even_job, "zero2 recompute=selective", 2),
        (ragged_job, "zero3 recompute=full", 2),
        (even_job, "zero3 offload=parameters", 1),
        (even_job, "pipeline=2", 2),
        (even_job, "pipeline=2 schedule=zero-bubble recompute=full", 2),
        (even_job, "pipeline=2 schedule=zbv split_points=1|2|3", 2),
        (even_job, "pipeline=2 data=2 zero=3", 4),
    ],
)
def test_graphs_of_blocks_compute_what_one_device_does(
    make: Callable[[], evenly.Job], plan: str, size: int, ranks: KeptRanks, tmp_path: Path
) -> None:
    check(make, f"{plan} compile=blocks", size, ranks, tmp_path)


class Mixed(nn.Module):
    """A block with running statistics, dropout, and a layer that it calls twice in training."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.slow = nn.BatchNorm1d(5, momentum=0.7)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.feed(x))
        if self.training:
            h = self.norm(torch.tanh(h))
        return x + self.drop(self.slow(h))


class Normed(nn.Module):
    """Blocks that keep running statistics."""

    block: Callable[[], nn.Module] = Mixed
    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def normed_job() -> evenly.Job:
    return classifier_job(model=Normed, precision="float64")


class Averaging(Mixed):
    """One of its layers keeps a plain average of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.BatchNorm1d(5, momentum=None)


class Averaged(Normed):
    block = Averaging


def averaged_job() -> evenly.Job:
    return classifier_job(model=Averaged, precision="float64")


@pytest.mark.full_but("normed_job-ddp")
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (normed_job, "ddp"),
        (normed_job, "pipeline=2"),
        (normed_job, "zero3 recompute=full"),
        (averaged_job, "ddp"),  # in stages refused: the average asks for a number between blocks
    ],
)
def test_running_statistics_are_those_of_one_device(
    make: Callable[[], evenly.Job], plan: str, ranks: KeptRanks, tmp_path: Path
) -> None:
    check(make, f"{plan} compile=blocks", 2, ranks, tmp_path)


class Deep(Normed):
    depth = 5


def test_blocks_of_one_class_share_their_graph() -> None:
    deep = classifier_job(model=Deep, microbatch=5)
    with counted("eager") as graphs, evenly.start(deep, plan="single compile=blocks") as run:
        run.step(next(run.batches()))
        layers = [module for module in run.model.modules() if isinstance(module, nn.BatchNorm1d)]
        assert len(graphs) == 2  # of the first, whose input has no gradient, and of all others
        assert all("forward" in vars(layer) for layer in layers)
    assert all("forward" not in vars(layer) and not layer._forward_hooks for layer in layers)


class Sparse(Mixed):
    """Its way follows from numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.feed(x)
        return x + (self.drop(h) if h.sum().item() > 0 else h)


class Searching(Normed):
    block = Sparse


class Bound(Normed):
    """Blocks with a spectral norm, which iterates in every call."""

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), nn.Tanh())


class Hooked(Normed):
    """A hook in one of two blocks of a class: their graphs are not to be one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].feed.register_forward_hook(double)


def double(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


WRITTEN = {"numbers": Searching, "spectral": Bound, "hooks": Hooked}


def compare_written(name: str, plan: str, folder: Path) -> tuple[RankComparison, list[str]]:
    """And what was warned of."""
    made = classifier_job(model=WRITTEN[name], precision="float64", eval_data=None)
    found: list[str] = []
    with counted("aot_eager"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn_explicit", lambda text, *_: found.append(text))
        return compare_job(made, plan, STEPS, folder), found


@pytest.mark.full_but("numbers-ddp-*", "hooks-pipeline=2-*")
@pytest.mark.parametrize(
    ("name", "plan", "named"),
    [
        ("numbers", "ddp", "block blocks.0, of class Sparse"),
        ("numbers", "pipeline=2", "block blocks.0, of class Sparse"),
        ("spectral", "ddp", "block blocks.0, of class Sequential"),
        ("hooks", "ddp", "block blocks.1, of class Mixed"),
        ("hooks", "pipeline=2", "there are hooks"),
    ],
)
def test_blocks_that_cannot_be_a_graph_run_as_they_are_written(
    name: str, plan: str, named: str, ranks: KeptRanks, tmp_path: Path
) -> None:
    made = classifier_job(model=WRITTEN[name], precision="float64", eval_data=None)
    keep_reference(made, STEPS, tmp_path / "reference")
    traces, warned = zip(*ranks.run(compare_written, name, f"{plan} compile=blocks", tmp_path, size=2), strict=True)
    row = judge(plan, list(traces))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert [named in text and "runs as it is written" in text for text in warned[0]] == [True]


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


def small_job() -> evenly.Job:
    return classifier_job(model=Dropping, precision="float64", microbatch=5, steps=2)


def compare_kernels(plan: str, folder: Path) -> tuple[RankComparison, int]:
    """And how many graphs torch found in its cache."""
    from torch._dynamo.utils import counters

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "kernels"))
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else it compiles a trial, which takes minutes on some machines
        patch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # for two files it is not worth it
        torch.compiler.reset()
        counters.clear()
        comparison = compare_job(small_job(), plan, 2, folder)
    return comparison, counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.skipif(cpp_compiler() is None, reason="kernels for the CPU need a C++ compiler")
def test_kernels_draw_and_compute_what_the_blocks_do_and_are_made_once(ranks: KeptRanks, tmp_path: Path) -> None:
    keep_reference(small_job(), 2, tmp_path / "reference")
    row = judge("single", [compare_kernels("single compile=blocks", tmp_path)[0]])
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "kernels").rglob("*.so")}
    assert made
    traces, found = zip(*ranks.run(compare_kernels, "pipeline=2 compile=blocks", tmp_path, size=2), strict=True)
    assert judge("pipeline=2", list(traces)).status == "equal"
    assert all(count > 0 for count in found)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "kernels").rglob("*.so")}
    assert after == made


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
    block = Counting


def test_large_heads_of_awkward_sizes_are_compiled_for_gpus() -> None:
    with torch.device("meta"):
        model = nn.Module()
        model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1025), nn.Linear(1025, 1024)) for _ in range(2))
        model.head, model.even, model.small = nn.Linear(1024, 50257), nn.Linear(1024, 50304), nn.Linear(1024, 10)
        model.wide = nn.Linear(50257, 1024)
    blocks = find_blocks(model)
    for precision in ("bfloat16", "pure-float16"):
        found = compiled.unaligned_products(model, blocks, device="cuda:0", precision=precision)
        assert [one.name for one in found] == ["head", "wide"]
    assert compiled.unaligned_products(model, blocks, device="cuda:0", precision="float32") == []
    assert compiled.unaligned_products(model, blocks, device="cpu", precision="bfloat16") == []


HEAD_NODES = 5  # of its graph: weight, bias, what comes in, their product, what goes out


def compare_with_head(plan: str, folder: Path) -> tuple[RankComparison, list[int]]:
    """And how many nodes each graph has."""

    def heads(model: nn.Module, *_: object, **__: object) -> list[compiled.Block]:
        return [compiled.Block("last", model.get_submodule("last"))]

    with pytest.MonkeyPatch.context() as patch, counted("aot_eager") as graphs:
        patch.setattr(compiled, "unaligned_products", heads)
        return compare_job(small_job(), plan, 2, folder), [len(graph.graph.nodes) for graph in graphs]


@pytest.mark.full_but("zero3-2")
@pytest.mark.parametrize(
    ("plan", "size"), [("single recompute=full", 1), ("zero3", 2), ("pipeline=2 schedule=1f1b", 2)]
)
def test_a_compiled_head_computes_what_one_device_does(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    keep_reference(small_job(), 2, tmp_path / "reference")
    traces, graphs = zip(*ranks.run(compare_with_head, f"{plan} compile=blocks", tmp_path, size=size), strict=True)
    row = judge(plan, list(traces))
    assert (row.status, row.reason) == ("equal", "")
    assert row.param_diff is not None and row.param_diff < 1e-11
    assert HEAD_NODES in graphs[-1]


def test_models_without_blocks_are_refused() -> None:
    with (
        pytest.raises(PlanError, match=r"compile=blocks\n.*no repeated blocks"),
        evenly.start(classifier_job(model=Classifier), plan="single compile=blocks"),
    ):
        pass


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlanError, match=r"a C\+\+ compiler"):
        compiled.check_compilable("cpu")


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
