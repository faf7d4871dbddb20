"""Every plan on GPUs that are pretended: the numbers of one, and how often the host waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda.memory import peaks, predicted
from fake_cuda.stand_ins import built_device, why_not
from fake_cuda.steps import compared_with_loop, kept_losses, train, train_in_a_loop
from kept_ranks import KeptRanks, RankFailure

from evenly.verify.compare import judge

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# What the host asks the GPU in a step: once for the losses and flags of all ranks, once for metrics, once for the norm.
ASKED = Counter(
    {
        "read: _to_copy in parallel/data/gradients.py:finish_reduce": 1,
        "read: _to_copy in engine/metrics.py:sum": 1,
        "read: _local_scalar_dense in engine/updater.py:mean_gradient": 1,
    }
)
GRADIENT = "read: _local_scalar_dense in parallel/pipeline/messages.py:wait"  # whether a stage's output has one


def asked(*, by: str = "gradients", norm: bool = True, messages: int = 0) -> Counter[str]:
    """What a rank asks: of which its gradients are sums, whether for their norm, for how many gradients of outputs."""
    found = Counter({place.replace("gradients.py", f"{by}.py"): times for place, times in ASKED.items()})
    if not norm:
        found = Counter({place: times for place, times in found.items() if "mean_gradient" not in place})
    return found + Counter({GRADIENT: messages})


# plan: ranks, and what each asks.
PLANS: dict[str, list[Counter[str]]] = {
    "single": [asked(by="local_gradients")],
    "single recompute=full": [asked(by="local_gradients")],
    "single recompute=selective": [asked(by="local_gradients")],
    "ddp": [asked()] * 2,
    "zero1": [asked(by="partition")] * 2,
    "zero2": [asked(by="partition")] * 2,
    "zero3": [asked(by="shards", norm=False)] * 2,  # that of the norm comes with the losses
    "tensor=2": [asked(by="local_gradients")] * 2,
    "tensor=2 sequence_parallel=on": [asked(by="local_gradients")] * 2,
    "pipeline=2 schedule=1f1b": [asked(by="local_gradients", messages=4), asked(by="local_gradients")],
    "pipeline=2 schedule=zero-bubble": [asked(messages=4), asked()],
    "3d": [asked(messages=2)] * 4 + [asked()] * 4,
}
# What has parts of parameters on another device, or of tensors on several ranks: plan -> ranks.
VERIFIED = {
    "single": 1,
    "zero1": 2,
    "zero2 offload=optimizer": 2,
    "zero3": 2,
    "zero3 offload=optimizer recompute=full": 2,
    "zero3 offload=parameters": 2,
    "data=1 zero=3 offload=parameters": 1,
    "data=2 tensor=2 zero=3": 4,
    "pipeline=2": 2,
}
NARROW = [
    "ddp precision=bfloat16",
    "zero2 precision=bfloat16",
    "zero3 precision=float16",
    "tensor=2 precision=float16",
    "pipeline=2 precision=bfloat16",
]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_device(tmp_path_factory.mktemp("device"))


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[KeptRanks]:
    """Ranks that are not used for tests without a GPU: torch knows of one from then on."""
    kept = KeptRanks()
    yield kept
    kept.close()


@pytest.fixture(scope="module")
def alone(gpus: Path, gpu_ranks: KeptRanks) -> dict[str, dict[str, Any]]:
    """What one GPU computes, by precision."""
    precisions = ("float64", "bfloat16", "float16")
    return {one: gpu_ranks.run(train, gpus, f"single precision={one}", size=1)[0] for one in precisions}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Losses, norms, metrics and every parameter."""
    np.testing.assert_allclose(found["reports"], expected["reports"], rtol=tolerance)
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.full_but("single", "single recompute=selective", "ddp", "zero3", "tensor=2", "pipeline=2 schedule=1f1b")
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_has_the_numbers_of_one_gpu_and_the_host_waits_no_more_than_it_must(
    gpus: Path, gpu_ranks: KeptRanks, alone: dict[str, dict[str, Any]], plan: str
) -> None:
    found = gpu_ranks.run(train, gpus, f"{plan} precision=float64", size=len(PLANS[plan]))
    assert_equal(found[0], alone["float64"], 1e-9)
    assert [Counter(one["waits"]) for one in found] == PLANS[plan]
    assert {one["overlapped"] for one in found} == {"tensor" in plan or plan == "3d"}


