"""Under the autocast of a GPU functions give other types than under that of a CPU; a job is read as for its devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import Points, classifier_job
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import evenly
from evenly.engine.find_stages import calls_of_job, stage_plan_of
from evenly.engine.gpu_autocast import FLOAT32, GIVES_FLOAT32, AsOnGpu
from evenly.engine.precision import autocast_as_on, functions_as_on
from evenly.hardware.cluster_text import parse_cluster
from evenly.parallel.pipeline.model import StagedModel
from evenly.plan import parse_plan
from evenly.planner.job_memory import memory_of_ranks
from evenly.planner.job_profile import JobProfiler
from evenly.planner.job_source import JobSource
from evenly.planner.request import PlanRequest
from evenly.torch_private import fake_mode

Act = Callable[[torch.Tensor], torch.Tensor]


def classes(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


def attention(x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Of one head; the result and the weights."""
    packed, out = torch.ones(24, 8, device=x.device), torch.ones(8, 8, device=x.device)
    biases = torch.zeros(24, device=x.device), torch.zeros(8, device=x.device)
    x = x.unsqueeze(1)
    return F.multi_head_attention_forward(x, x, x, 8, 1, packed, biases[0], None, None, False, 0.0, out, biases[1])


SAME: dict[str, Act] = {
    "interpolate, area": lambda x: F.interpolate(x.view(1, 2, 4, 4), scale_factor=0.5, mode="area"),
    "dropout": F.dropout,
    "max_pool2d": lambda x: F.max_pool2d(x.view(1, 2, 4, 4), 2),
    # Of both types.
    "dot": lambda x: torch.dot(x.flatten(), x.float().flatten()),
    "tensordot": lambda x: torch.tensordot(x, x.float(), 2),
    "bilinear": lambda x: F.bilinear(x, x.float(), torch.ones(3, 8, 8, device=x.device)),
    "scatter_add": lambda x: x.float().scatter_add(0, torch.zeros(4, 8, dtype=torch.int64, device=x.device), x),
    "linear": lambda x: F.linear(x, x),
    "bmm": lambda x: x @ x.t(),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "mean": torch.mean,
    "var": torch.var,
    "tanh": torch.tanh,
    "add": lambda x: x + x.float(),
    "huber": lambda x: F.huber_loss(x, x),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}
OTHER: dict[str, Act] = {
    "softmax": lambda x: F.softmax(x, -1),
    "Softmax": lambda x: nn.Softmax(-1)(x),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "softmin": lambda x: F.softmin(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(),
    "sum of a dim": lambda x: torch.sum(x, -1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "exp": torch.exp,
    "Tensor.exp": lambda x: x.exp(),
    "log": torch.log,
    "pow": lambda x: x.pow(2),
    "**": lambda x: x**2,
    "2**": lambda x: 2**x,
    "1/": lambda x: 1 / x,
    "rsqrt": torch.rsqrt,
    "tan": torch.tan,
    "erfinv": torch.erfinv,
    "softplus": F.softplus,
    "norm": lambda x: x.norm(),
    "vector_norm": torch.linalg.vector_norm,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x),
    "linalg.norm": torch.linalg.norm,
    "matrix_norm": torch.linalg.matrix_norm,
    **{
        f"interpolate, {mode}": lambda x, mode=mode: F.interpolate(x.view(1, 2, 4, 4), scale_factor=2, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    },
    # Written in Python: of what they call.
    "gumbel_softmax": F.gumbel_softmax,
    "multilabel_soft_margin_loss": lambda x: F.multilabel_soft_margin_loss(x, x),
    "triplets": lambda x: F.triplet_margin_with_distance_loss(x, x, x),
}
LOSSES: dict[str, Act] = {
    "mse_loss": lambda x: F.mse_loss(x, x),
    "l1_loss": lambda x: F.l1_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "nll_loss": lambda x: F.nll_loss(x, classes(x)),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, classes(x)),
    "cross_entropy of each": lambda x: F.cross_entropy(x, classes(x), None, None, -1, None, "none"),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, classes(x), label_smoothing=0.1),
    "CrossEntropyLoss": lambda x: nn.CrossEntropyLoss(reduction="sum")(x, classes(x)),
}


def type_of(act: Act, device: str, dtype: torch.dtype, *, as_gpu: bool = False) -> torch.dtype:
    """Of what `act` gives on a fake tensor under torch's own autocast of `device`; this torch need not have GPUs."""
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        with fake_mode():
            x = torch.empty(4, 8, device=device, dtype=dtype)
            if not as_gpu:
                return act(x).dtype
            with AsOnGpu():
                return act(x).dtype
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*SAME, *OTHER, *LOSSES])
def test_types_are_those_of_a_gpu(name: str, dtype: torch.dtype) -> None:
    act = (SAME | OTHER | LOSSES)[name]
    there = type_of(act, "cuda", dtype)
    assert type_of(act, "cpu", dtype, as_gpu=True) == there
    if name in OTHER:  # and the test would find a table without it
        assert type_of(act, "cpu", dtype) != there == torch.float32


