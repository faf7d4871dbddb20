"""The state of a run, written down and taken up again.

State is weights, their average, optimizer, schedule, loss scale and step number. The position in the data and all
random streams follow from the step number, so that what continues is the very next step, on any number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from evenly.checkpoint import state
from evenly.checkpoint.manifest import MODEL, OPTIMIZER
from evenly.checkpoint.plain import encode
from evenly.checkpoint.shared_memory import keep_snapshot
from evenly.checkpoint.state import group_options, parameter_of, read_state, set_empty_groups
from evenly.checkpoint.store import CheckpointStore, Snapshot
from evenly.comm.collectives import gather_values
from evenly.errors import CheckpointError, ResumeError, UserError
from evenly.train.average import named_averages

if TYPE_CHECKING:
    from evenly.parallel.tensor.saving import SplitCheckpoint
    from evenly.train.options import RunOptions
    from evenly.train.run import Run


def open_store(run: Run, options: RunOptions) -> CheckpointStore:
    """The checkpoints in the run's folders; an error if another run writes there, or its state cannot be saved."""
    assert run.out is not None
    store = CheckpointStore(run.out, run.world.group("files"), options.save_to)
    store.lock(new=not options.resume)
    if not options.resume:
        try:
            _try_values(run, store)
        except BaseException:
            store.close()
            raise
    return store


def snapshot(run: Run) -> Snapshot:
    """The state of `run` after the steps it has done; tensors are the live ones, not copies."""
    if run.weight_average is not None:
        run.weight_average.require_weights("saving")
    with run.state_as_saved():
        tensors, values = read_state(run.model, run.optimizer)
        trained = (f"{MODEL}{name}" for name in run.updaters.trained)
        tensors |= named_averages(run)
        finite = frozenset(name for name in trained if name in tensors and tensors[name].requires_grad)
        if run.composed.pipeline is not None:  # an earlier stage saves what several hold
            others = run.composed.pipeline.ties.counted_elsewhere
            tensors = {name: tensor for name, tensor in tensors.items() if parameter_of(name) not in others}
        if (parts := _parts(run, tensors)) is not None:
            tensors = parts.gather(tensors)
    return Snapshot(run.steps_done, tensors, values | _values(run) | {"hooks": run.hooks.state()}, finite)


def _values(run: Run) -> dict[str, Any]:
    """Return what is saved besides model, optimizer and hooks."""
    values: dict[str, Any] = {"rules": _rules(run), "plan": str(run.plan), **run.updaters.state()}
    if run.feed is not None and (place := run.feed.place(run.steps_done)) is not None:
        values["stream"] = place
    values["averaged"] = 0 if run.weight_average is None else run.weight_average.count
    return values | {"left_out": run.left_out, "ended_early": run.ended_early}


def _try_values(run: Run, store: CheckpointStore) -> None:
    """Raise `UserError`, on all ranks alike, where a value of the state that `run` begins with cannot be saved."""

    def act() -> None:
        hooks: dict[str, Any] = {}
        with suppress(Exception):  # a hook may have no state before its first call
            hooks = run.hooks.state()
        values = read_state(run.model, run.optimizer)[1] | _values(run) | {"hooks": hooks}
        encode(values, "values")

    with run.state_as_saved():
        store.together("save a checkpoint", act)


def save(run: Run, store: CheckpointStore, score: float | None) -> None:
    """Begin the checkpoint of the steps done so far; one that fails leaves those before it, and says where."""
    try:
        store.save(snapshot(run), score=score)
    except UserError as problem:
        store.finish()
        steps = store.steps()
        kept = f"step {steps[-1]} is saved in {run.out}: resume from there" if steps else "nothing was saved before"
        problem.asked = f"saving the state after step {run.steps_done}: {problem.asked}"
        raise CheckpointError(problem.asked, problem.found, f"{problem.do}; {kept}") from problem


def restore(run: Run, store: CheckpointStore, step: int | None = None) -> None:
    """Puts `run` where the checkpoint of `step` left off, by default the newest that is sound.

    Raises `ResumeError` where it is not of this job.
    """
    out = run.out
    assert out is not None
    store.on_first_rank("resume", lambda: keep_snapshot(out))
    checkpoint = store.load(step)
    if run.world.is_main and out not in checkpoint.path.parents:
        print(f"evenly: going on from {checkpoint.path}", file=sys.stderr)
    if store.passed_over and run.world.is_main:
        print(f"evenly: {store.passed_over}: going on from step {checkpoint.step}", file=sys.stderr)
    _check_rules(run, checkpoint.values)
    if run.weight_average is not None:
        run.weight_average.count = checkpoint.values["averaged"]
    with run.state_as_saved():
        averages = named_averages(run)
        state.restore(checkpoint, run.model, run.optimizer, _parts(run, checkpoint.forms), averages)
    _agree_on_groups(run)
    run.composed.gradients.all_gather_parameters()  # a rank has read its own pieces
    run.updaters.load_state(checkpoint.values)
    run.left_out = checkpoint.values.get("left_out", 0)
    run.steps_done = checkpoint.step
    run.hooks.load_state(checkpoint.values.get("hooks", {}))
    run.ended_early = checkpoint.values.get("ended_early", False)
    if run.feed is not None:
        run.feed.go_to(checkpoint.values["stream"])
    run.evaluation_due = checkpoint.values.get("evaluation_due", False)


def _agree_on_groups(run: Run) -> None:
    """Groups of which only other ranks step parameters go on with the options that these have restored.

    A schedule may compute a group's learning rate from the one it has, and is saved by all ranks alike.
    """
    if run.world.size > 1:
        of_ranks = gather_values(group_options(run.optimizer), run.world.group("files"))
        restored = [next((one for one in ranks if one is not None), None) for ranks in zip(*of_ranks, strict=True)]
        set_empty_groups(run.optimizer, restored)


def _parts(run: Run, names: Iterable[str]) -> SplitCheckpoint | None:
    if run.composed.tensor is None:
        return None
    from evenly.parallel.tensor.saving import SplitCheckpoint

    # A rank that steps whole parameters has their state whole.
    cut = (name for name in names if not (name.startswith(OPTIMIZER) and run.updaters.steps_whole(parameter_of(name))))
    return SplitCheckpoint(run.composed.tensor, {name: parameter_of(name) for name in cut})


def _rules(run: Run) -> dict[str, Any]:
    """What the order of samples and the random streams follow from, besides the step number."""
    job, updaters = run.job, run.updaters.by_phase
    return {
        "seed": job.seed,
        "samples": None if job.streams else job.length,
        "global_batch": job.global_batch,
        "microbatch": job.samples_per_microbatch,
        "microbatch_cost": job.microbatch_cost,
        "shuffle": job.shuffle,
        "shuffle_buffer": job.shuffle_buffer,
        "sampler": None if job.order is None else type(job.order).__name__,
        "precision": run.plan.precision,
        "schedule": any(one.schedule is not None for one in updaters.values()),
        "phases": {phase: type(one.optimizer).__name__ for phase, one in updaters.items() if phase} or None,
        "average": None if job.average is None else str(job.average),
    }


def _check_rules(run: Run, values: dict[str, Any]) -> None:
    saved, mine = values.get("rules", {}), _rules(run)
    different = [f"{key} was {saved.get(key)}, is now {mine[key]}" for key in mine if saved.get(key) != mine[key]]
    if different:
        raise ResumeError(
            f"resuming {run.job.name!r}", "; ".join(different), "resume with the settings of the run that saved it"
        )
