"""How a plan's row comes about when its ranks fail, and what a signal does."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import class_loss, classifier_job, language_job
from torch import nn

from evenly.errors import RankError, UserError
from evenly.job import Loss
from evenly.launcher.agent import FailedRank
from evenly.train.run import Run
from evenly.verify import verify as module
from evenly.verify.additive import loss_not_additive
from evenly.verify.compare import RankComparison
from evenly.verify.ranks import compare_job, keep_reference
from evenly.verify.reference import reference_steps
from evenly.verify.tasks import FoundInJob, say_shortened
from evenly.verify.verify import VerifyRequest, remedy, verify


@pytest.fixture(autouse=True)
def rounding_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference runs here."""
    monkeypatch.setattr(module, "measure_rounding", lambda *_: None)


def failing(exit_code: int) -> Any:
    """In place of starting ranks: the reference comes through, those of a plan fail."""

    def start_ranks(task: Any, *_: Any) -> dict[int, Any]:
        if task is module.run_references:
            return {0: FoundInJob()}
        raise FailedRank("rank 1 failed", "it was so", "", rank=1, exit_code=exit_code)

    return start_ranks


@pytest.mark.parametrize(("exit_code", "status"), [(2, "unsupported"), (1, "error")])
def test_a_refusal_by_the_ranks_is_no_failure(
    exit_code: int, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "start_ranks", failing(exit_code))
    question = VerifyRequest(tmp_path / "job.py", {}, 1, "float64")
    rows = verify(question, ["ddp", "zero1"], devices=2, report=lambda _: None).plans
    assert [(row.status, row.reason) for row in rows] == [(status, "rank 1 failed | it was so")] * 2


@pytest.mark.parametrize("fails", [module.run_references, module.run_plan])
def test_an_error_says_how_verify_has_cut_the_data(fails: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start_ranks(task: Any, arguments: tuple[Any, ...], _: Any) -> dict[int, Any]:
        say_shortened(arguments[5], "verify trains on the first 16 of its 996 samples")
        if task is fails:
            raise RankError("rank 0 failed", "AssertionError: 9", "see its log")
        return {0: FoundInJob()}

    monkeypatch.setattr(module, "start_ranks", start_ranks)
    question = VerifyRequest(tmp_path / "job.py", {}, 1, "float64")
    said = "AssertionError: 9; verify trains on the first 16 of its 996 samples"
    if fails is module.run_references:
        with pytest.raises(RankError, match=said):
            verify(question, ["ddp"], devices=2, report=lambda _: None)
    else:
        [row] = verify(question, ["ddp"], devices=2, report=lambda _: None).plans
        assert (row.status, row.reason) == ("error", f"rank 0 failed | {said}")


@pytest.mark.parametrize(
    ("plans", "runs"),
    [
        (["ddp", "zero1"], ["data=2 zero=0", "data=2 zero=1"]),
        (["ddp", "ddp exact=bitwise"], ["data=2 zero=0", "data=1 exact=bitwise", "data=2 zero=0 exact=bitwise"]),
        (["single exact=bitwise", "zero1 exact=bitwise"], ["data=1 exact=bitwise", "data=2 zero=1 exact=bitwise"]),
    ],
)
def test_one_device_runs_first_where_bits_are_compared(
    plans: list[str], runs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[str] = []

    def start_ranks(task: Any, arguments: tuple[Any, ...], _: Any) -> dict[int, Any]:
        if task is module.run_references:
            return {0: FoundInJob()}
        begun.append(str(arguments[3].plan))
        return {0: RankComparison("float32", 0)}

    monkeypatch.setattr(module, "start_ranks", start_ranks)
    verify(VerifyRequest(tmp_path / "job.py", {}, 1, "float32"), plans, devices=None, report=lambda _: None)
    assert begun == runs


def test_rounding_is_measured_again_before_a_plan_is_different(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[Any] = []

    def start_ranks(task: Any, arguments: tuple[Any, ...], _: Any) -> dict[int, Any]:
        if task is module.run_references:
            begun.extend(arguments[-1])
            return {0: FoundInJob()}
        begun.append(str(arguments[3].plan))
        found = RankComparison("float32", 0)
        if len(begun) <= 9 or "zero=1" in begun[-1]:  # only the first plan's first run
            found.add_loss(1, 1.0, 2.0)
        return {0: found}

    monkeypatch.setattr(module, "start_ranks", start_ranks)
    rows = verify(
        VerifyRequest(tmp_path / "job.py", {}, 1, "float32"), ["ddp", "zero1"], devices=2, report=lambda _: None
    )
    draws = [("sums", draw) for draw in range(2, 8)]
    assert begun == [("none", 1), ("sums", 1), "data=2 zero=0", *draws, "data=2 zero=0", "data=2 zero=1"]
    assert [row.status for row in rows.plans] == ["equal", "different"]


def test_a_signal_ends_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "start_ranks", failing(128 + signal.SIGTERM))
    with pytest.raises(FailedRank):
        verify(VerifyRequest(tmp_path / "job.py", {}, 1, "float64"), ["ddp", "zero1"], devices=2, report=lambda _: None)


def test_a_rank_that_is_compared_does_not_wait_for_the_end_of_its_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, found, step = classifier_job(precision="float64"), [], Run.step
    monkeypatch.setattr(
        Run, "step", lambda run, batch: (found.append(signal.getsignal(signal.SIGTERM)), step(run, batch))[1]
    )
    keep_reference(job, 1, tmp_path / "reference")
    compare_job(job, "single", 1, tmp_path)
    assert found == [signal.getsignal(signal.SIGTERM)]


def of_mean(model: Any, batch: Any) -> Loss:
    loss = class_loss(model, batch)
    return Loss(loss.total / loss.weight, loss.weight)


def of_weight_one(model: Any, batch: Any) -> Loss:
    return Loss(class_loss(model, batch).total, 1)


def of_scalar_sum(model: Any, batch: Any) -> torch.Tensor:
    return class_loss(model, batch).total


def of_scalar_mean(model: Any, batch: Any) -> torch.Tensor:
    loss = class_loss(model, batch)
    return loss.total / loss.weight


def of_class_weights(model: Any, batch: Any) -> torch.Tensor:
    """Where weights are almost alike, so are the means of halves."""
    weights = torch.tensor([1.0, 1.0, 1.001], dtype=torch.float64)
    return nn.functional.cross_entropy(model(batch[0]), batch[1], weight=weights)


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (class_loss, ""),
        (of_scalar_mean, ""),
        (of_mean, "has the total"),
        (of_scalar_sum, "has the total"),
        (of_class_weights, "has the total"),
        (of_weight_one, "has the weight 1, that of its halves 1 + 1"),
    ],
)
def test_a_loss_that_is_no_sum_is_noted(loss: Any, wrong: str) -> None:
    found = loss_not_additive(classifier_job(loss=loss, precision="float64"))
    assert wrong in found and bool(wrong) == bool(found)


