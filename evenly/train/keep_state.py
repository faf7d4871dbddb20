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
from evenly.errors import EvenlyError
from evenly.launcher.out_of_memory import is_out_of_memory
from evenly.train.nonfinite import BuffersBefore

if TYPE_CHECKING:
    from evenly.train.run import Run


@contextmanager
def keeping_state(run: Run, *, evaluating: bool = False) -> Generator[None]:
    """Within, where there is no room to go on, the state as it began is saved if this rank has all of it.

    evaluating: whether it is being evaluated, which whoever goes on from it has to make up for.
    """
    if run.out is None or not run.plan.is_replicated or (evaluating and not run.evaluates_later):
        yield
        return
    # One device lets a forward change buffers as it likes; several know what changes them.
    before = None
    if run.plan.devices == 1:
        before = BuffersBefore(run.model) if run.open_step is None else run.open_step.buffers
    steps = run.steps_done
    try:
        yield
    except Exception as problem:
        if run.state_is_whole and run.steps_done and is_out_of_memory(problem):
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
