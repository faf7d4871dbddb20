"""The update of a step: the summed gradient becomes a change of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from evenly.comm.world import World
from evenly.data.generators import seeded
from evenly.data.stream import stream_key
from evenly.engine.build import build_optimizer, check_offload
from evenly.engine.compose import Composed
from evenly.engine.faces import Faces
from evenly.engine.precision import SMALLEST_SCALE, LossScale, first_scale
from evenly.engine.schedule import Advance, build_schedule
from evenly.engine.step_totals import StepTotals
from evenly.errors import EvenlyError, RunError, describe
from evenly.job import Job
from evenly.launcher.out_of_memory import is_out_of_memory
from evenly.model.frozen import frozen_at, frozen_steps
from evenly.parallel.core.memory import HOST, MemoryCounter, state_tensors
from evenly.parallel.core.optimizer_kinds import is_separable, steps_elements
from evenly.parallel.core.param_groups import Members, members, remove_parameters
from evenly.parallel.data.gradients import NORM_ERROR
from evenly.plan import Plan
from evenly.torch_private import has_step_hooks, plain_name, without_subclasses

if TYPE_CHECKING:
    from evenly.parallel.data.optimizer import ShardedOptimizer
    from evenly.parallel.data.owned_optimizer import OwnedOptimizer
    from evenly.parallel.data.whole_optimizer import WholeOptimizer


class Updater:
    """The job's optimizer and learning-rate schedule, as the plan runs them, and the scale of the loss.

    only: names of the parameters that it updates; None for all. whole: steps full parameters in place of the model's.
    """

    def __init__(
        self, job: Job, plan: Plan, composed: Composed, world: World, *, only: Container[str] | None = None
    ) -> None:
        self._job, self._plan, self._composed, self._world = job, plan, composed, world
        named = composed.named_parameters()
        own = named if only is None else [(name, p) for name, p in named if plain_name(name) in only]
        self._own = {name for name, _ in own}
        self._others = frozenset(name for name, _ in named) - self._own
        self.build: Callable[[Sequence[tuple[str, torch.nn.Parameter]]], Optimizer] = partial(
            build_optimizer, job, plan=plan
        )
        self._named = own
        self.optimizer = build_optimizer(job, own, plan, composed.showing(True))
        self._asked = members(self.optimizer)
        self._frozen = frozen_steps([name for name, _ in named], job.frozen or {})
        self._plain = steps_elements(self.optimizer)
        self.whole = self._over_wholes()
        if self.whole is None:
            composed.as_parts(self.optimizer)
        else:
            self.optimizer = self.whole.optimizer
        stepped = {id(parameter) for group in self._asked for parameter in group["params"]}
        self.trained = [plain_name(name) for name, p in own if id(p) in stepped]
        self._stepped: list[Members] | None = None  # while the groups are as the job has built them
        remove_parameters(self.optimizer, [p for p in composed.parameters() if p.is_meta])
        self._sharded = self.whole or self._over_parts()
        self.faces = Faces(self.optimizer, self._filled)
        with composed.showing(True):
            self.schedule = build_schedule(job, self.optimizer)
        self.advance = Advance(job, self.schedule)
        self.loss_scale: LossScale = first_scale(plan.precision, job.global_batch)

    @contextmanager
    def inside(self) -> Generator[None]:
        """Within, the optimizer's groups hold what this rank steps; outside, once shown, the model's parameters."""
        if self._stepped is None:
            yield
            return
        groups, stepped, self._stepped = self.optimizer.param_groups, self._stepped, None
        if len(groups) != len(stepped) or any(
            [*map(id, group["params"])] != [*map(id, asked["params"])]
            for group, asked in zip(groups, self._asked, strict=True)
        ):
            raise RunError(
                "the optimizer's parameters", "its groups have changed since the run began", "group them in the job"
            )
        for group, own in zip(groups, stepped, strict=True):
            group |= own
        try:
            yield
        finally:
            self.show_groups()

    def show_groups(self) -> None:
        """Has the job's code find the model's parameters in the optimizer's groups, but `inside`."""
        stepped = members(self.optimizer)
        pairs = zip(stepped, self._asked, strict=True)
        if any([*map(id, own["params"])] != [*map(id, asked["params"])] for own, asked in pairs):
            self._stepped = stepped
            for group, asked in zip(self.optimizer.param_groups, self._asked, strict=True):
                group |= {key: [*listed] for key, listed in asked.items()}

    def _over_wholes(self) -> WholeOptimizer | None:
        """Return the job's optimizer over full parameters, if this rank has parts and it may need all of them."""
        composed, plan = self._composed, self._plan
        if self._plain or not (composed.tensor or (composed.cuts and not is_separable(self.optimizer))):
            return None
        if composed.tensor or plan.data.zero_stage:
            check_offload(self.optimizer, plan.offload)
        from evenly.parallel.data.whole_optimizer import WholeOptimizer

        return WholeOptimizer(
            composed.model,
            self._named,
            self.build,
            composed.cuts,
            gather=composed.full_view,
            part=composed.local_part,
            outside=composed.outside,
            offload=plan.offload == "optimizer",
        )

    def named_shapes(self) -> list[tuple[str, torch.nn.Parameter, torch.Size]]:
        """Return its parameters by name, with their shapes in the model as the job has built it."""
        return [(name, p, self._composed.full_shape(name, p)) for name, p in self._named]

    def _over_parts(self) -> OwnedOptimizer | ShardedOptimizer | None:
        """Return what steps the optimizer over pieces, or over parameters dealt whole to ranks; None where it does."""
        composed, optimizer, offload = self._composed, self.optimizer, self._plan.offload
        cuts = [cut for cut in composed.cuts if cut.name in self._own]
        if not cuts:
            return None
        if not self._plain and self._plan.data.zero_stage:
            check_offload(optimizer, offload)
            from evenly.parallel.data.mesh import groups_of
            from evenly.parallel.data.owned_optimizer import OwnedOptimizer

            group, _ = groups_of(cuts[0].piece.device_mesh, self._world.group("data"))
            return OwnedOptimizer(composed.model, optimizer, cuts, group, outside=composed.outside)
        from evenly.parallel.data.optimizer import ShardedOptimizer  # takes seconds to import

        return ShardedOptimizer(composed.model, optimizer, cuts, offload=offload)

    @contextmanager
    def _filled(self) -> Generator[None]:
        """Within, the optimizer has its parameters whole, outside of a step; a collective."""
        with self._composed.showing(False), self.inside():
            self._composed.gradients.reshard()
            with nullcontext() if self.whole is None else self.whole.filled():
                yield

    def mean_gradient(self, totals: StepTotals, counter: MemoryCounter | None) -> float:
        """Divides the summed gradient by the weight; returns its norm."""
        gradients = self._composed.gradients
        if self._plain and self._composed.cut and has_step_hooks(self.optimizer):
            raise RunError(
                "the optimizer's step",
                "it was given a hook after the run had begun, which would see this rank's parts",
                "give it to the optimizer where the job builds it",
            )
        if counter is not None:
            gradients.track(counter)
        if self._composed.pipeline is not None:
            self._composed.pipeline.ties.sum(gradients.named_gradients())
        divisor = totals.weight * self.loss_scale.factor
        norm = gradients.norm()
        grad_norm = self._same_bits(norm, divisor) if self._plan.exact == "bitwise" else float(norm / divisor)
        gradients.divide(divisor)
        return grad_norm

    def overflows(self, grad_norm: float) -> bool:
        """Whether a smaller scale of the loss may make a gradient finite that is not."""
        scaled = self._plan.precision == "float16" and self.loss_scale.factor > SMALLEST_SCALE
        return scaled and not math.isfinite(grad_norm)

    def apply(self, grad_norm: float, step: int, counter: MemoryCounter | None) -> bool:
        """Applies the gradient of `step`, of this norm, unless it overflows; returns whether it was applied."""
        gradients = self._composed.gradients
        overflows = self.overflows(grad_norm)
        if self._plan.precision == "float16":
            self.loss_scale = self.loss_scale.after(finite=not overflows)
        if overflows:
            return False
        if self._job.clip_norm is not None and (factor := self._job.clip_norm / (grad_norm + 1e-6)) < 1:
            gradients.scale(factor)
        with (
            torch.compiler.set_stance("force_eager") if self._sharded is not None else nullcontext(),
            nullcontext() if self._plain else seeded(stream_key(self._job.seed, "optimizer", step), self._world.device),
        ):
            if self._plain and self._sharded is None:
                with without_subclasses():  # torch's own asks each parameter several things
                    self.optimizer.step()
            else:
                self._step(step)
        if self._sharded is not None:
            gradients.all_gather_parameters()
        if counter is not None:
            counter.track(state_tensors(self.optimizer), "optimizer", self.device_number)
        return True

    def _step(self, step: int) -> None:
        try:
            if self._sharded is not None:
                self._sharded.step(self._composed.gradients.named_gradients())
            else:
                self.optimizer.step()
        except Exception as problem:
            if self._plain or isinstance(problem, EvenlyError) or is_out_of_memory(problem):
                raise
            kind = type(self.optimizer).__name__
            raise RunError(f"the step of optimizer {kind} in step {step}", describe(problem), "correct it") from problem

    def _same_bits(self, norm: torch.Tensor, divisor: float) -> float:
        """norm / divisor, rounded to float32 so that the order in which `norm` was added up does not show.

        Mostly all values that it may be off by are rounded to the same number; where they are not, all ranks know.
        """
        lowest, highest = (norm * (1 + error) / divisor for error in (-NORM_ERROR, NORM_ERROR))
        if lowest.float() == highest.float() or not math.isfinite(norm):
            return float(highest.float())
        exact = torch.tensor(self._composed.gradients.exact_norm(), dtype=torch.float64)
        return float((exact / divisor).float())

    def begin_step(self, step: int) -> None:
        """Has the gradients dropped of parameters that are frozen in `step`, and of those of other phases."""
        if self._frozen or self._others:
            self._composed.gradients.drop(frozen_at(self._frozen, step) | self._others)

    def end_step(self, step: int) -> None:
        """Advances a learning-rate schedule that counts steps."""
        with self._composed.showing(True):
            self.advance.end_step(step)

    def end_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Advances a learning-rate schedule that follows the evaluation after `step`."""
        with self._composed.showing(True):
            self.advance.evaluated(step, figures)

    def state(self) -> dict[str, Any]:
        return {
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "followed": self.advance.followed,
            "loss_scale": [self.loss_scale.factor, self.loss_scale.clean_steps],
        }

    def load_state(self, values: dict[str, Any]) -> None:
        if self.schedule is not None:
            self.schedule.load_state_dict(values["schedule"])
        self.advance.followed = values.get("followed", 0)
        self.loss_scale = LossScale(*values["loss_scale"])

    def as_dtensors(self) -> AbstractContextManager[None]:
        """Within, sharded parameters and optimizer state are DTensors."""
        return nullcontext() if self._sharded is None else self._sharded.as_dtensors()

    @property
    def learning_rate(self) -> Any:
        """Learning rate of the first parameter group; nan if it has none."""
        rate = self.optimizer.param_groups[0].get("lr")
        return math.nan if rate is None else rate

    @property
    def device_number(self) -> int:
        """Number of the device that has the optimizer's state."""
        return HOST if self._plan.offload in ("optimizer", "parameters") else 0
