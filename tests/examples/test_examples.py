"""The examples: short, and each builds a job whose first microbatch has a finite loss of the right weight."""

from __future__ import annotations

import math
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_ranks import KeptRanks
from torch.utils.data import default_collate

import evenly
from evenly.job import Job, Loss
from evenly.jobfile import load_job, owns_loop
from evenly.verify.compare import differing_elements

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
OWN_LOOP = EXAMPLES / "digits_own_loop.py"
# Importing transformers takes long on a busy machine.

SMALL: dict[str, dict[str, Any]] = {
    "stdlib_lm": {"width": 16, "layers": 1},
    "digits": {"epochs": 2, "width": 4},
    "bert": {"hidden": 16, "layers": 1},
    "recurrent": {"hidden": 8},
    "gpt2": {"width": 16, "layers": 1},
    "llama": {"width": 16, "layers": 1},
    "t5": {"width": 16, "layers": 1},
    "vit": {"epochs": 2, "width": 16, "layers": 1},
    "resnet": {"width": 4},
}


@dataclass(frozen=True)
class Example:
    name: str
    job: Job

    def batch(self, size: int) -> Any:
        """The first `size` samples, collated."""
        return (self.job.collate or default_collate)([self.job.data[i] for i in range(size)])

    def loss(self, size: int) -> tuple[torch.nn.Module, Loss | torch.Tensor]:
        """A fresh model in training, and its loss on the first `size` samples."""
        torch.manual_seed(0)
        model = self.job.model()
        return model, self.job.loss(model, self.batch(size))


@pytest.fixture(scope="module", params=sorted(SMALL))
def example(request: pytest.FixtureRequest) -> Example:
    path = EXAMPLES / f"{request.param}.py"
    return Example(request.param, load_job(path, SMALL[request.param]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert f"evenly run examples/{path.name} --devices 2" in text.split('"""')[1]


def test_every_job_is_tested() -> None:
    assert {path.stem for path in FILES} == {*SMALL, OWN_LOOP.stem}


def test_fields_are_sane(example: Example) -> None:
    job = example.job
    assert job.name == example.name
    assert job.eval_data is not None
    assert len(job.eval_data) * 4 < job.length  # pyright: ignore[reportArgumentType]
    assert job.steps * job.global_batch < 20 * job.length


def test_eval_data_is_held_out(example: Example) -> None:
    """Two samples may be alike, as functions that people copied are, but the sets are not one another's."""
    seen = {repr(example.job.data[i]) for i in range(example.job.length)}
    held_out: Any = example.job.eval_data
    known = sum(repr(held_out[i]) in seen for i in range(len(held_out)))
    assert known < len(held_out) / 10


def test_same_job_twice_has_the_same_data(example: Example) -> None:
    again = load_job(EXAMPLES / f"{example.name}.py", SMALL[example.name])
    assert again.length == example.job.length
    assert [repr(again.data[i]) for i in range(9)] == [repr(example.job.data[i]) for i in range(9)]


def test_first_loss_is_that_of_a_guess(example: Example) -> None:
    """Untrained, a model guesses evenly among its classes: the loss is about their logarithm."""
    classes = {"digits": 10, "vit": 10, "resnet": 10, "bert": 6, "recurrent": 4}.get(example.name, 256)
    _, loss = example.loss(8)
    mean = loss if isinstance(loss, torch.Tensor) else loss.total / loss.weight
    assert mean.item() == pytest.approx(math.log(classes), abs=0.8)


def test_weight_counts_what_the_loss_counts(example: Example) -> None:
    _, loss = example.loss(5)
    if example.name == "digits":
        assert isinstance(loss, torch.Tensor)
        assert loss.shape == ()
        return
    assert isinstance(loss, Loss)
    # A language model predicts each byte and the end, or all of a window but its first; T5 each byte of the missing
    # word and the end; a classifier one label.
    samples = [example.job.data[i] for i in range(5)]
    counts = {
        "stdlib_lm": lambda sample: len(sample) + 1,
        "gpt2": lambda sample: len(sample) - 1,
        "llama": lambda sample: len(sample) - 1,
        "t5": lambda sample: len(sample[1]) + 1,
    }
    count = counts.get(example.name, lambda sample: 1)
    assert float(loss.weight) == sum(count(sample) for sample in samples)


def test_padding_changes_nothing(example: Example) -> None:
    """The loss of two samples together is the sum of their losses apart."""
    if example.job.collate is None:
        pytest.skip("images and windows need no padding")
    model = example.loss(1)[0].eval()
    lengths = [len(str(example.job.data[i])) for i in range(200)]
    pair = [lengths.index(min(lengths)), lengths.index(max(lengths))]
    assert example.job.collate is not None
    losses = [
        example.job.loss(model, example.job.collate([example.job.data[i] for i in chosen]))
        for chosen in (pair, pair[:1], pair[1:])
    ]
    together, *apart = [loss.total.item() for loss in losses if isinstance(loss, Loss)]
    assert together == pytest.approx(sum(apart), rel=1e-5)


def test_every_parameter_gets_a_gradient(example: Example) -> None:
    model, loss = example.loss(4)
    (loss if isinstance(loss, torch.Tensor) else loss.total).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_language_model_warms_up_and_cools_down() -> None:
    job = load_job(EXAMPLES / "stdlib_lm.py", {"steps": 20, **SMALL["stdlib_lm"]})
    optimizer = job.optimizer(job.model().parameters())
    assert job.schedule is not None
    schedule, rates = job.schedule(optimizer), []
    for _ in range(20):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    peak = rates.index(max(rates))
    assert rates[0] < max(rates)
    assert 0 < peak < 5
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_own_loop_owns_it_and_starts_nothing_when_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assert owns_loop(OWN_LOOP)
    assert not any(owns_loop(path) for path in FILES if path != OWN_LOOP)
    assert callable(runpy.run_path(str(OWN_LOOP), run_name="imported")["job"])


def weights_after_steps(name: str, steps: int) -> dict[str, torch.Tensor]:
    """The parameters after `steps` in float32, on as many ranks as there are."""
    job = load_job(EXAMPLES / f"{name}.py", SMALL[name])
    with evenly.start(replace(job, steps=steps, precision="float32"), plan="ddp exact=bitwise") as run:
        for batch in run.batches():
            run.step(batch)
        return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def other_bits(name: str, ranks: KeptRanks, sizes: Sequence[int], steps: int) -> dict[int, int]:
    """By number of ranks, elements whose bits are not those of one device, over all ranks."""
    (alone,) = ranks.run(weights_after_steps, name, steps, size=1)
    return {
        size: sum(
            differing_elements(found[key], parameter)
            for found in ranks.run(weights_after_steps, name, steps, size=size)
            for key, parameter in alone.items()
        )
        for size in sizes
    }


@pytest.mark.full_but("stdlib_lm")
@pytest.mark.parametrize("name", ["digits", "stdlib_lm"])
def test_an_example_has_the_same_bits_on_one_to_four_ranks(name: str, ranks: KeptRanks) -> None:
    assert other_bits(name, ranks, (2, 3, 4), steps=3) == {2: 0, 3: 0, 4: 0}