def test_a_mode_sees_what_functions_written_in_python_call() -> None:
    """Of this one the rest cannot run on a fake GPU; its softmax gives float32."""
    with autocast_as_on("cuda", "bfloat16"):
        result, weights = attention(torch.randn(4, 8, dtype=torch.bfloat16))
    assert (result.dtype, weights.dtype) == (torch.bfloat16, torch.float32)


def test_no_function_is_in_both_tables() -> None:
    assert not FLOAT32 & GIVES_FLOAT32


def test_losses_are_those_of_one_call() -> None:
    logits, weight = torch.randn(6, 5), torch.rand(5)
    targets, without = torch.tensor([0, 4, -100, 2, 2, 1]), torch.tensor([0, 4, 3, 2, 2, 1])
    cases: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (targets, {}),
        (targets, {"weight": weight}),
        (targets, {"reduction": "sum"}),
        (targets, {"reduction": "none"}),
        (without, {"ignore_index": 2}),
    ]
    for wanted, given in cases:
        with autocast_as_on("cuda", "bfloat16"):
            found = F.cross_entropy(logits.bfloat16(), wanted, **given)
        torch.testing.assert_close(found, F.cross_entropy(logits, wanted, **given), rtol=0.02, atol=0.02)


def test_other_precisions_and_devices_are_left_alone() -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    for device, precision in (("cpu", "bfloat16"), ("cuda", "pure-bfloat16"), ("cuda", "float32")):
        with autocast_as_on(device, precision):
            assert F.softmax(x, -1).dtype == torch.bfloat16
    with autocast_as_on("cuda", "bfloat16"):
        assert F.softmax(x, -1).dtype == torch.float32


class Scores(nn.Module):
    """Keeps what a softmax gives, of 16 bits on a CPU and of 32 on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.decide = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.softmax(layer(x).repeat(1, 4000), -1)[:, :5]
        return self.decide(x)


def scores_job() -> evenly.Job:
    return replace(classifier_job(model=Scores), precision="bfloat16")


def test_memory_is_that_of_the_devices() -> None:
    plan = parse_plan("single").fit(1).complete("bfloat16")
    on_cpu, on_gpu = (
        memory_of_ranks(JobProfiler(scores_job(), device=device), plan)[0].peak for device in ("cpu", "cuda")
    )
    assert on_gpu > 1.3 * on_cpu


class Cubed(nn.Module):
    """A block that keeps other types under a GPU's autocast than under a CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 200), nn.Linear(200, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return x + self.down(torch.tanh(h + 0.1 * h.pow(3)))


class Cubes(nn.Module):
    """own: whether it computes its blocks again by itself."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cubed() for _ in range(4))
        self.decide, self.own = nn.Linear(5, 3), own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.own else layer(x)
        return self.decide(x)


@pytest.mark.parametrize(
    ("text", "own"), [("recompute=full", False), ("recompute=selective", False), ("recompute=none", True)]
)
def test_what_is_computed_again_has_the_types_of_the_devices(text: str, own: bool) -> None:
    def peak(text: str, own: bool) -> int:
        job = classifier_job(model=partial(Cubes, own), precision="bfloat16", data=Points(600), global_batch=600)
        job = replace(job, microbatch=600)
        plan = parse_plan(f"single {text}").fit(1).complete("bfloat16")
        return memory_of_ranks(JobProfiler(job, device="cuda"), plan)[0].peak

    assert peak(text, own) < 0.8 * peak("recompute=none", False)


def test_where_autocast_is_off_types_stay() -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    with autocast_as_on("cuda", "bfloat16"):
        assert x.exp().dtype is torch.float32
        with torch.autocast("cpu", enabled=False):
            assert x.exp().dtype is torch.bfloat16
    with functions_as_on("cuda"):
        assert x.exp().dtype is torch.bfloat16


def test_a_job_is_read_as_for_the_devices_that_are_asked_about() -> None:
    source = JobSource(scores_job())
    found = [
        PlanRequest(source=source, cluster=parse_cluster(one), batch=6).source
        for one in ("1xH100", "1xA100", "1x1xcpu")
    ]
    assert found[0] is found[1] and found[2] is source
    assert isinstance(found[0], JobSource) and (found[0].profiler.device, source.profiler.device) == ("cuda", "cpu")


def test_stages_are_found_as_on_the_devices() -> None:
    model = StagedModel(Scores(), "cpu")
    plan = parse_plan("pipeline=2").fit(2).complete("bfloat16")
    on_cpu, on_gpu = (
        sum(one.saved_bytes for one in calls_of_job(scores_job(), model, plan, device).costs)
        for device in ("cpu", "cuda")
    )
    assert on_gpu > 1.15 * on_cpu


def test_a_model_is_cut_by_costs_as_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 40))
    plan, job = parse_plan("pipeline=2").fit(2).complete("bfloat16"), replace(scores_job(), eval_data=None)
    on_cpu, on_gpu = (
        sum(one.saved_bytes for one in stage_plan_of(job, StagedModel(Scores(), "cpu"), plan, device=device)[1])
        for device in ("cpu", "cuda")
    )
    assert on_gpu > 1.15 * on_cpu
