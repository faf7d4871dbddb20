"""One plan predicted, and the libraries that are known: what the search does of many, for tests."""

from __future__ import annotations

from evenly.errors import PlanError
from evenly.plan import Plan
from evenly.planner.costed_plan import costed_plan_of, layers_of, memory_of, predicted, time_of
from evenly.planner.prediction import Prediction
from evenly.planner.request import PlanRequest
from evenly.planner.speeds import _tables


def predict_plan(question: PlanRequest, plan: Plan) -> Prediction:
    """What is predicted of a complete plan. Raises `PlanError` where the model cannot run so."""
    one = costed_plan_of(question, plan)
    if (why := question.subject.refusal(plan)) is not None:
        raise PlanError(f"plan {plan}", why, "leave that axis to others")
    layers = layers_of(one)
    return predicted(question, one, memory_of(question, one, layers), *time_of(one, layers))


def library_names() -> list[str]:
    """Of all known libraries."""
    return [name for name in _tables()["libraries"] if name != "any"]
