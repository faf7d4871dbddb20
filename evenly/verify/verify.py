"""`verify`: the reference, then the engine under each plan, each in processes of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evenly.errors import NOT_HERE, EvenlyError, PlanError, RankError, UserError
from evenly.job import Precision
from evenly.jobfile import read_with
from evenly.launcher.agent import Launch, start_ranks
from evenly.plan import PlanSpec, asked_plan
from evenly.verify.compare import RankComparison, Row, judge
from evenly.verify.disturb import Disturbance
from evenly.verify.tasks import FURTHER_DRAWS, KEPT_CASTS, FoundInJob, PlanSteps, said_of_data
from evenly.verify.trajectory import measure_rounding

LOOK_EVERY_S = 0.1  # ranks run for a second or two
SIGNALLED = 128  # an exit code above is 128 + the signal that ended the process


@dataclass(frozen=True)
class Verification:
    """The verdict on each plan.

    note: what is to be known of the job itself, or ''.
    """

    job: str
    steps: int
    dtype: str
    plans: list[Row]
    note: str = ""

    @property
    def exit_code(self) -> int:
        """0 where every plan computes what one device computes; 3 where rounding hides that of some; else 1."""
        found = {row.status for row in self.plans}
        return 0 if found == {"equal"} else 3 if found <= {"equal", "rounding"} else 1


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify: the job of file `path` with `settings`, for `steps` steps in `dtype`.

    keep_casts: whether casts to float32 stay where `dtype` is float64.
    """

    path: Path
    settings: dict[str, Any]
    steps: int
    dtype: Precision
    keep_casts: bool = False


def verify(
    request: VerifyRequest,
    plans: list[str],
    *,
    devices: int | None,
    report: Callable[[str], None],
    judged: Callable[[Row], None] = lambda _: None,
) -> Verification:
    """Runs each of `plans` and compares it with one device that runs the same microbatches.

    devices: of plans that state no sizes; by default the smallest world that shows the plan. report: called with a
    line of progress; judged: with the verdict on each plan as it is known. Raises what the first run of the reference
    raises.
    """
    rows: list[Row] = []
    with TemporaryDirectory(prefix="evenly-verify-") as name:
        references = _ReferenceRuns(request, Path(name), report)
        for text in plans:
            rows.append(_verify_plan(request, text, references, devices=devices, report=report))
            judged(rows[-1])
    return Verification(str(request.path), request.steps, request.dtype, rows, references.found.notes)


