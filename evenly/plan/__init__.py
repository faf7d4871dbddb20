"""WHAT runs WHERE: the plan of a run as data. Pure; imports no torch."""

from evenly.plan.plan import NAMED, Plan, parse_plan

__all__ = ["NAMED", "Plan", "parse_plan"]
