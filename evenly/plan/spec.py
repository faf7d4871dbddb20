"""What was asked of a plan, as text or by keyword, and how it becomes a plan for a number of devices.

A plan's text is pairs `key=value` and names of common plans, in any order: `single`, `ddp`, `data=4 exact=rounding`.
A plan named without sizes takes the devices that it is given: `PlanSpec.fit(devices)` fills them in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from evenly.errors import PlanError
from evenly.job import PRECISIONS, Job, Precision
from evenly.plan.axes import DataAxis, DeviceReplicas, PipelineAxis, TensorAxis, ZeroStage
from evenly.plan.plan import Compile, Exact, Offload, Plan, Recompute, in_words
from evenly.plan.schedule import SCHEDULES, Schedule, stages_per_rank

SYNONYMS = {"dp": "data", "tp": "tensor", "pp": "pipeline"}
OPEN = (None, "auto")


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """What was asked of a plan; None leaves a value open, and "auto" a size to the devices that are given.

    Every value may be given as the text of a plan has it. The fields are those of `Plan` and its axes: data, zero,
    shard and speeds of `DataAxis`; tensor, tensor_exclude and sequence_parallel of `TensorAxis`; pipeline, schedule,
    stages_per_rank and split_points of `PipelineAxis`; replicas and output_device of `DeviceReplicas`. An open data
    axis takes all devices that the others leave, several where it is "auto"; shard="auto" takes the largest number that
    leaves several groups.

    Raises `PlanError`, with every problem at once, for values that do not exist or do not go together.
    """

    data: int | Literal["auto"] | None = None
    zero: ZeroStage | None = None
    shard: int | Literal["auto"] | None = None
    tensor: int | Literal["auto"] | None = None
    tensor_exclude: tuple[str, ...] | None = None
    sequence_parallel: bool | None = None
    pipeline: int | Literal["auto"] | None = None
    schedule: Schedule | None = None
    stages_per_rank: int | None = None
    split_points: tuple[int, ...] | None = None
    speeds: tuple[float, ...] | Literal["measured"] | None = None
    replicas: int | Literal["auto"] | None = None
    output_device: int | None = None
    microbatch: int | None = None
    recompute: Recompute | None = None
    compile: Compile | None = None
    offload: Offload | None = None
    precision: Precision | None = None
    exact: Exact | None = None

    def __post_init__(self) -> None:
        values, problems = _read(self.explicit)
        if problems:
            raise PlanError(f"plan {self}", "; ".join(problems), "fix what is named")
        for key, value in values.items():
            object.__setattr__(self, key, value)
        found = next((found for check in CHECKS if (found := check(self)) is not None), None)
        if found is not None:
            raise PlanError(f"plan {self}", *found)
        self._check_split_points()

    def _check_split_points(self) -> None:
        per_rank = stages_per_rank(self.schedule or "1f1b", self.stages_per_rank) if self.splits_blocks else 1
        if self.split_points is not None and isinstance(self.pipeline, int):
            stages, named = self.pipeline * per_rank, len(self.split_points)
            if named != stages - 1:
                raise PlanError(
                    f"plan {self}",
                    f"{stages} stages begin at {stages - 1} blocks after the first, and split_points names {named}",
                    f"name {stages - 1} blocks",
                )

    @property
    def explicit(self) -> dict[str, Any]:
        """What is not left open."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @property
    def splits_blocks(self) -> bool:
        """Whether it has a pipeline axis."""
        return self.pipeline not in (None, 1)

    @property
    def splits_tensors(self) -> bool:
        """Whether it has a tensor axis."""
        return self.tensor not in (None, 1)

    @property
    def ranks(self) -> int | None:
        """World size: the product of the axes; None while an axis waits for its size."""
        sizes = (self.data, self.tensor or 1, self.pipeline or 1)
        return None if any(size in OPEN for size in sizes) else math.prod(size for size in sizes if size is not None)  # pyright: ignore

    @property
    def devices(self) -> int | None:
        """Devices that the plan uses; None while an axis or the replicas wait for their number."""
        if self.replicas is None:
            return self.ranks
        return None if self.replicas == "auto" else self.replicas

    def fit(self, devices: int) -> PlanSpec:
        """The same with every size set so that it uses `devices`; raises `PlanError` where it cannot."""
        asked = f"plan {self} on {devices} device{'s' * (devices != 1)}"
        if self.replicas is not None:
            return self._fit_replicas(devices, asked)
        values: dict[str, Any] = {}
        known = [size for size in (self.data, self.tensor, self.pipeline) if isinstance(size, int)]
        rest = max(1, devices // math.prod(known))
        for axis in ("tensor", "pipeline"):
            if getattr(self, axis) == "auto":
                values[axis], rest = rest, 1
                values["data"] = self.data if isinstance(self.data, int) else 1
        if values.get("pipeline") == 1:  # one stage has no schedule
            values |= {"schedule": None, "stages_per_rank": None}
        data = values.setdefault("data", self.data if isinstance(self.data, int) else rest)
        if self.data == "auto" and data == 1:
            several = 2 * math.prod(known)
            raise PlanError(asked, "it leaves the data axis one rank", f"give --devices {several}, or add data=1")
        if self.shard == "auto":
            values["shard"] = largest_shard(data)
        elif self.shard is not None and data % self.shard:
            raise PlanError(
                asked, f"groups of {self.shard} do not divide {data} ranks", "give a shard that divides the data axis"
            )
        fitted = replace(self, **values)
        if fitted.devices != devices:
            axes = {"pipeline": fitted.pipeline or 1, "data": data, "tensor": fitted.tensor or 1}
            product = " x ".join(f"{axis}={size}" for axis, size in axes.items() if size != 1 or axis == "data")
            raise PlanError(
                asked,
                f"its axes ({product}) need {fitted.devices}",
                f"give --devices {fitted.devices}, or a plan without sizes",
            )
        return fitted

    def _fit_replicas(self, devices: int, asked: str) -> PlanSpec:
        fitted = replace(self, data=1, replicas=devices if self.replicas == "auto" else self.replicas)
        if fitted.replicas != devices:
            raise PlanError(
                asked, f"it needs {self.replicas}", f"give --devices {self.replicas}, or a plan without sizes"
            )
        if fitted.output_device is not None and fitted.output_device >= devices:
            raise PlanError(
                asked,
                f"replicas are counted from 0 and output_device is {self.output_device}",
                "name one of the replicas",
            )
        return fitted

    def complete(self, precision: Precision) -> Plan:
        """The plan of a job of this `precision`; every size must be set, as `fit` does. May raise `PlanError`."""
        data, tensor, pipeline = self.data, self.tensor or 1, self.pipeline or 1
        assert isinstance(data, int) and tensor != "auto" and pipeline != "auto" and self.shard != "auto"
        assert self.replicas != "auto"
        schedule = self.schedule or "1f1b"
        alone = data * tensor * pipeline == 1 and self.offload != "parameters"  # nothing to share with, or to fetch
        return Plan(
            data=DataAxis(data, 0 if alone else self.zero or 0, self.shard or data, self._speeds(data)),
            tensor=TensorAxis(tensor, self.tensor_exclude or (), bool(self.sequence_parallel)),
            pipeline=PipelineAxis(
                pipeline,
                schedule,
                stages_per_rank(schedule, self.stages_per_rank) if pipeline > 1 else 1,
                self.split_points or (),
            ),
            replicas=DeviceReplicas(self.replicas or 1, self.output_device),
            microbatch=self.microbatch,
            recompute=self.recompute or "none",
            compile=self.compile or "off",
            offload=self.offload or "none",
            precision=self.precision or precision,
            exact=self.exact or "rounding",
        )

    def _speeds(self, data: int) -> tuple[float, ...] | Literal["measured"]:
        if isinstance(self.speeds, tuple) and len(self.speeds) != data:
            found = f"speeds names {len(self.speeds)} ranks, and the data axis has {data}"
            raise PlanError(f"plan {self}", found, f"name {data} speeds, or speeds=measured")
        return self.speeds or ()

    def __str__(self) -> str:
        if self.explicit == NAMED["ddp"]:
            return "ddp"
        return " ".join(f"{key}={in_words(value)}" for key, value in self.explicit.items()) or "auto"


# ------------------------------------------------------------------------------------- what does not go together
Problem = tuple[str, str] | None  # what was found, and what to do


def _check_zero(spec: PlanSpec) -> Problem:
    if spec.shard is not None and not spec.zero:
        return "shard says over how many ranks zero shards, and zero is not set", "add zero=1, 2 or 3"
    if spec.offload == "parameters" and spec.zero != 3:
        return (
            "parameters on the host are gathered block by block, which is zero=3",
            "add zero=3 (on one device too), or use offload=optimizer",
        )
    return None


def _check_speeds(spec: PlanSpec) -> Problem:
    if spec.speeds is not None and (spec.zero == 3 or spec.replicas is not None):
        return (
            "shares follow speeds where ranks may run different numbers of microbatches, and here all run equally many",
            "leave out speeds, or use ddp, zero1 or zero2",
        )
    return None


def _check_tensor(spec: PlanSpec) -> Problem:
    if (spec.tensor_exclude is not None or spec.sequence_parallel) and not spec.splits_tensors:
        return "tensor_exclude and sequence_parallel say how the tensor axis splits, and there is none", "add tensor=2"
    if spec.splits_tensors and spec.replicas is not None:
        return "the tensor axis splits over processes, and replicas share one", "leave out replicas, or tensor"
    if spec.splits_tensors and spec.compile == "blocks":
        return (
            "the tensor axis splits each function of torch as it is called, and a compiled block calls none",
            "leave out compile, or tensor",
        )
    return None


def _check_pipeline(spec: PlanSpec) -> Problem:
    keys = ("schedule", "stages_per_rank", "split_points")
    asked = [key for key in keys if getattr(spec, key) is not None]
    if not spec.splits_blocks:
        return (
            (f"{' and '.join(asked)} say how a pipeline runs, and there is none", "add pipeline=2") if asked else None
        )
    if spec.replicas is not None:
        return "replicas share one process, and a pipeline has one per stage", "leave out replicas, or pipeline"
    if spec.sequence_parallel:
        return "what stages send each other is not split", "leave out sequence_parallel=on, or pipeline"
    return None


def _check_replicas(spec: PlanSpec) -> Problem:
    if spec.output_device is not None and spec.replicas is None:
        return "output_device names one of the replicas, and there are none", "add replicas=2, say"
    if spec.replicas is not None and (spec.zero or spec.data not in (None, 1)):
        return (
            "replicas share one process; data and zero split over several",
            "leave out replicas (ddp uses the same devices, faster), or the others",
        )
    return None


CHECKS: tuple[Callable[[PlanSpec], Problem], ...] = (
    _check_zero,
    _check_speeds,
    _check_tensor,
    _check_pipeline,
    _check_replicas,
)


# ------------------------------------------------------------------------------------------------ values of keys
def _count(value: Any) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(value)


def _number(value: Any) -> int:
    if not str(value).isdecimal():
        raise ValueError("must be a whole number, counted from 0")
    return int(value)


def _size(value: Any) -> Any:
    return value if value == "auto" else _count(value)


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(value.split("|")) if isinstance(value, str) else tuple(value)


def _split_points(value: Any) -> tuple[int, ...]:
    numbers = [str(number) for number in _patterns(value)]
    if not all(number.isdecimal() for number in numbers):
        raise ValueError("must be numbers of blocks with | between them")
    found = tuple(int(number) for number in numbers)
    if sorted({*found} - {0}) != [*found]:
        raise ValueError("must be ascending numbers of blocks, of which 0 is not one")
    return found


def _speeds(value: Any) -> tuple[float, ...] | str:
    if value == "measured":
        return value
    try:
        found = tuple(float(one) for one in _patterns(value))
    except ValueError:
        found = (0.0,)
    if not all(0 < one < math.inf for one in found):
        raise ValueError("must be measured, or positive numbers with | between them")
    return found


def _switch(value: Any) -> bool:
    if value not in ("on", "off", True, False):
        raise ValueError("must be on or off")
    return value in ("on", True)


def _one_of(choices: Iterable[Any]) -> Callable[[Any], Any]:
    by_text = {str(choice): choice for choice in choices}

    def read(value: Any) -> Any:
        if str(value) not in by_text:
            raise ValueError(f"must be one of {', '.join(by_text)}")
        return by_text[str(value)]

    return read


READERS: dict[str, Callable[[Any], Any]] = {
    "data": _size,
    "zero": _one_of(get_args(ZeroStage)),
    "shard": _size,
    "tensor": _size,
    "tensor_exclude": _patterns,
    "sequence_parallel": _switch,
    "pipeline": _size,
    "schedule": lambda value: _one_of(SCHEDULES)(value),
    "stages_per_rank": _count,
    "split_points": _split_points,
    "speeds": _speeds,
    "replicas": _size,
    "output_device": _number,
    "microbatch": _count,
    "recompute": _one_of(get_args(Recompute)),
    "compile": _one_of(get_args(Compile)),
    "offload": _one_of(get_args(Offload)),
    "precision": _one_of(PRECISIONS),
    "exact": _one_of(get_args(Exact)),
}


def _read(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in given.items():
        try:
            values[key] = READERS[key](value)
        except ValueError as problem:
            problems.append(f"{key}={in_words(value)}: {problem}")
    return values, problems


# ---------------------------------------------------------------------------------------------------------- text
NAMED: dict[str, dict[str, Any]] = {
    "single": {"data": 1},
    "dp": {"replicas": "auto", "output_device": 0},
    "balanced-dp": {"replicas": "auto"},
    "ddp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "fsdp": {"zero": 3},
    "tp": {"tensor": "auto"},
    "hsdp": {"zero": 3, "shard": "auto"},
    "mp": {"pipeline": "auto", "schedule": "naive"},
    "pp": {"pipeline": "auto"},
    "2d": {"data": "auto", "pipeline": 2},
    "3d": {"data": "auto", "tensor": 2, "pipeline": 2},
    "auto": {},
}


def largest_shard(ranks: int) -> int:
    """The largest groups of like size, several of them, of so many ranks; all ranks where there are none."""
    return max((size for size in range(2, ranks) if ranks % size == 0), default=ranks)


def parse_plan(text: str) -> PlanSpec:
    """What `text` asks for; raises `PlanError` that names every problem of the text at once."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in text.replace(",", " ").split():
        problems += _read_word(word, values)
    if len(named := [word for word in text.replace(",", " ").split() if word in NAMED and word != "auto"]) > 1:
        problems.append(
            f"{' and '.join(named)} are plans of their own (`evenly verify` takes several, with ';' between; what one "
            "plan has besides its name is said by keys: ddp tensor=2)"
        )
    if not text.split():
        problems.append("the text is empty")
    if problems:
        known = f"name one of {', '.join(NAMED)}, or set {', '.join(READERS)}"
        strange = not text.split() or any(problem.startswith("unknown") for problem in problems)
        raise PlanError(f"plan {text!r}", "; ".join(problems), known if strange else "fix it, or leave it out")
    return PlanSpec(**values)


def asked_plan(text: str | None) -> tuple[PlanSpec | None, bool]:
    """What `text` states, None for nothing, and whether the word `auto` in it asks for the best such plan."""
    if text is None:
        return None, False
    words = text.replace(",", " ").split()
    rest = [word for word in words if word != "auto"]
    return (parse_plan(" ".join(rest)) if rest or not words else None), "auto" in words


def _read_word(word: str, values: dict[str, Any]) -> Iterable[str]:
    """Adds what one word sets to `values`; yields what is wrong with it."""
    key, sign, value = word.partition("=")
    if not sign:
        yield from _add(NAMED[word], values) if word in NAMED else [_unknown(word, NAMED, "name")]
        return
    key = SYNONYMS.get(key, key)
    if key not in READERS:
        yield _unknown(key, READERS, "key")
        return
    read, problems = _read({key: value})
    yield from problems or _add(read, values)


def _add(new: Mapping[str, Any], values: dict[str, Any]) -> Iterable[str]:
    for key, value in new.items():
        if values.get(key) in OPEN:
            values[key] = value
        elif value not in (values[key], "auto"):
            yield f"{key} is set to both {in_words(values[key])} and {in_words(value)}"


def _unknown(word: str, known: Iterable[str], kind: str) -> str:
    near = get_close_matches(word, [*known], n=1)
    return f"unknown {kind} {word!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


def with_microbatch(job: Job, plan: Plan | PlanSpec, *, recorded: int | None = None) -> Job:
    """`job` as a run of it under `plan` cuts its batches.

    recorded: samples per microbatch of the run that this one goes on from.

    A job that states neither `microbatch` nor `microbatch_cost` takes what is recorded, else the plan's, else its own
    rule. Raises `PlanError` for a plan that names another: sums and random streams follow microbatches.
    """
    is_open = job.microbatch in OPEN and job.microbatch_cost is None
    found = recorded or plan.microbatch if is_open else job.microbatch
    if plan.microbatch not in (None, found):
        raise PlanError(
            f"plan {plan} for job {job.name!r}",
            f"{_whose(job, recorded)}, and the numbers follow it",
            "leave microbatch out of the plan",
        )
    return replace(job, microbatch=found) if is_open else job


def _whose(job: Job, recorded: int | None) -> str:
    if job.microbatch is not None:
        return f"the job states microbatch={job.microbatch}"
    if job.microbatch_cost is not None:
        return f"the job states microbatch_cost={job.microbatch_cost:g}"
    return f"the run that goes on has microbatch={recorded}"
