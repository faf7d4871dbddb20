"""Scripts for one device, and the same with `evenly`: few lines changed, the same losses, equal under every plan.

A script is given what the job has drawn: its weights start from the job's random stream, and its batches are the job's.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from verified import verified

import evenly
from evenly.data.generators import reseed
from evenly.data.loader import indices_of_step
from evenly.data.stream import stream_key
from evenly.job import Job
from evenly.jobfile import load_job

ROOT = Path(__file__).parents[2]
PORTED = ROOT / "examples" / "ported"
TIMM = Path(sys.prefix) / "timm"  # where `make venv` installs it, with torchvision
NAMES = sorted(path.name for path in PORTED.iterdir())
MOST_LINES, STEPS = 12, 20
PLANS = {name: ["ddp", "zero3", "tensor=2"] for name in NAMES} | {"ppo": ["ddp", "zero3", "pipeline=2"]}


class Enough(Exception):
    """A script has done all the steps that are compared."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PYTORCH_NVML_BASED_CUDA_CHECK"):  # which lightning leaves behind
        monkeypatch.setenv(name, "0")


@pytest.fixture
def timm_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders with what a script imports of timm, and before it: torchvision is here a build for CUDA."""
    if name != "vit":
        return []
    assert TIMM.is_dir(), f"`make venv` installs timm and torchvision into {TIMM}"
    (tmp_path / "before_timm.py").write_text("import torchvision_names\n\ntorchvision_names.declare()\n")
    paths = [ROOT / "benchmarks" / "zoo", TIMM, tmp_path]
    for path in paths:
        monkeypatch.syspath_prepend(str(path))
    import_module("before_timm")
    return paths


def changed_lines(name: str) -> int:
    """The lines of `after.py`, but empty ones, that are not in `before.py`."""
    before, after = ((PORTED / name / file).read_text().splitlines() for file in ("before.py", "after.py"))
    return sum(line.startswith("+ ") and line[2:].strip() != "" for line in difflib.ndiff(before, after))


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_are_changed(name: str) -> None:
    assert 1 <= changed_lines(name) <= MOST_LINES


@pytest.mark.full_but("nanogpt")
@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_equal_under_three_plans(name: str, timm_paths: list[Path], tmp_path: Path) -> None:
    job_file = tmp_path / "after.py"
    begin = "import before_timm\n" if timm_paths else ""
    job_file.write_text(begin + (PORTED / name / "after.py").read_text())
    libraries = "before_timm timm.loss" if timm_paths else ""
    verdicts = verified(job_file, PLANS[name], tmp_path, steps=2, paths=timm_paths, libraries=libraries)
    assert verdicts == [(plan, "equal", "") for plan in PLANS[name]]


def losses_after(job: Job, record: Callable[[Any], None]) -> list[float]:
    """The losses of the first steps under `evenly`; `record` gets the batch of each."""

    def loss(model: torch.nn.Module, batch: Any) -> Any:
        record(batch)
        return job.loss(model, batch)

    whole = replace(
        job, microbatch=job.global_batch, steps=STEPS, eval_data=None, eval_every=None, evaluate=None, save_every=None
    )
    if job.phases:
        name, phase = next(iter(job.phases.items()))
        job = job.by_phase[name]
        whole = replace(whole, phases={**whole.phases, name: replace(phase, loss=loss)})
    else:
        whole = replace(whole, loss=loss)
    with evenly.start(whole) as run:
        return [run.step(batch).loss for batch in run.batches()]


def losses_before(name: str, job: Job, batches: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses on which the script calls backward, with the job's weights and batches."""
    found: list[float] = []
    backward, manual_seed = torch.Tensor.backward, torch.manual_seed

    def recorded(loss: torch.Tensor, *arguments: Any, **more: Any) -> None:
        found.append(float(loss.detach()))
        backward(loss, *arguments, **more)
        if len(found) >= STEPS * per_step:
            raise Enough
        if phases:  # what the next one draws
            reseed(stream_key(job.seed, "microbatch", phases[len(found) % per_step], len(found) // per_step, 0))

    def given(_: DataLoader[Any]) -> Iterator[Any]:
        for step, batch in enumerate(batches):
            reseed(stream_key(job.seed, "microbatch", *phases[:1], step, 0))  # what the loss draws
            yield batch

    microbatch, phases = job.microbatch or job.global_batch, [*(job.phases or ())]
    per_step = job.global_batch // microbatch if name in ("bert", "llama_sft") else len(phases) or 1
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", recorded)
        if name in ("bert", "lightning", "llama_sft"):
            patch.setattr(RandomSampler, "__iter__", lambda _: iter(_order(job)))
        else:
            patch.setattr(torch, "manual_seed", lambda _: manual_seed(stream_key(job.seed, "model")))
            patch.setattr(DataLoader, "__iter__", given)
        if name == "nanogpt":
            starts = iter(_order(job)[step * job.global_batch :][: job.global_batch] for step in range(STEPS))
            patch.setattr(torch, "randint", lambda *_: torch.tensor(next(starts)))
        with suppress(Enough):
            runpy.run_path(str(PORTED / name / "before.py"), run_name="__main__")
    return [sum(found[step * per_step :][:per_step]) for step in range(STEPS)]


def _order(job: Job) -> list[int]:
    return [index for step in range(STEPS) for index in indices_of_step(job, step)]


@pytest.mark.full_but("nanogpt")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ppo"])
@pytest.mark.usefixtures("timm_paths")
@pytest.mark.filterwarnings("ignore")
def test_the_first_losses_are_those_of_the_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(PORTED / name / "after.py", {})
    batches: list[Any] = []
    after = losses_after(job, batches.append)
    assert losses_before(name, job, batches, monkeypatch) == pytest.approx(after, rel=2e-6)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_loop_that_draws_actions_learns_as_the_script_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actions that the job's policy has drawn are given to the script's, as long as both have the same weights."""
    actions: list[torch.Tensor] = []
    sample = torch.distributions.Categorical.sample
    losses: dict[str, list[float]] = {"before": [], "after": []}
    backward, train = torch.Tensor.backward, evenly.Run.step

    def recorded(policy: Any) -> torch.Tensor:
        actions.append(sample(policy))
        return actions[-1]

    def noted(run: evenly.Run, *arguments: Any, **more: Any) -> Any:
        report = train(run, *arguments, **more)
        losses["after"].append(report.loss)
        return report

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributions.Categorical, "sample", recorded)
        patch.setattr(evenly.Run, "step", noted)
        runpy.run_path(str(PORTED / "ppo" / "after.py"), run_name="__main__")
    replayed = iter(actions[18:])  # those before were drawn for the data that a job has to have

    def given(loss: torch.Tensor, *arguments: Any, **more: Any) -> None:
        losses["before"].append(float(loss.detach()))
        backward(loss, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributions.Categorical, "sample", lambda _: next(replayed))
        patch.setattr(torch.Tensor, "backward", given)
        manual_seed = torch.manual_seed
        patch.setattr(torch, "manual_seed", lambda _: manual_seed(stream_key(0, "model")))
        runpy.run_path(str(PORTED / "ppo" / "before.py"), run_name="__main__")
    assert losses["before"][:STEPS] == pytest.approx(losses["after"][:STEPS], rel=1e-4)