@pytest.mark.full_but("ddp *", "zero3 precision=float16")
@pytest.mark.parametrize("plan", NARROW)
def test_types_of_16_bits_and_their_loss_scale(
    gpus: Path, gpu_ranks: KeptRanks, alone: dict[str, dict[str, Any]], plan: str
) -> None:
    found = gpu_ranks.run(train, gpus, plan, size=2)
    assert_equal(found[0], alone[plan.rpartition("=")[2]], 5e-2)
    messages = 4 if "pipeline" in plan else 0
    assert all(len(one["waits"]) <= 3 + messages for one in found)


def test_what_code_keeps_for_a_later_stage_is_found_by_its_own_functions(gpus: Path, gpu_ranks: KeptRanks) -> None:
    (expected,) = gpu_ranks.run(kept_losses, gpus, "single precision=bfloat16", size=1)
    found = gpu_ranks.run(kept_losses, gpus, "pipeline=2 precision=bfloat16", size=2, limit_s=120)
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-2)


# plan, in bfloat16 where it does not say -> ranks, and how far off the bytes predicted for a rank may be.
MEMORY = {
    "single precision=float32": (1, 0.001),
    "single": (1, 0.001),
    "single recompute=full": (1, 0.001),
    "single recompute=selective": (1, 0.001),
    "ddp": (2, 0.001),
    "zero2": (2, 0.001),
    "zero3": (2, 0.021),
    "tensor=2": (2, 0.002),
    "tensor=2 sequence_parallel=on": (2, 0.001),
    "tensor=2 recompute=full": (2, 0.001),
    "tensor=2 recompute=selective": (2, 0.001),
    "pipeline=2": (2, 0.002),
}


# Where the loss over many classes holds most, what is done about the blocks changes nothing.
OF_MANY_CLASSES = ["single", "zero3", "tensor=2", "tensor=2 sequence_parallel=on", "pipeline=2"]


@pytest.mark.full_but("2048-named1")
@pytest.mark.parametrize(("classes", "named"), [(64, [*MEMORY]), (2048, OF_MANY_CLASSES)])
def test_memory_is_predicted_by_what_a_gpu_saves(
    gpus: Path, gpu_ranks: KeptRanks, classes: int, named: list[str]
) -> None:
    for size in (1, 2):
        plans = [plan for plan in named if MEMORY[plan][0] == size]
        texts = [plan if "precision=" in plan else f"{plan} precision=bfloat16" for plan in plans]
        found = [*zip(*gpu_ranks.run(peaks, gpus, texts, classes, size=size), strict=True)]
        for plan, text, counted in zip(plans, texts, found, strict=True):
            assert predicted(text, size, classes) == pytest.approx([*counted], rel=MEMORY[plan][1]), plan


@pytest.mark.full_but("single", "ddp", "zero3", "tensor=2", "pipeline=2 schedule=1f1b")
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_wrong_on_a_gpu_is_found(gpus: Path, gpu_ranks: KeptRanks, plan: str) -> None:
    found = gpu_ranks.run(train, gpus, plan, True, size=len(PLANS[plan]))
    for rank, expected in zip(found, PLANS[plan], strict=True):
        more = Counter(rank["waits"]) - expected  # of a split tensor the engine reads what is asked
        assert sum(times for place, times in more.items() if place.startswith("read: _to_copy")) >= 2
        assert sum(times for place, times in more.items() if place.startswith("read: _local_scalar")) >= 2
        assert any(one.startswith("cat") for one in rank["mixes"])


@pytest.fixture(scope="module")
def reference(gpus: Path, gpu_ranks: KeptRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    gpu_ranks.run(train_in_a_loop, gpus, folder, size=1)
    return folder


@pytest.mark.full_but("single", "zero3", "pipeline=2")
@pytest.mark.parametrize("plan", VERIFIED)
def test_verify_and_a_resumed_run_find_the_numbers_of_a_loop(
    gpus: Path, gpu_ranks: KeptRanks, reference: Path, plan: str
) -> None:
    found = gpu_ranks.run(compared_with_loop, gpus, reference, plan, size=VERIFIED[plan])
    assert [judge(plan, list(part)).status for part in zip(*found, strict=True)] == ["equal", "equal"]


def test_tensors_of_two_devices_raise(gpus: Path, gpu_ranks: KeptRanks) -> None:
    with pytest.raises(RankFailure, match="same device"):
        gpu_ranks.run(mixed, gpus, size=1)


def mixed(library: Path) -> None:
    import torch
    from fake_cuda.stand_ins import one_gpu

    with one_gpu(library):
        torch.ones(3, device="cuda:0") + torch.ones(3)
