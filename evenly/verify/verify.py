"""`verify`: the reference, then the engine under each plan, each in processes of its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenly.cluster.launch import Launch, start_ranks
from evenly.errors import EvenlyError, PlanError
from evenly.job import Precision
from evenly.plan import Plan, parse_plan
from evenly.verify.compare import Row, Trace, judge
from evenly.verify.ranks import compare_file, write_reference


@dataclass(frozen=True)
class Verification:
    """What is verified, and the verdict on each plan."""

    job: str
    steps: int
    dtype: str
    plans: list[Row]

    @property
    def equal(self) -> bool:
        """Whether every plan computes what one device computes."""
        return all(row.status == "equal" for row in self.plans)


@dataclass(frozen=True)
class Question:
    """What to verify: the job of file `path` with `settings`, for `steps` steps in `dtype`."""

    path: Path
    settings: dict[str, Any]
    steps: int
    dtype: Precision


def verify(question: Question, plans: list[str], *, devices: int | None, say: Callable[[str], None]) -> Verification:
    """Runs the reference and each of `plans`; `say` is told what is under way. Raises what the reference raises.

    devices: number of devices of plans that state none; by default the smallest that shows the plan.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="evenly-verify-") as name:
        folder = Path(name)
        say("reference: a plain loop on one device")
        arguments = (question.path, question.settings, question.dtype, question.steps, folder / "reference")
        start_ranks(write_reference, arguments, Launch(devices=1))
        if question.dtype != "float64" and plans[0] != "single":
            say("single: for the bits of the others")
            _run_plan(question, parse_plan("single"), folder)
        for text in plans:
            rows.append(_verify_plan(question, text, devices=devices, folder=folder, say=say))
    return Verification(str(question.path), question.steps, question.dtype, rows)


def _verify_plan(
    question: Question, text: str, *, devices: int | None, folder: Path, say: Callable[[str], None]
) -> Row:
    world = 0
    try:
        plan = parse_plan(text)
        world = world_of(plan, devices, text)
        if plan.precision not in (None, question.dtype):
            raise PlanError(f"plan {text}", f"verification in {question.dtype}", f"give --dtype {plan.precision}")
        fitted = plan.fit(world)
        fitted.resolve(question.dtype)
    except PlanError as problem:
        return Row(text, world, "unsupported", reason=f"{problem.asked}: {problem.found}")
    say(f"{text}: {world} device{'s' * (world != 1)}")
    try:
        return replace(judge(text, _run_plan(question, fitted, folder)), world=world)
    except EvenlyError as problem:
        return Row(text, world, "error", reason=" | ".join(filter(None, (problem.asked, problem.found))))


def _run_plan(question: Question, plan: Plan, folder: Path) -> list[Trace]:
    arguments = (question.path, question.settings, question.dtype, plan, question.steps, folder)
    results = start_ranks(compare_file, arguments, Launch(devices=plan.ranks or 1))
    return [results[rank] for rank in sorted(results)]


def world_of(plan: Plan, devices: int | None, text: str = "") -> int:
    """Devices for `plan`: its own if it states sizes, else `devices`, else the smallest that shows it.

    text: what it was read from; some names stand for several axes.
    """
    if plan.devices or devices:
        return plan.devices or devices or 0
    if named := {"2d", "3d"} & {*text.replace(",", " ").split()}:
        return 8 if "3d" in named else 4
    if plan.shard is not None:
        return 4 if plan.shard == "auto" else 2 * plan.shard
    stated = math.prod(size for size in (plan.tensor, plan.pipeline) if isinstance(size, int))
    return max(2, stated)
