"""The state of a run that has no room to go on, saved by the rank that found out, while the others wait for it.

Only where each rank holds the whole state: elsewhere the run goes on from its newest checkpoint. Tensors in CPU memory
are written as they are, since memory is what lacks.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from evenly.checkpoint.folder import CheckpointFolder
from evenly.errors import EvenlyError, PathError
from evenly.launcher.out_of_memory import is_out_of_memory
from evenly.train.nonfinite import BuffersBefore

if TYPE_CHECKING:
    from evenly.train.run import Run


@contextmanager
def keeping_state(run: Run, *, evaluating: bool = False) -> Generator[None]:
    """Within, where there is no room to go on, the state as it began is saved if this rank has all of it; where a
    microbatch takes a path that stages cannot run, which all ranks learn together, they save it together.

    evaluating: whether it is being evaluated, which whoever goes on from it has to make up for.
    """
    keeps = run.out is not None and run.plan.is_replicated and (not evaluating or run.evaluates_later)
    before = None
    if keeps and run.plan.devices == 1:  # which lets a forward change buffers; several know what changes them
        before = BuffersBefore(run.model) if run.open_step is None else run.open_step.buffers
    steps = run.steps_done
    try:
        yield
    except PathError as problem:
        if run.store is None or not run.state_is_whole or not run.steps_done:
            raise
        run.composed.drop_statistics()
        run.open_step = None
        run.save()
        run.store.finish()
        do = f"{problem.do}: the state after step {run.steps_done} is saved, and --resume goes on from it"
        raise PathError(problem.asked, problem.found, do) from problem
    except Exception as problem:
        if keeps and run.state_is_whole and run.steps_done and is_out_of_memory(problem):
            if run.steps_done == steps:
                run.composed.drop_statistics()  # a recomputation may have changed buffers
                if before is not None:
                    before.put_back()
            _free_memory(run, problem)
            with run.world.during("saving"):
                _save(run, evaluation_due=evaluating)
        raise


def _free_memory(run: Run, problem: BaseException) -> None:
    """Frees what the step has left: activations, in the frames of all errors that led to `problem`, and gradients."""
    one: BaseException | None = problem
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    run.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _save(run: Run, *, evaluation_due: bool) -> None:
    """Makes the state after `run.steps_done` steps a checkpoint, unless there is one; where that fails, says so.

    Several ranks may come here at once: one writes, and the others wait for it.
    """
    assert run.out is not None
    folder = CheckpointFolder(run.out)
    with suppress(Exception):  # of a checkpoint that all ranks are writing
        if run.store is not None:
            run.store.finish()
    try:
        from evenly.checkpoint.store import save_alone
        from evenly.train.resume import snapshot

        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.checkpoints, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if run.steps_done not in folder.steps():
                with run.updaters.evaluating():
                    state = snapshot(run)
                    save_alone(folder, replace(state, values={**state.values, "evaluation_due": evaluation_due}))
        finally:
            os.close(lock)
    except (EvenlyError, OSError, MemoryError, RuntimeError) as other:
        print(f"evenly: the state after step {run.steps_done} cannot be saved: {other}", file=sys.stderr)
