"""The beginning of a step as spans to be drawn: a plan's schedule with predicted times of its stages. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from evenly.plan import Plan
from evenly.plan.orders import compute_orders
from evenly.plan.schedule import Action, runnable
from evenly.planner.costed_plan import costed_plan_of, layers_of
from evenly.planner.request import PlanRequest
from evenly.planner.time import StageTime, stage_times
from evenly.planner.timeline import Costs, Orders, Timeline, simulate
from evenly.planner.training_config import TrainingConfig

ROUNDS = 2  # microbatches per rank: a schedule fills up, and empties
ALONE = 6  # microbatches of a device without a pipeline
MOST_SPANS = 3000


def preview(question: PlanRequest, plan: Plan) -> Timeline:
    """The spans of a step of `plan`, which is complete, with a few of its microbatches; messages are not drawn."""
    one = costed_plan_of(question, plan)
    stages = stage_times(one.parts, layers_of(one), one.setup, one.machine)
    return simulate(_orders(plan, one.setup), _costs(stages))


def _orders(plan: Plan, setup: TrainingConfig) -> Orders:
    p, v = setup.pipeline, setup.stages_per_rank
    if p == 1:
        return [_alone(min(setup.microbatches, ALONE))]
    few = max(1, min(setup.microbatches, ROUNDS * p, MOST_SPANS // (2 * p * v)))
    return compute_orders(plan.pipeline.schedule, p, v, runnable(plan.pipeline.schedule, p, v, few))


def _alone(microbatches: int) -> Sequence[Action]:
    """The order of one rank: microbatch by microbatch."""
    return [Action(kind, 0, number) for number in range(microbatches) for kind in ("forward", "backward")]


def _costs(stages: Sequence[StageTime]) -> Costs:
    backward, weights = ([getattr(stage.backward, name) for stage in stages] for name in ("seconds", "weights"))
    return Costs(
        forward=[stage.forward.seconds for stage in stages],
        backward=backward,
        backward_input=[whole - later for whole, later in zip(backward, weights, strict=True)],
        backward_weight=weights,
    )