class _ReferenceRuns:
    """The reference runs on one device, made when needed: one for each microbatch that plans name (None: the job's).

    folders:   those of the runs so far, with the kinds of rounding that were added in runs of their own.
    with_bits: those that also have the engine's own run on one device, to compare bits with.
    found:     what they have found in the job.
    """

    def __init__(self, request: VerifyRequest, folder: Path, report: Callable[[str], None]) -> None:
        self._request, self._folder, self._report = request, folder, report
        self.folders: dict[Path, set[Disturbance]] = {}
        self.with_bits: set[Path] = set()
        self._measured_again: set[tuple[Path, Disturbance]] = set()
        self.found = FoundInJob()

    def of(self, plan: PlanSpec, kind: Disturbance) -> Path:
        """The folder of the reference of `plan`, to be compared under this `kind` of rounding.

        Raises `PlanError` if its microbatch does not fit the job.
        """
        folder = self._folder / f"microbatch-{plan.microbatch}"
        if kind not in self.folders.get(folder, ()):
            self._make(plan, folder, kind)
            self.folders.setdefault(folder, set()).add(kind)
        if plan.exact == "bitwise" and folder not in self.with_bits:
            single = PlanSpec(data=1, microbatch=plan.microbatch, exact="bitwise")
            if plan != single:
                self._report(f"single: for the bits of the others{_of_microbatch(plan)}")
                _run_steps(self._request, PlanSteps(single, 0, self._request.steps), folder, kind)
            self.with_bits.add(folder)
        return folder

    def _make(self, plan: PlanSpec, folder: Path, kind: Disturbance) -> None:
        runs: list[tuple[Disturbance, int]] = [(kind, 1)] if folder in self.folders else [("none", 1), (kind, 1)]
        what = "again, with rounding added" if len(runs) == 1 else "a plain loop on one device, twice"
        self._report(f"reference: {what}{_of_microbatch(plan)}")
        if self._request.keep_casts:
            folder.mkdir(exist_ok=True)
            (folder / KEPT_CASTS).touch()
        self._run(plan, folder, runs)

    def measure_again(self, plan: PlanSpec, kind: Disturbance) -> bool:
        """Measures what further draws of this `kind` of rounding do to the job; whether that had not been done."""
        folder = self.of(plan, kind)
        if (folder, kind) in self._measured_again:
            return False
        self._measured_again.add((folder, kind))
        self._report(f"reference: with other rounding added, {len(FURTHER_DRAWS)} times{_of_microbatch(plan)}")
        for draw in FURTHER_DRAWS[::2]:
            self._run(plan, folder, [(kind, draw), (kind, draw + 1)])
        return True

    def _run(self, plan: PlanSpec, folder: Path, runs: list[tuple[Disturbance, int]]) -> None:
        request = self._request
        arguments = (request.path, request.settings, request.dtype, plan, request.steps, folder, runs)
        try:
            results = start_ranks(run_references, arguments, Launch(devices=len(runs), look_every_s=LOOK_EVERY_S))
        except RankError as problem:
            problem.do = remedy(problem, request.dtype)
            problem.found += said_of_data(folder)
            raise
        for found in results.values():
            if isinstance(found, PlanError):
                raise found
            self.found |= found
        for kind, draw in runs:
            if kind != "none":
                measure_rounding(folder, kind, draw)


def remedy(problem: RankError, dtype: Precision) -> str:
    """What to do about a failure of the plain loop, whose model and batch are of `dtype`; what the
    job holds itself may be of another type.
    """
    if problem.found.startswith("NotImplementedError"):
        return f"{NOT_HERE}; {problem.do}"
    if re.search(r"\b(Double|BFloat16|Half|float64|bfloat16|float16|dtype)\b", problem.found) is None:
        return problem.do
    return (
        f"verify has the model and the batch in {dtype}: let other tensors that the job uses follow "
        f"(weight.to(logits)), or verify with --dtype of the job's own precision; {problem.do}"
    )


def _of_microbatch(plan: PlanSpec) -> str:
    return "" if plan.microbatch is None else f", microbatch={plan.microbatch}"


def _verify_plan(
    request: VerifyRequest, text: str, references: _ReferenceRuns, *, devices: int | None, report: Callable[[str], None]
) -> Row:
    world, folder = 0, Path()
    try:
        turns = [_Turn.of(request, part.strip(), devices) for part in text.split(">")]
        world = max(turn.world for turn in turns)
        if len(turns) > request.steps:
            raise PlanError(
                f"plan {text}", f"{request.steps} steps for {len(turns)} plans", f"give --steps {len(turns)}"
            )
        kind: Disturbance = "forward" if any(turn.adds_in_forward for turn in turns) else "sums"
        folder = references.of(turns[0].plan, kind)
        if (problem := _problem_of(references.found, world)) is not None:
            return replace(problem, plan=text)
        report(f"{text}: {world} device{'s' * (world != 1)}")
        row = judge(text, _run_turns(request, turns, folder, kind))
        rounds = row.status == "different" and not row.bits_differ  # other bits are no rounding
        if rounds and references.measure_again(turns[0].plan, kind):
            row = judge(text, _run_turns(request, turns, folder, kind))
        return replace(row, world=world)
    except PlanError as problem:
        return Row(text, world, "unsupported", reason=f"{problem.asked}: {problem.found}; {problem.do}")
    except EvenlyError as problem:
        # One device does not run the job either, or verification was stopped.
        if not references.folders or problem.exit_code > SIGNALLED:
            raise
        status = "unsupported" if problem.exit_code == UserError.exit_code else "error"
        found, do = (problem.found + said_of_data(folder), "") if status == "error" else (problem.found, problem.do)
        return Row(text, world, status, reason=" | ".join(filter(None, (problem.asked, found, do))))


