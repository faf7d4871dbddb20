"""The average of a job's weights (`Job.average`), with the numbers of `torch.optim.swa_utils.AveragedModel`.

Each rank averages what it steps: rows of the parameters that the data axis cuts, parts of those that the tensor axis
splits, the parameters of its stages. An average is elementwise, so that how parameters are cut does not show in it.
Parameters that do not train are their own average, and buffers are those of the model.

To evaluate it, the average changes places with the weights, one tensor after the other, and back: no second model is
held, and the weights return with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from evenly.engine.compose import Composed
from evenly.errors import RunError
from evenly.job import EMA, SWA
from evenly.parallel.data.gradients import trainable
from evenly.parallel.data.optimizer import OwnedRows, as_piece
from evenly.plan import Plan
from evenly.torch_private import plain_name, without_subclasses


class AveragedWeights:
    """The average of what this rank steps of the parameters of `composed`.

    count:   updates so far; before the first one there is no average.
    tensors: the average, in the order of `parts`; the weights while it has their place. On the host where the state of
             the optimizer is there.
    is_in_model: whether the model has the average in the place of the weights.
    """

    def __init__(self, average: EMA | SWA, plan: Plan, composed: Composed) -> None:
        self._average, self._composed = average, composed
        self._update: Callable[[Any, Any, Any], None] = (
            get_ema_multi_avg_fn(average.decay) if isinstance(average, EMA) else get_swa_multi_avg_fn()
        )
        cuts = {cut.name: cut for cut in composed.cuts}
        self.parts = [
            cuts.get(name) or OwnedRows(name, parameter, parameter, slice(None))
            for name, parameter in trainable(composed.model, required=False)[0]
            if not parameter.is_meta
        ]
        self.count = 0
        self.is_in_model = False
        self._gather_due = False  # an error has kept other ranks' rows from being gathered
        device = "cpu" if plan.offload in ("optimizer", "parameters") else None
        with self._at_work():
            self.tensors = [torch.empty_like(part.own, device=device) for part in self.parts]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Averages the weights after `step`, if that is one of the average's steps."""
        start, every = self._average.start, self._average.every
        if step < start or (step - start) % every:
            return
        with self._at_work():
            weights = [part.own.to(mine.device) for part, mine in zip(self.parts, self.tensors, strict=True)]
            if self.count == 0:
                for mine, current in zip(self.tensors, weights, strict=True):
                    mine.copy_(current)
            elif weights:
                # The number is a tensor, as torch has it: what it divides is rounded to float32.
                self._update(self.tensors, weights, torch.tensor(self.count))
        self.count += 1

    @contextmanager
    def in_model(self) -> Generator[None]:
        """Within, the model has the average, once there is one; a collective as it begins and as it ends."""
        if not self.count or self.is_in_model:
            yield
            return
        self.is_in_model = True  # from before the first change to after the last one, whatever fails in between
        self._swap()
        self._gather()
        try:
            yield
        except BaseException:
            self._swap()
            self.is_in_model, self._gather_due = False, True  # other ranks may be anywhere: gather later
            raise
        self._swap()
        self.is_in_model = False
        self._gather()

    def require_weights(self, asked: str) -> None:
        """Called before what needs the weights; a collective. Raises `RunError` where the model has the average."""
        if self.is_in_model:
            raise RunError(asked, "the model has the averaged weights", "let run.averaged_weights() end before")
        if self._gather_due:
            self._gather()

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """By name of the parameter, the average as a checkpoint has it: what the data axis cuts as DTensors."""
        pairs = zip(self.parts, self.tensors, strict=True)
        return {plain_name(part.name): as_piece(mine, part.piece) for part, mine in pairs}

    @torch.no_grad()
    def _swap(self) -> None:
        with self._at_work():
            self._composed.gradients.reshard()
            for part, mine in zip(self.parts, self.tensors, strict=True):
                weights = part.own.clone()
                part.own.copy_(mine)
                mine.copy_(weights)

    def _gather(self) -> None:
        with self._at_work():
            self._composed.gradients.all_gather_parameters()
        self._gather_due = False

    @contextmanager
    def _at_work(self) -> Generator[None]:
        """Within, parameters are what this rank has of them."""
        with self._composed.showing(False), without_subclasses():
            yield
