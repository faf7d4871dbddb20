"""The updaters of a run: one, or one for each phase of the job, over parameters of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from evenly.comm.world import World
from evenly.engine.build import call_job, choose_kernels
from evenly.engine.compose import Composed
from evenly.engine.faces import turn
from evenly.engine.updater import Updater
from evenly.errors import UserError
from evenly.job import Job
from evenly.model.phases import parameters_of
from evenly.plan import Plan
from evenly.torch_private import plain_name


class Updaters:
    """What updates the parameters of `composed`.

    by_phase:  by the name of the phase, in their order; of a job without phases under ''.
    optimizer: the job's; of several phases one that stands for all of theirs.
    """

    def __init__(self, job: Job, plan: Plan, composed: Composed, world: World) -> None:
        names = {plain_name(name): p.requires_grad for name, p in composed.named_parameters()}
        self._names = parameters_of(job.phases, names) if job.phases else {"": None}
        self.by_phase = {
            phase: Updater(one, plan, composed, world, only=self._names[phase]) for phase, one in job.by_phase.items()
        }
        if job.schedule_metric and not any(one.advance.follows_evaluations for one in self.by_phase.values()):
            found = "no schedule follows the evaluations"
            raise UserError(
                f"schedule_metric={job.schedule_metric!r}", found, "give it a ReduceLROnPlateau, or leave it out"
            )
        self._every = {phase: job.phases[phase].every if job.phases else 1 for phase in self.by_phase}
        self.optimizer = joined_optimizers([one.optimizer for one in self.by_phase.values()])

    @property
    def first(self) -> Updater:
        return next(iter(self.by_phase.values()))

    def of_step(self, step: int) -> dict[str, Updater]:
        """Those of the phases that are run in `step`, of which the first is 1."""
        return {phase: one for phase, one in self.by_phase.items() if step % self._every[phase] == 0}

    @property
    def trained(self) -> list[str]:
        return [name for one in self.by_phase.values() for name in one.trained]

    def steps_whole(self, name: str) -> bool:
        """Return whether parameter `name` is stepped whole by every rank, though cut."""
        return any(one.whole is not None and name in one.trained for one in self.by_phase.values())

    def waits(self, step: int) -> bool:
        """Whether a schedule has yet to be given an evaluation after `step`."""
        return any(one.advance.waits(step) for one in self.by_phase.values())

    def end_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Advances all schedules that follow the evaluation after `step`."""
        for one in self.by_phase.values():
            one.end_evaluation(step, figures)

    @contextmanager
    def inside(self) -> Generator[None]:
        """Within, the groups of all optimizers hold what this rank steps."""
        with ExitStack() as stack:
            for one in self.by_phase.values():
                stack.enter_context(one.inside())
            yield

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Within, optimizers with two faces show the one for evaluations."""
        with ExitStack() as stack:
            for one in self.by_phase.values():
                stack.enter_context(one.faces.evaluating())
            yield

    def show_groups(self) -> None:
        """Has the job's code find the model's parameters in the groups of all optimizers, in training; a collective."""
        for one in self.by_phase.values():
            turn(one.optimizer, "train")
            one.show_groups()

    @contextmanager
    def as_dtensors(self) -> Generator[None]:
        """Within, sharded parameters and optimizer state are DTensors."""
        with ExitStack() as stack:
            for one in self.by_phase.values():
                stack.enter_context(one.as_dtensors())
            yield

    def state(self) -> dict[str, Any]:
        states = {phase: one.state() for phase, one in self.by_phase.items()}
        return states.get("") or {"phases": states}

    def load_state(self, values: dict[str, Any]) -> None:
        for phase, one in self.by_phase.items():
            one.load_state(values["phases"][phase] if phase else values)


def built_optimizers(job: Job, named: Mapping[str, torch.nn.Parameter], plan: Plan) -> list[Optimizer]:
    """The optimizer of each phase of `job` over its parameters of `named`, with the kernels that the plan allows."""
    names = {name: p.requires_grad for name, p in named.items()}
    own = parameters_of(job.phases, names) if job.phases else {"": names.keys()}
    found: list[Optimizer] = []
    for phase, one in job.by_phase.items():
        mine = [(name, p) for name, p in named.items() if name in own[phase]]
        found.append(call_job("optimizer", partial(one.build_optimizer, mine)))
        choose_kernels(found[-1], plan)
    return found


def joined_optimizers(optimizers: Sequence[Optimizer]) -> Optimizer:
    return optimizers[0] if len(optimizers) == 1 else JoinedOptimizers(optimizers)


class JoinedOptimizers(Optimizer):
    """Several optimizers, over parameters of their own, as one: with the groups of all, and the state of each."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers_of_phases = optimizers
        self.state = _JoinedState(optimizers)  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of all, in their order."""
        return [group for one in self.optimizers_of_phases for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers_of_phases:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Never called: each phase steps its own."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return " and ".join(map(repr, self.optimizers_of_phases))


class _JoinedState(MutableMapping[torch.Tensor, Any]):
    """The state of several optimizers by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Any) -> MutableMapping[torch.Tensor, Any]:
        for one in self._optimizers:
            own = (mine for group in one.param_groups for mine in group["params"])
            if any(parameter is mine for mine in own) or (
                not isinstance(parameter, torch.Tensor) and parameter in one.state
            ):
                return one.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        state = self._of(parameter)
        if parameter not in state:
            raise KeyError(parameter)
        return state[parameter]

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for one in self._optimizers for parameter in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)
