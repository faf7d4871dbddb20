"""WHAT runs WHERE: the plan of a run as data. Pure; imports no torch."""

from evenly.plan.plan import Exact, Offload, Plan
from evenly.plan.spec import NAMED, PlanSpec, asked_plan, parse_plan, with_microbatch

__all__ = ["NAMED", "Exact", "Offload", "Plan", "PlanSpec", "asked_plan", "parse_plan", "with_microbatch"]