@pytest.mark.parametrize("found", ["expected scalar type Double but found Float", "same dtype, got Double and Float"])
def test_a_tensor_of_another_type_in_the_plain_loop_is_explained(found: str) -> None:
    words = remedy(RankError("rank 1 failed", f"RuntimeError: {found} (job.py:6)", "see its log: a"), "float64")
    assert words.startswith("verify has the model and the batch in float64:") and words.endswith("see its log: a")
    assert remedy(RankError("rank 1 failed", "ValueError: a", "see its log: a"), "float64") == "see its log: a"


def test_ragged_samples_add_up() -> None:
    assert loss_not_additive(language_job(precision="float64")) == ""


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embed((x[:, 0].abs() * 3).long()))


def of_root(model: Any, batch: Any) -> Loss:
    return Loss((model(batch[0]) * 0).sqrt().sum(), len(batch[0]))


class TwoOnOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight.data = self.first.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


BAD_JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": (dict(loss=lambda model, batch: model(batch[0]).sum() * math.inf), "microbatch 0 has the loss"),
    "a gradient that is not finite": (dict(loss=of_root), "the norm of the gradient is nan"),
    "sparse": (dict(model=Sparse), "the gradient of embed.weight"),
    "two in one memory": (dict(model=TwoOnOne), "they are two parameters in one memory"),
    "a dict": (dict(loss=lambda model, batch: {"loss": model(batch[0]).sum()}), "it returned a dict"),
    "a tuple": (dict(loss=lambda model, batch: (model(batch[0]).sum(), 1)), "it returned a tuple"),
    "a vector": (dict(loss=lambda model, batch: Loss(model(batch[0]), 1)), "whose total is no scalar tensor"),
    "nothing counts": (dict(loss=lambda model, batch: Loss(model(batch[0]).sum(), 0)), "the weight is 0 in every"),
    "a negative weight": (dict(loss=lambda model, batch: Loss(model(batch[0]).sum(), -1)), "with weight -1"),
    "an evaluation of nothing": (
        dict(loss=lambda model, batch: Loss(model(batch[0]).sum(), float(model.training))), "nothing in its eval_data"
    ),
    "closure": (dict(optimizer=torch.optim.LBFGS), "evaluates the loss several times"),
    "own closure": (dict(optimizer=lambda p: Twice(p, lr=0.1)), "optimizer Twice"),
}  # fmt: skip


class Twice(torch.optim.SGD):
    """Wants the loss a second time, as sharpness-aware minimization does."""

    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        closure()
        return super().step()


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_job_that_no_device_can_train_is_a_mistake_in_one_sentence(name: str) -> None:
    changes, words = BAD_JOBS[name]
    with pytest.raises(UserError) as found:
        list(reference_steps(classifier_job(precision="float64", **changes), 2))
    assert words in str(found.value) and found.value.exit_code == 2
