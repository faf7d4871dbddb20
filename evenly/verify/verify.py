"""`verify`: the reference, then the engine under each plan, each in processes of its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evenly.errors import EvenlyError, PlanError, UserError
from evenly.job import Precision
from evenly.launch.agent import Launch, start_ranks
from evenly.plan import PlanSpec, parse_plan
from evenly.verify.compare import RankComparison, Row, judge
from evenly.verify.ranks import compare_file, write_reference

SIGNALLED = 128  # of an exit code: the number of the signal that ended a process is added to it


@dataclass(frozen=True)
class Verification:
    """What is verified, and the verdict on each plan.

    note: what speaks against the job's loss, which every plan takes as it is; '' where nothing does.
    """

    job: str
    steps: int
    dtype: str
    plans: list[Row]
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether every plan computes what one device computes."""
        return all(row.status == "equal" for row in self.plans)


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify: the job of file `path` with `settings`, for `steps` steps in `dtype`."""

    path: Path
    settings: dict[str, Any]
    steps: int
    dtype: Precision


def verify(
    question: VerifyRequest, plans: list[str], *, devices: int | None, say: Callable[[str], None]
) -> Verification:
    """Runs each of `plans`, and what it is held against; `say` gets what is under way.

    devices: number of devices of plans that state none; by default the smallest that shows the plan.

    A plan is held against one device that runs the same microbatches. Raises what the first such run raises.
    """
    with tempfile.TemporaryDirectory(prefix="evenly-verify-") as name:
        references = _References(question, Path(name), say)
        rows = [_verify_plan(question, text, references, devices=devices, say=say) for text in plans]
    return Verification(str(question.path), question.steps, question.dtype, rows, references.note)


class _References:
    """What one device computes, for each microbatch that plans name (None: the job's own), made when first needed.

    made:      the folders that hold it.
    with_bits: those of them that hold the engine's own run on one device too, whose bits others are to have.
    note:      what speaks against the job's loss.
    """

    def __init__(self, question: VerifyRequest, folder: Path, say: Callable[[str], None]) -> None:
        self._question, self._folder, self._say = question, folder, say
        self.made: set[Path] = set()
        self.with_bits: set[Path] = set()
        self.note = ""

    def of(self, plan: PlanSpec) -> Path:
        """The folder that `plan` is held against. Raises `PlanError` where its microbatch does not go with the job."""
        folder = self._folder / f"microbatch-{plan.microbatch}"
        if folder not in self.made:
            self._make(plan, folder)
            self.made.add(folder)
        if plan.exact == "bitwise" and folder not in self.with_bits:
            alone = PlanSpec(data=1, microbatch=plan.microbatch, exact="bitwise")
            if plan != alone:
                self._say(f"single: for the bits of the others{_of_microbatch(plan)}")
                _run_plan(self._question, alone, folder)
            self.with_bits.add(folder)
        return folder

    def _make(self, plan: PlanSpec, folder: Path) -> None:
        question = self._question
        self._say(f"reference: a plain loop on one device{_of_microbatch(plan)}")
        where = (question.path, question.settings, question.dtype)
        found = start_ranks(write_reference, (*where, plan, question.steps, folder / "reference"), Launch(devices=1))[0]
        if isinstance(found, PlanError):
            raise found
        self.note = self.note or found


def _of_microbatch(plan: PlanSpec) -> str:
    return "" if plan.microbatch is None else f", microbatch={plan.microbatch}"


def _verify_plan(
    question: VerifyRequest, text: str, references: _References, *, devices: int | None, say: Callable[[str], None]
) -> Row:
    world = 0
    try:
        plan = parse_plan(text)
        world = world_of(plan, devices, text)
        if plan.precision not in (None, question.dtype):
            raise PlanError(f"plan {text}", f"verification in {question.dtype}", f"give --dtype {plan.precision}")
        fitted = plan.fit(world)
        fitted.complete(question.dtype)
        folder = references.of(fitted)
        say(f"{text}: {world} device{'s' * (world != 1)}")
        return replace(judge(text, _run_plan(question, fitted, folder)), world=world)
    except PlanError as problem:
        return Row(text, world, "unsupported", reason=f"{problem.asked}: {problem.found}; {problem.do}")
    except EvenlyError as problem:
        # One device does not run the job either, or verification was stopped.
        if not references.made or problem.exit_code > SIGNALLED:
            raise
        status = "unsupported" if problem.exit_code == UserError.exit_code else "error"
        return Row(text, world, status, reason=" | ".join(filter(None, (problem.asked, problem.found))))


def _run_plan(question: VerifyRequest, plan: PlanSpec, folder: Path) -> list[RankComparison]:
    arguments = (question.path, question.settings, question.dtype, plan, question.steps, folder)
    results = start_ranks(compare_file, arguments, Launch(devices=plan.ranks or 1))
    return [results[rank] for rank in sorted(results)]


def world_of(plan: PlanSpec, devices: int | None, text: str = "") -> int:
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
