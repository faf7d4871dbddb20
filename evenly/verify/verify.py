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
from evenly.jobfile import read_with
from evenly.launch.agent import Launch, start_ranks
from evenly.plan import PlanSpec, parse_plan
from evenly.verify.compare import RankComparison, Row, judge
from evenly.verify.ranks import compare_file, write_reference

SIGNALLED = 128  # an exit code above is 128 + the signal that ended the process


@dataclass(frozen=True)
class Verification:
    """The verdict on each plan.

    note: a warning about the job's loss, or ''.
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
    request: VerifyRequest, plans: list[str], *, devices: int | None, report: Callable[[str], None]
) -> Verification:
    """Runs each of `plans` and compares it with one device that runs the same microbatches.

    devices: of plans that state no sizes; by default the smallest world that shows the plan. report: called with a
    line of progress. Raises what the first run of the reference raises.
    """
    with tempfile.TemporaryDirectory(prefix="evenly-verify-") as name:
        references = _ReferenceRuns(request, Path(name), report)
        rows = [_verify_plan(request, text, references, devices=devices, report=report) for text in plans]
    return Verification(str(request.path), request.steps, request.dtype, rows, references.note)


class _ReferenceRuns:
    """The reference runs on one device, one for each microbatch that plans name (None: the job's), made when needed.

    folders:   those of the runs so far.
    with_bits: those that also have the engine's own run on one device, to compare bits with.
    note:      a warning about the job's loss, or ''.
    """

    def __init__(self, request: VerifyRequest, folder: Path, report: Callable[[str], None]) -> None:
        self._request, self._folder, self._report = request, folder, report
        self.folders: set[Path] = set()
        self.with_bits: set[Path] = set()
        self.note = ""

    def of(self, plan: PlanSpec) -> Path:
        """The folder of the reference of `plan`. Raises `PlanError` if its microbatch does not fit the job."""
        folder = self._folder / f"microbatch-{plan.microbatch}"
        if folder not in self.folders:
            self._make(plan, folder)
            self.folders.add(folder)
        if plan.exact == "bitwise" and folder not in self.with_bits:
            single = PlanSpec(data=1, microbatch=plan.microbatch, exact="bitwise")
            if plan != single:
                self._report(f"single: for the bits of the others{_of_microbatch(plan)}")
                _run_plan(self._request, single, folder)
            self.with_bits.add(folder)
        return folder

    def _make(self, plan: PlanSpec, folder: Path) -> None:
        request = self._request
        self._report(f"reference: a plain loop on one device{_of_microbatch(plan)}")
        where = (request.path, request.settings, request.dtype)
        found = start_ranks(write_reference, (*where, plan, request.steps, folder / "reference"), Launch(devices=1))[0]
        if isinstance(found, PlanError):
            raise found
        self.note = self.note or found


def _of_microbatch(plan: PlanSpec) -> str:
    return "" if plan.microbatch is None else f", microbatch={plan.microbatch}"


def _verify_plan(
    request: VerifyRequest, text: str, references: _ReferenceRuns, *, devices: int | None, report: Callable[[str], None]
) -> Row:
    world = 0
    try:
        plan = read_with(request.path, lambda: parse_plan(text))
        world = world_of(plan, devices, text)
        if plan.precision not in (None, request.dtype):
            raise PlanError(f"plan {text}", f"verification in {request.dtype}", f"give --dtype {plan.precision}")
        fitted = plan.fit(world)
        fitted.complete(request.dtype)
        folder = references.of(fitted)
        report(f"{text}: {world} device{'s' * (world != 1)}")
        return replace(judge(text, _run_plan(request, fitted, folder)), world=world)
    except PlanError as problem:
        return Row(text, world, "unsupported", reason=f"{problem.asked}: {problem.found}; {problem.do}")
    except EvenlyError as problem:
        # One device does not run the job either, or verification was stopped.
        if not references.folders or problem.exit_code > SIGNALLED:
            raise
        status = "unsupported" if problem.exit_code == UserError.exit_code else "error"
        return Row(text, world, status, reason=" | ".join(filter(None, (problem.asked, problem.found))))


def _run_plan(request: VerifyRequest, plan: PlanSpec, folder: Path) -> list[RankComparison]:
    arguments = (request.path, request.settings, request.dtype, plan, request.steps, folder)
    results = start_ranks(compare_file, arguments, Launch(devices=plan.ranks or 1))
    return [results[rank] for rank in sorted(results)]


def world_of(plan: PlanSpec, devices: int | None, text: str = "") -> int:
    """Number of devices for `plan`: its own if it states sizes, else `devices`, else the smallest that shows it.

    text: of the plan; some names (2d, 3d) stand for several axes.
    """
    if plan.devices or devices:
        return plan.devices or devices or 0
    if named := {"2d", "3d"} & {*text.replace(",", " ").split()}:
        return 8 if "3d" in named else 4
    if plan.shard is not None:
        return 4 if plan.shard == "auto" else 2 * plan.shard
    stated = math.prod(size for size in (plan.tensor, plan.pipeline) if isinstance(size, int))
    return max(2, stated)
