"""One plan predicted: what the search does of many, for tests."""

from __future__ import annotations

from evenly.errors import PlanError
from evenly.plan import Plan
from evenly.planner.costed_plan import costed_plan_of, layers_of, predicted, time_of
from evenly.planner.prediction import Prediction
from evenly.planner.request import PlanRequest


def predict_plan(request: PlanRequest, plan: Plan) -> Prediction:
    """What is predicted of a complete plan. Raises `PlanError` where the model cannot run so."""
    one = costed_plan_of(request, plan)
    if (why := request.source.refusal(plan)) is not None:
        raise PlanError(f"plan {plan}", why, "leave that axis to others")
    layers = layers_of(one)
    memory = request.source.memory(plan, one.config, layers, one.machine.library)
    return predicted(request, one, memory, *time_of(one, layers))
