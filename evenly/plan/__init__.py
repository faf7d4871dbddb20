"""WHAT runs WHERE: the plan of a run as data. Pure; imports no torch."""

from evenly.plan.microbatch import with_microbatch
from evenly.plan.plan import NAMED, Exact, Offload, Plan, parse_plan

__all__ = ["NAMED", "Exact", "Offload", "Plan", "parse_plan", "with_microbatch"]