def _problem_of(found: FoundInJob, world: int) -> Row | None:
    if found.broken_rule:
        return Row("", world, "different", reason=f"data: {found.broken_rule}")
    if found.hidden_state and world > 1:
        return Row("", world, "unsupported", reason=f"it is free who runs which microbatch, and {found.hidden_state}")
    return None


@dataclass(frozen=True)
class _Turn:
    """One of the plans of `ddp>zero3`, which run a job's steps in turns.

    adds_in_forward: whether it may add in another order within the forward.
    """

    plan: PlanSpec
    world: int
    adds_in_forward: bool

    @classmethod
    def of(cls, request: VerifyRequest, text: str, devices: int | None) -> _Turn:
        plan, search = read_with(request.path, lambda: asked_plan(text))
        if search or plan is None:
            raise PlanError(f"verify plan {text!r}", "auto leaves it to a search", "name plans: --plans 'ddp;zero3'")
        world = world_of(plan, devices)
        if plan.precision not in (None, request.dtype):
            raise PlanError(f"plan {text}", f"verification in {request.dtype}", f"give --dtype {plan.precision}")
        fitted = plan.fit(world)
        complete = fitted.complete(request.dtype)
        return cls(fitted, world, complete.tensor.active or complete.compile == "blocks")


def _run_turns(request: VerifyRequest, turns: Sequence[_Turn], folder: Path, kind: Disturbance) -> list[RankComparison]:
    """Each plan in turn runs its share of the steps; the next goes on from what it has saved."""
    ends = [request.steps * number // len(turns) for number in range(len(turns) + 1)]
    comparisons: list[RankComparison] = []
    with ExitStack() as stack:
        out = Path(stack.enter_context(TemporaryDirectory(prefix="evenly-verify-"))) if len(turns) > 1 else None
        for turn, first, last in zip(turns, ends, ends[1:], strict=False):
            comparisons += _run_steps(request, PlanSteps(turn.plan, first, last, out), folder, kind)
    return comparisons


def _run_steps(request: VerifyRequest, part: PlanSteps, folder: Path, kind: Disturbance) -> list[RankComparison]:
    arguments = (request.path, request.settings, request.dtype, part, request.steps, folder, kind)
    results = start_ranks(run_plan, arguments, Launch(devices=part.plan.ranks or 1, look_every_s=LOOK_EVERY_S))
    return [results[rank] for rank in sorted(results)]


def world_of(plan: PlanSpec, devices: int | None) -> int:
    """Number of devices for `plan`: its own if it states sizes, else `devices`, else the smallest that shows it."""
    if plan.devices or devices:
        return plan.devices or devices or 0
    if plan.shard is not None:
        return 4 if plan.shard == "auto" else 2 * plan.shard
    stated = math.prod(size for size in (plan.tensor, plan.pipeline) if isinstance(size, int))
    return max(2, 2 * stated if plan.data == "auto" else stated)


def run_references(
    path: Path,
    settings: dict[str, Any],
    dtype: Precision,
    plan: PlanSpec,
    steps: int,
    folder: Path,
    runs: list[tuple[Disturbance, int]],
) -> PlanError | FoundInJob:
    """`ranks.write_references`, on each rank: the launcher need not import the engine."""
    from evenly.train.loop import send_stdout_to_stderr
    from evenly.verify.ranks import write_references

    send_stdout_to_stderr()  # what a job prints is no part of the result
    return write_references(path, settings, dtype, plan, steps, folder, runs)


def run_plan(
    path: Path, settings: dict[str, Any], dtype: Precision, part: PlanSteps, steps: int, folder: Path, kind: Disturbance
) -> RankComparison:
    """On each rank, `ranks.compare_file`."""
    from evenly.train.loop import send_stdout_to_stderr
    from evenly.verify.ranks import compare_file

    send_stdout_to_stderr()
    return compare_file(path, settings, dtype, part, steps, folder, kind)
