"""Hooks: called on all ranks in the same order, without a trace in the numbers; early ends, saved and resumed."""

from __future__ import annotations

import json
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import classifier_job, language_job
from kept_ranks import KeptRanks
from safetensors.torch import load_file
from test_own_loops import job as layers_job

import evenly
from evenly.checkpoint.export import export
from evenly.errors import ResumeError, RunError, UserError
from evenly.plan import parse_plan
from evenly.train.hooks import EarlyStopping
from evenly.train.loop import train
from evenly.train.options import RunOptions
from evenly.train.reports import Evaluation
from evenly.train.run import start_with_options
from evenly.train.whole_model import whole_tensors
from evenly.verify.reference import named_tensors

PLANS = [("single", 1), *((plan, 2) for plan in ("ddp", "zero2", "zero3", "tensor=2", "pipeline=2"))]


class Calls:
    """Notes what hooks are given and what they draw."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def draw(self, run: Any, found: Any) -> None:
        numbers = (float(torch.rand(())), random.random(), float(np.random.rand()))
        what = found if isinstance(found, int) else (type(found).__name__, found.loss)
        self.found.append((run.steps_done, what, numbers))

    def evaluate(self, run: Any, report: Any) -> None:
        if report.step == 2:
            run.evaluate()


def with_hooks(plan: str, folder: Path, *, hooked: bool, own_loop: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """What the hooks have noted, the state at the end, and what the loop draws."""
    calls, drawn = Calls(), []
    torch.manual_seed(1)
    hooks: dict[str, Any] = dict(on_step=[calls.draw, calls.evaluate], on_evaluation=calls.draw, on_save=[calls.draw])
    mine = layers_job(eval_data=layers_job().data[:7], eval_every=3, save_every=2, **(hooks if hooked else {}))
    with evenly.start(mine, plan=plan, out=folder) as run:
        if own_loop:
            for batch in run.batches():
                run.forward_backward(batch)
                run.update()
                drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
                if run.steps_done % 3 == 0:
                    run.evaluate()
                if run.steps_done % 2 == 0:
                    run.save()
            run.evaluate()
        else:
            train(run)
        with run.whole_model() as model:
            return calls.found, [tensor.numpy() for tensor in named_tensors(model).values()], drawn


@pytest.mark.full_but("single-1", "ddp-2", "zero3-2", "pipeline=2-2")
@pytest.mark.parametrize(("plan", "size"), PLANS)
def test_hooks_are_called_alike_and_leave_no_trace(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    found = ranks.run(_with_hooks, plan, tmp_path / "a", True, plan == "zero2", size=size)
    plain = ranks.run(_with_hooks, plan, tmp_path / "b", False, plan == "zero2", size=size)
    for (calls, state, drawn), (none, expected, as_drawn) in zip(found, plain, strict=True):
        assert calls == found[0][0] and not none and drawn == as_drawn
        assert all((mine == theirs).all() for mine, theirs in zip(state, expected, strict=True))
    where = [(step, what if isinstance(what, int) else what[0]) for step, what, _ in found[0][0]]
    step, evaluation = "StepReport", "Evaluation"
    assert where == [
        *((1, step), (2, step), (2, evaluation), (2, 2), (3, step), (3, evaluation), (4, step)),
        *((4, 4), (4, evaluation)),
    ]
    drawn = [numbers for _, _, numbers in found[0][0]]
    assert len({*drawn}) == len(drawn)
    if plan != "single":
        (one, _, _), *_ = ranks.run(_with_hooks, "single", tmp_path / "c", True, False, size=1)
        assert [numbers for _, _, numbers in one] == drawn


def _with_hooks(plan: str, folder: Path, hooked: bool, own_loop: bool) -> Any:
    return with_hooks(plan, folder, hooked=hooked, own_loop=own_loop)


def ended_by_a_hook(plan: str, folder: Path) -> tuple[Any, Any]:
    def stop(run: Any, report: Any) -> None:
        if report.step == 3 and run.world.rank == run.world.size - 1:
            run.stop()

    with evenly.start(classifier_job(on_step=stop), plan=plan, out=folder) as run:
        summary = train(run)
    with evenly.start(classifier_job(on_step=stop), plan=plan, out=folder, resume=True) as run:
        again = train(run)
        assert run.evaluation_due is False
    return summary, again


@pytest.mark.full_but("single-1", "ddp-2")
@pytest.mark.parametrize(("plan", "size"), [("single", 1), ("ddp", 2), ("zero3", 2)])
def test_one_rank_ends_the_run_for_all(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    for summary, again in ranks.run(ended_by_a_hook, plan, tmp_path, size=size):
        assert (summary.steps, summary.ended_early, summary.stopped) == (3, True, False)
        assert summary.eval_loss is not None
        assert (again.first_step, again.steps, again.ended_early) == (None, 3, True)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-00000003"]


def ended_by_the_loop() -> list[int]:
    """Outside of a hook a stop is agreed on with the next step."""
    with evenly.start(classifier_job(), plan="ddp") as run:
        steps = []
        for batch in run.batches():
            if run.world.rank == 1 and run.steps_done == 1:
                run.stop()
            steps.append(run.step(batch).step)
        return steps


def test_a_stop_outside_of_a_hook_counts_for_the_next_step(ranks: KeptRanks) -> None:
    assert ranks.run(ended_by_the_loop, size=2) == [[1, 2], [1, 2]]


def still(**changes: Any) -> evenly.Job:
    """A job whose evaluations are all alike."""
    sgd: Any = dict(optimizer=lambda p: torch.optim.SGD(p, lr=0.0), schedule=None, eval_every=2, steps=20)
    return language_job(**{**sgd, "on_evaluation": [EarlyStopping(patience=3)], **changes})


def stopped_early(folder: Path, plan: str, steps: int | None, resume: bool) -> Any:
    options = RunOptions(out=folder, steps=steps, resume=resume, plan=parse_plan(plan))
    with start_with_options(still(), options) as run:
        return train(run)


def test_early_stopping_goes_on_counting_after_a_resume(ranks: KeptRanks, tmp_path: Path) -> None:
    for summary in ranks.run(stopped_early, tmp_path / "one", "ddp", None, False, size=2):
        assert summary.steps == 8 and summary.ended_early
    ranks.run(stopped_early, tmp_path / "two", "ddp", 5, False, size=2)  # evaluates after 2, 4 and 5
    for summary in ranks.run(stopped_early, tmp_path / "two", "single", None, True, size=1):
        assert summary.steps == 6 and summary.ended_early


def test_early_stopping_counts_evaluations_that_are_no_better() -> None:
    stopper, stops = EarlyStopping(patience=2, min_delta=0.1), []

    class Ended:
        def stop(self) -> None:
            stops.append(1)

    run: Any = Ended()
    for loss, bad in [(3.0, 0), (2.95, 1), (2.85, 0), (2.8, 1), (2.6, 0), (2.55, 1)]:
        stopper(run, Evaluation(loss, 1.0, 1))
        assert stopper.bad == bad and not stops
    other = EarlyStopping(patience=2, min_delta=0.1)
    other.load_state_dict(json.loads(json.dumps(stopper.state_dict())))
    other(run, Evaluation(2.51, 1.0, 1))
    assert stops and other.best == 2.6
    with pytest.raises(UserError, match="patience is 0"):
        EarlyStopping(patience=0)


def resumed_without(folder: Path) -> None:
    with evenly.start(still(steps=2), out=folder) as run:
        train(run)
    with pytest.raises(ResumeError, match="on_evaluation 0: EarlyStopping has a state in the checkpoint"):
        evenly.start(still(on_evaluation=()), out=folder, resume=True)


def test_a_hook_whose_state_would_be_lost_is_missed(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(resumed_without, tmp_path, size=1)


def raising() -> None:
    def count_words(run: Any, report: Any) -> None:
        raise KeyError("words")

    with evenly.start(classifier_job(on_step=count_words), plan="ddp") as run:
        with pytest.raises(
            RunError,
            match=r"calling count_words of the job's on_step after step 1\n.*KeyError: 'words' \(test_hooks.py:",
        ):
            train(run)
        run.asked_to_end = True


def test_a_hook_that_raises_is_named_with_its_place(ranks: KeptRanks) -> None:
    ranks.run(raising, size=2)
    with pytest.raises(UserError, match="on_save has a int, not a callable"):
        classifier_job(on_save=[3])


def logged(folder: Path) -> None:
    seen: list[Any] = []

    class Noted:
        def write(self, stream: str, record: Any) -> None:
            if stream == "metrics":
                seen.append(record)

        def close(self) -> None: ...

    with evenly.start(classifier_job(steps=1), plan="ddp", out=folder, sinks=[Noted()]) as run:
        run.step(next(run.batches()))
        run.log({"reward": torch.tensor(1.5), "text": "so"})
        for values, problem in (({"loss": 1.0}, "logging loss"), ({"x": object()}, "it is a object")):
            with pytest.raises(UserError, match=problem):
                run.log(values)
        assert run.is_main == (run.world.rank == 0)
    assert seen[1:] == ([{"step": 1, "reward": 1.5, "text": "so"}] if run.is_main else [])


def test_what_is_logged_goes_to_all_sinks(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(logged, tmp_path, size=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"step": 1, "reward": 1.5, "text": "so"}


def whole_bits(plan: str, folder: Path) -> list[dict[str, Any] | None]:
    """The whole model after a checkpoint, on all ranks and on the first alone, trained on or not."""
    found: list[dict[str, Any] | None] = []
    with evenly.start(layers_job(precision="float32", steps=2), plan=plan, out=folder) as run:
        for batch in run.batches():
            run.step(batch)
        run.save()
        for main_only in (False, True):
            with run.whole_model(main_only=main_only, device="cpu") as model:
                found.append(model and {name: tensor.numpy() for name, tensor in named_tensors(model).items()})
                if model is not None:
                    assert model(torch.zeros(3, 5)).shape == (3, 3) and not model.training
    return found


@pytest.mark.full_but("ddp-2", "zero3-2", "pipeline=2-2")
@pytest.mark.parametrize(("plan", "size"), [*PLANS, ("data=2 tensor=2 pipeline=2 zero=3", 8)])
def test_the_whole_model_has_the_bits_of_the_checkpoint(plan: str, size: int, ranks: KeptRanks, tmp_path: Path) -> None:
    found = ranks.run(whole_bits, plan, tmp_path / "run", size=size)
    export(tmp_path / "run", tmp_path / "weights")
    saved = load_file(tmp_path / "weights" / "model.safetensors")
    for rank, (everywhere, main) in enumerate(found):
        assert (main is None) == (rank > 0)
        for whole in filter(None, (everywhere, main)):
            assert whole.keys() == saved.keys()
            assert all((whole[name] == tensor.numpy()).all() for name, tensor in saved.items())


def held_at_a_time(plan: str) -> int:
    """How many tensors are gathered, each of which is gone before the next."""
    with evenly.start(layers_job(), plan=plan) as run:
        run.step(next(run.batches()))
        own = {tensor.data_ptr() for tensor in run.model.buffers()}
        held: list[Any] = []
        count = 0
        with run.inside():
            for _, whole in whole_tensors(run):
                assert all(one() is None for one in held)
                held = [weakref.ref(whole)] if whole.data_ptr() not in own else []
                count += len(held)
                del whole
        run.asked_to_end = True
    return count


@pytest.mark.parametrize(("plan", "count"), [("zero3", 28), ("pipeline=2", 40)])
def test_one_full_tensor_is_held_at_a_time(plan: str, count: int, ranks: KeptRanks) -> None:
    assert ranks.run(held_at_a_time, plan, size=2) == [count, count]


def averaged(plan: str) -> list[Any]:
    with evenly.start(layers_job(average=evenly.EMA(0.7)), plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
        with run.averaged_weights(), run.whole_model() as average, run.whole_model() as again:
            assert average is not again
        with run.whole_model() as model:
            return [[t.numpy() for t in named_tensors(one).values()] for one in (average, again, model)]


def test_the_whole_model_has_the_average_where_the_model_has_it(ranks: KeptRanks) -> None:
    ((expected, _, weights),) = ranks.run(averaged, "single", size=1)
    assert any((mine != theirs).any() for mine, theirs in zip(expected, weights, strict=True))
    for plan in ("zero3", "pipeline=2"):
        for found, again, _ in ranks.run(averaged, plan, size=2):
            for mine, theirs, one in zip(found, again, expected, strict=True):
                assert (mine == theirs).all()
                np.testing.assert_allclose(mine, one, rtol=1e-9, atol=1e-12)


def test_a_job_that_builds_one_module_only_has_no_other() -> None:
    model = torch.nn.Linear(5, 3)
    mine = classifier_job(model=lambda: model, eval_data=None)
    with evenly.start(mine, plan="single", steps=1) as run:
        run.step(next(run.batches()))
        with pytest.raises(UserError, match="returns the same module each time"), run.whole_model():
            pass
