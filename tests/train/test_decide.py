"""What is settled before a run is built: the first rank decides, and a run that goes on keeps its microbatch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import Classifier, classifier_job
from kept_ranks import KeptRanks

import evenly
from evenly.checkpoint.folder import CheckpointFolder
from evenly.comm.connect import connect, disconnect
from evenly.comm.operations import gather_values
from evenly.comm.world import World
from evenly.errors import PlanError, ResumeError
from evenly.launcher.environment import find_here
from evenly.plan import PlanSpec, asked_plan, parse_plan
from evenly.train.options import RunOptions
from evenly.train.resolve_run import PreviousRun, ResolvedRun, connect_and_resolve, decide, recorded_in
from evenly.train.run import Run


def open_job(**changes: Any) -> evenly.Job:
    return classifier_job(**{"microbatch": None, **changes})


def decided(plans: list[str | None]) -> tuple[ResolvedRun, list[int]]:
    """With another plan on every rank."""
    plan = plans[find_here().rank]
    decision, world = connect_and_resolve(open_job(), RunOptions(plan and parse_plan(plan)), find_here())
    sizes = [world.group("data").size, world.group("world").size]
    leave(world)
    return decision, sizes


def leave(world: World) -> None:
    gather_values(None, world.group("files"))  # a rank that leaves while others still come disturbs them
    disconnect(world)


def test_all_ranks_take_what_the_first_has_decided(ranks: KeptRanks) -> None:
    decision = ResolvedRun(PlanSpec(data=2, zero=1, microbatch=4).complete("float32"), 4)
    assert ranks.run(decided, ["zero1 microbatch=4", None]) == [(decision, [2, 2])] * 2
    other = ResolvedRun(PlanSpec(data=1, tensor=2).complete("float32"))
    assert ranks.run(decided, ["tp", "zero3"]) == [(other, [1, 2])] * 2


class Counted(torch.nn.Sequential):
    """Its class counts the models, and they count their forwards."""

    made = forwards = 0

    def __init__(self) -> None:
        wide = (torch.nn.Sequential(torch.nn.Linear(5, 500), torch.nn.Tanh(), torch.nn.Linear(500, 5)) for _ in "ab")
        super().__init__(*wide)
        Counted.made += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.forwards += 1
        return super().forward(x)


@pytest.mark.parametrize("options", [RunOptions(search=True), RunOptions(no_room=("data=1",))])
def test_what_a_plan_is_sought_with_is_no_part_of_the_training(options: RunOptions) -> None:
    losses, width, known = [0], 0, set[str]()

    def loss(model: torch.nn.Module, x: torch.Tensor) -> evenly.Loss:
        nonlocal width
        losses[0] += 1
        if "width" not in known:  # by which a later call goes
            known.add("width")
            width = x.shape[1]
        return evenly.Loss(model(x)[:, :width].square().sum(), len(x))

    job = evenly.Job(
        model=Counted,
        loss=loss,
        data=[*torch.ones(1200, 5)],
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        global_batch=1200,
        microbatch=600,
        steps=1,
    )
    decide(job, options, find_here())
    assert (losses, Counted.made, Counted.forwards) == ([0], 0, 0)
    assert (width, known) == (0, set())


def refused(plan: str) -> str:
    with pytest.raises(PlanError) as caught:
        connect_and_resolve(classifier_job(), RunOptions(parse_plan(plan)), find_here())
    leave(connect(find_here()))  # the ranks may go on to something else
    return caught.value.found


def test_all_ranks_are_refused_what_the_first_is(ranks: KeptRanks) -> None:
    assert ranks.run(refused, "data=3") == ["its axes (data=3) need 3"] * 2
    assert ranks.run(refused, "ddp microbatch=4") == ["the job states microbatch=3, and the numbers follow it"] * 2


def train(
    changes: dict[str, Any], plan: str | None, steps: int, out: Path, resume: bool = False
) -> tuple[str, dict[str, torch.Tensor]]:
    """What plan.json has, and the model in the end; or why it was refused."""
    try:
        with evenly.start(open_job(**{"precision": "float64", **changes}), plan=plan, out=out, resume=resume) as run:
            for batch in run.batches():
                run.step(batch)
                if run.steps_done == steps:
                    break
            run.save()
            model = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        return (out / "plan.json").read_text(), model
    except PlanError as problem:
        return str(problem), {}


def test_a_run_goes_on_with_the_microbatch_that_it_had(ranks: KeptRanks, tmp_path: Path) -> None:
    [(_, expected)] = ranks.run(train, {"microbatch": 4}, None, 6, tmp_path / "stated", size=1)
    [_, (plan, _)] = ranks.run(train, {}, "zero1 microbatch=4", 3, tmp_path / "out")
    assert json.loads(plan)["microbatch"] == 4 and "microbatch=4" in json.loads(plan)["plan"]
    assert recorded_in(tmp_path / "out") == PreviousRun(4, "rounding")
    for message, _ in ranks.run(train, {}, "ddp microbatch=5", 6, tmp_path / "out", True):
        assert "the run that goes on has microbatch=4" in message
    for plan, model in ranks.run(train, {}, None, 6, tmp_path / "out", True):
        assert json.loads(plan)["microbatch"] == 4 and "microbatch" not in json.loads(plan)["plan"]
        for name, tensor in model.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-11, atol=1e-12)


def test_a_run_goes_on_to_add_gradients_as_it_did(ranks: KeptRanks, tmp_path: Path) -> None:
    changes = {"precision": "float32", "microbatch": 3}
    ranks.run(train, changes, "exact=bitwise", 3, tmp_path, size=1)
    assert recorded_in(tmp_path).exact == "bitwise"
    for plan, _ in ranks.run(train, changes, "zero2", 4, tmp_path, True):
        assert "exact=bitwise" in json.loads(plan)["plan"]
    for message, _ in ranks.run(train, changes, "tp", 5, tmp_path, True):
        assert "use exact=rounding" in message
    for plan, _ in ranks.run(train, changes, "ddp exact=rounding", 5, tmp_path, True):
        assert "exact=rounding" in json.loads(plan)["plan"]


def nested() -> torch.nn.Module:
    return torch.nn.Sequential(Classifier())


def wider() -> torch.nn.Module:
    model = Classifier()
    model.last = torch.nn.Linear(7, 4)
    return model


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def misfit(changes: dict[str, Any], out: Path) -> ResumeError:
    with pytest.raises(ResumeError) as caught, evenly.start(open_job(**changes), out=out, resume=True):
        pass
    return caught.value


def test_a_job_that_is_not_the_saved_one_does_not_go_on(ranks: KeptRanks, tmp_path: Path) -> None:
    same = {"microbatch": 3, "precision": "float64"}
    ranks.run(train, same, None, 2, tmp_path)
    for changes, found in [
        ({"seed": 5, "global_batch": 9}, "seed was 0, is now 5; global_batch was 10, is now 9"),
        ({"precision": "float32"}, "precision was float64, is now float32"),
        ({"model": nested}, "no optimizer saved 0.sometimes"),
        ({"model": wider}, "model.last.weight is float64[3, 7] in the checkpoint, float64[4, 7] here"),
        ({"optimizer": plain_sgd}, "the job's optimizer is SGD"),
    ]:
        [error] = ranks.run(misfit, {**same, **changes}, tmp_path, size=1)
        assert found in error.found
        assert error.exit_code == 2
    assert CheckpointFolder(tmp_path).steps() == [2]


def test_what_cannot_be_read_records_nothing(tmp_path: Path) -> None:
    assert recorded_in(tmp_path) == PreviousRun()
    torn = CheckpointFolder(tmp_path).path(3)
    torn.mkdir(parents=True)
    assert recorded_in(tmp_path) == PreviousRun()
    (torn / "manifest.json").write_text("{")
    assert recorded_in(tmp_path) == PreviousRun()


def test_auto_asks_for_the_best_plan_that_does_what_else_is_said() -> None:
    assert asked_plan("auto") == (None, True)
    assert asked_plan("ddp") == (PlanSpec(zero=0), False)
    assert asked_plan("tensor=2 auto recompute=full") == (PlanSpec(tensor=2, recompute="full"), True)
    with pytest.raises(PlanError, match="tensr"):
        asked_plan("auto tensr=2")
    options = RunOptions(PlanSpec(tensor=2), search=True, steps=3)
    assert RunOptions.from_text(options.to_text()) == options
    assert RunOptions.from_text(RunOptions(PlanSpec(zero=0)).to_text()).plan == PlanSpec(zero=0)


def test_what_is_predicted_of_a_plan_is_written_beside_it(tmp_path: Path) -> None:
    plan, predicted = PlanSpec(data=1).complete("float32"), {"step_s": 0.5, "memory_bytes": [{"peak": 1.0}]}
    with Run(open_job(), ResolvedRun(plan, 5, predicted), connect(find_here()), RunOptions(out=tmp_path)) as run:
        assert run.job.microbatch == 5
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["predicted"] == predicted and document["microbatch"] == 5
