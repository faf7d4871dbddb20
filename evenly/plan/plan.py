"""The whole decision of how a job is split, as data: printable, parsed from text, checked at once.

A plan's text is pairs `key=value` and names of common plans, in any order: `single`, `ddp`, `data=4 exact=rounding`.
A plan named without sizes takes the devices that it is given: `Plan.fit(devices)` fills them in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

from evenly.errors import PlanError
from evenly.job import PRECISIONS, Precision
from evenly.plan.schedule import Schedule, stages_per_rank

Exact = Literal["bitwise", "rounding"]
Zero = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]
Compile = Literal["off", "blocks"]
Offload = Literal["none", "optimizer", "parameters"]
Sequence = Literal["whole", "split"]

SYNONYMS = {"dp": "data", "tp": "tensor", "pp": "pipeline"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a job runs.

    data:      ranks that share each batch; None takes all devices given.
    tensor:    ranks that share each microbatch, every one with its part of the parameters; "auto" takes all given.
    whole:     patterns, as of file names and with | between them, of parameters that the tensor axis does not split.
    sequence:  "split" has the ranks of the tensor axis share the sequence too where they do not share parameters, as in
               norms and dropout between layers, so that each holds a part of those activations; None and "whole" not.
    pipeline:  ranks among which the model's blocks are dealt, in stages that each microbatch goes through; "auto" takes
               all given.
    schedule:  in which order each rank of the pipeline runs its stages on the microbatches; None takes 1f1b.
    stages_per_rank: as the schedule allows; None takes its own number.
    cut:       numbers of the blocks, counted from 0 in the order in which they run, at which a stage begins, with |
               between them; None takes the cut whose slowest stage is fastest.
    zero:      what the data axis cuts over ranks: nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
    shard:     ranks over which it cuts, where groups of so many hold the same (hybrid sharding); None takes all,
               "auto" the largest number that leaves several groups.
    replicas:  devices of one process, each with a replica of the model (DataParallel); "auto" takes all given.
    gather:    number of the replica, from 0, whose device takes the outputs of all and computes their losses; None
               leaves each its own (balanced DataParallel).
    microbatch: samples that one forward runs, for a job that leaves it open (`with_microbatch`); None takes the job's.
    recompute: which activations of the model's blocks are computed anew for the backward pass; None and "none" none,
               "selective" all but those of matrix products and attention, "full" all.
    compile:   "blocks" runs the model's blocks as kernels of torch.compile; None and "off" as they are written.
    offload:   what lives in the host's memory beside a GPU: "optimizer" its state, and the update is computed there;
               "parameters" those too, a block of them on the GPU at a time (zero=3). None and "none" nothing.
    precision: of the forward and backward pass; None takes the job's.
    exact:     "bitwise" adds gradients in a wider type, so that float32, bfloat16 and float16 training has the
               same bits on any number of ranks. It is refused in float64, which has no wider type, with the tensor axis
               or a pipeline, where zero cuts 16-bit weights and where blocks are compiled. None and "rounding" add
               them as they are: plans agree up to rounding.

    Raises `PlanError` for values that do not exist or do not go together.
    """

    data: int | None = None
    tensor: int | Literal["auto"] | None = None
    whole: str | None = None
    sequence: Sequence | None = None
    pipeline: int | Literal["auto"] | None = None
    schedule: Schedule | None = None
    stages_per_rank: int | None = None
    cut: str | None = None
    zero: Zero | None = None
    shard: int | Literal["auto"] | None = None
    replicas: int | Literal["auto"] | None = None
    gather: int | None = None
    microbatch: int | None = None
    recompute: Recompute | None = None
    compile: Compile | None = None
    offload: Offload | None = None
    precision: Precision | None = None
    exact: Exact | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{key}={value}: {problem}"
            for key, value in self.stated.items()
            if (problem := _read(key, str(value))[1]) is not None
        ]
        if problems:
            raise PlanError(f"plan {self}", "; ".join(problems), "mend what is named")
        if self.shard is not None and not self.zero:
            raise PlanError(
                f"plan {self}",
                "shard says over how many ranks zero cuts, and zero is not set",
                "add zero=1, 2 or 3",
            )
        if self.offload == "parameters" and self.zero != 3:
            raise PlanError(
                f"plan {self}",
                "parameters that live on the host are gathered block by block, which is zero=3",
                "add zero=3 (on one device too), or use offload=optimizer",
            )
        self._check_tensor()
        self._check_pipeline()
        if self.gather is not None and self.replicas is None:
            raise PlanError(
                f"plan {self}", "gather names one of the replicas, and there are none", "add replicas=2, say"
            )
        if self.replicas is not None and (self.zero or self.data not in (None, 1)):
            raise PlanError(
                f"plan {self}",
                "replicas share one process; data and zero split over several",
                "leave out replicas (ddp uses the same devices, faster), or the others",
            )

    def _check_tensor(self) -> None:
        if (self.whole is not None or self.sequence == "split") and not self.splits_tensors:
            raise PlanError(
                f"plan {self}",
                "whole and sequence say how the tensor axis splits, and there is none",
                "add tensor=2",
            )
        other = "replicas" if self.replicas is not None else "compile" if self.compile == "blocks" else None
        if self.splits_tensors and other is not None:
            raise PlanError(
                f"plan {self}",
                "the tensor axis splits over processes that replicas do without"
                if other == "replicas"
                else "compiled blocks do not see what the tensor axis does to their parameters",
                f"leave out {other}, or tensor",
            )

    def _check_pipeline(self) -> None:
        asked = [key for key in ("schedule", "stages_per_rank", "cut") if getattr(self, key) is not None]
        if asked and not self.splits_blocks:
            raise PlanError(
                f"plan {self}",
                f"{' and '.join(asked)} say how a pipeline runs, and there is none",
                "add pipeline=2",
            )
        if not self.splits_blocks:
            return
        others = {
            "replicas": (self.replicas is not None, "replicas share one process, and a pipeline has one per stage"),
            "compile=blocks": (self.compile == "blocks", "stages take over the calls of blocks that it compiles"),
            "sequence=split": (self.sequence == "split", "what stages send each other is not split"),
        }
        for other, (there, why) in others.items():
            if there:
                raise PlanError(f"plan {self}", why, f"leave out {other}, or pipeline")
        per_rank = self.stages_of_each_rank
        if self.cut is not None and isinstance(self.pipeline, int):
            stages = self.pipeline * per_rank
            if len(self.cut.split("|")) != stages - 1:
                raise PlanError(
                    f"plan {self}",
                    f"{stages} stages begin at {stages - 1} blocks beside the first, and cut names "
                    f"{len(self.cut.split('|'))}",
                    f"name {stages - 1} blocks",
                )

    @property
    def splits_blocks(self) -> bool:
        """Whether it has a pipeline axis."""
        return self.pipeline not in (None, 1)

    @property
    def order(self) -> Schedule:
        """The schedule of its pipeline."""
        return self.schedule or "1f1b"

    @property
    def stages_of_each_rank(self) -> int:
        """How many stages of its pipeline each rank has."""
        return stages_per_rank(self.order, self.stages_per_rank)

    @property
    def ranks(self) -> int | None:
        """World size: the product of the axes; None while an axis waits for its size."""
        waits = self.data is None or self.tensor == "auto" or self.pipeline == "auto"
        return None if waits else math.prod(self.axes.values())

    @property
    def devices(self) -> int | None:
        """Devices that the plan uses; None while an axis or the replicas wait for their number."""
        if self.replicas is None:
            return self.ranks
        return None if self.replicas == "auto" else self.replicas

    @property
    def stage(self) -> Zero:
        """What zero really cuts: nothing on one rank, unless it has to bring parameters from the host."""
        return self.zero or 0 if self.ranks != 1 or self.offload == "parameters" else 0

    @property
    def splits_tensors(self) -> bool:
        """Whether it has a tensor axis."""
        return self.tensor not in (None, 1)

    @property
    def axes(self) -> dict[str, int]:
        """Size of every axis of the device mesh, outermost first."""
        assert self.tensor != "auto" and self.pipeline != "auto"  # the plan is fitted
        # Neighbours in the tensor axis talk most, those in the pipeline least.
        axes = {"data": self.data or 1}
        if self.pipeline and self.splits_blocks:
            axes = {"pipeline": self.pipeline, **axes}
        return {**axes, "tensor": self.tensor} if self.tensor and self.splits_tensors else axes

    def fit(self, devices: int) -> Plan:
        """The plan with its open axes filled so that it uses `devices`; raises `PlanError` where it cannot."""
        if self.replicas is not None:
            return self._fit_replicas(devices)
        for axis in ("tensor", "pipeline"):
            if getattr(self, axis) == "auto":
                others = math.prod(size for size in (self.data, self.tensor, self.pipeline) if isinstance(size, int))
                sizes: dict[str, Any] = {"data": self.data or 1, axis: max(1, devices // others)}
                if sizes.get("pipeline") == 1:  # one stage has no order
                    sizes |= {"schedule": None, "stages_per_rank": None}
                return replace(self, **sizes).fit(devices)
        if self.data is None:
            others = math.prod(size for size in (self.tensor, self.pipeline) if isinstance(size, int))
            return replace(self, data=max(1, devices // others)).fit(devices)
        if self.shard == "auto":
            return replace(self, shard=largest_shard(self.data)).fit(devices)
        if self.shard is not None and self.data % self.shard:
            raise PlanError(
                f"plan {self} on {devices} device{'s' * (devices != 1)}",
                f"groups of {self.shard} do not divide {self.data} ranks",
                "give a shard that divides the data axis",
            )
        if self.devices != devices:
            raise PlanError(
                f"plan {self} on {devices} device{'s' * (devices != 1)}",
                f"its axes ({_product(self.axes)}) need {self.devices}",
                f"give --devices {self.devices}, or a plan without sizes",
            )
        return self

    def _fit_replicas(self, devices: int) -> Plan:
        fitted = replace(self, data=1, replicas=devices if self.replicas == "auto" else self.replicas)
        asked = f"plan {self} on {devices} device{'s' * (devices != 1)}"
        if fitted.replicas != devices:
            raise PlanError(
                asked, f"it needs {self.replicas}", f"give --devices {self.replicas}, or a plan without sizes"
            )
        if fitted.gather is not None and fitted.gather >= devices:
            raise PlanError(asked, f"replicas are counted from 0 and gather is {self.gather}", "gather on one of them")
        return fitted

    def resolve(self, precision: Precision) -> Plan:
        """The plan with precision and exactness filled in for a job of this `precision`; checks them together."""
        precision = self.precision or precision
        problem, remedy = "", ""
        if precision == "float64":
            problem = "bitwise equality adds gradients in a wider type, and float64 has none"
            remedy = (
                "use exact=rounding (plans then agree to about 1e-12), or precision=float32 (verify: --dtype float32)"
            )
        elif precision.startswith("pure-") and self.stage:
            problem = (
                "torch's kernels round the last elements of a 16-bit tensor in another way, and shards end elsewhere"
            )
            remedy = "use exact=rounding, or plan ddp, or precision=bfloat16, which updates float32 weights"
        elif self.splits_tensors:
            problem = "sums within the model are made of as many parts as there are ranks on the tensor axis"
            remedy = "use exact=rounding, or a plan without the tensor axis"
        elif self.splits_blocks:
            problem = "gradients of what several stages share are added up in the order of the stages"
            remedy = "use exact=rounding, or a plan without pipeline"
        elif self.compile == "blocks":
            problem = (
                "which kernels a rank has compiled depends on the shapes that it has seen, and so do the last bits"
            )
            remedy = "use exact=rounding, or leave out compile=blocks"
        if problem and self.exact == "bitwise":
            raise PlanError(f"plan {self} with precision {precision}", problem, remedy)
        return replace(self, precision=precision, exact=self.exact or "rounding")

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.stated.items()) or "ddp"

    @property
    def stated(self) -> dict[str, Any]:
        """What is not left open."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(value)


def _number(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("must be a whole number, counted from 0")
    return int(value)


def _cuts(value: str) -> str:
    numbers = value.split("|")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError("must be numbers of blocks with | between them")
    if sorted({int(number) for number in numbers} - {0}) != [int(number) for number in numbers]:
        raise ValueError("must be ascending numbers of blocks, of which 0 is not one")
    return value


def _stage(value: str) -> Zero:
    stage = next((stage for stage in get_args(Zero) if str(stage) == value), None)
    if stage is None:
        raise ValueError("must be 0, 1, 2 or 3")
    return stage


def _one_of(choices: tuple[str, ...]) -> Any:
    def read(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return read


READERS: dict[str, Callable[[str], Any]] = {
    "data": _count,
    "tensor": lambda value: value if value == "auto" else _count(value),
    "whole": str,
    "sequence": _one_of(get_args(Sequence)),
    "pipeline": lambda value: value if value == "auto" else _count(value),
    "schedule": _one_of(get_args(Schedule)),
    "stages_per_rank": _count,
    "cut": _cuts,
    "zero": _stage,
    "shard": lambda value: value if value == "auto" else _count(value),
    "replicas": lambda value: value if value == "auto" else _count(value),
    "gather": _number,
    "microbatch": _count,
    "recompute": _one_of(get_args(Recompute)),
    "compile": _one_of(get_args(Compile)),
    "offload": _one_of(get_args(Offload)),
    "precision": _one_of(PRECISIONS),
    "exact": _one_of(get_args(Exact)),
}


def _read(key: str, value: str) -> tuple[Any, str | None]:
    """What the text of a value says, or why it says nothing."""
    try:
        return READERS[key](value), None
    except ValueError as problem:
        return None, str(problem)


NAMED = {
    "single": Plan(data=1),
    "dp": Plan(replicas="auto", gather=0),
    "balanced-dp": Plan(replicas="auto"),
    "ddp": Plan(),
    "zero1": Plan(zero=1),
    "zero2": Plan(zero=2),
    "zero3": Plan(zero=3),
    "fsdp": Plan(zero=3),
    "tp": Plan(tensor="auto"),
    "hsdp": Plan(zero=3, shard="auto"),
    "mp": Plan(pipeline="auto", schedule="naive"),
    "pp": Plan(pipeline="auto"),
    "2d": Plan(pipeline=2),
    "3d": Plan(tensor=2, pipeline=2),
    "auto": Plan(),
}


def largest_shard(ranks: int) -> int:
    """The largest groups of like size, several of them, of so many ranks; all ranks where there are none."""
    return max((size for size in range(2, ranks) if ranks % size == 0), default=ranks)


def parse_plan(text: str) -> Plan:
    """The plan that `text` states; raises `PlanError` that tells every problem of the text at once."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in text.replace(",", " ").split():
        problems += _read_word(word, values)
    if len(named := [part.strip() for part in text.split(",") if NAMED.keys() & part.split()]) > 1:
        problems.append(f"{', '.join(named)} are plans of their own (`evenly verify` takes several, with ';' between)")
    if not text.split():
        problems.append("the text is empty")
    if problems:
        known = f"name one of {', '.join(NAMED)}, or set {', '.join(f.name for f in fields(Plan))}"
        strange = not text.split() or any(problem.startswith("unknown") for problem in problems)
        raise PlanError(f"plan {text!r}", "; ".join(problems), known if strange else "mend it, or leave it out")
    return Plan(**values)


def _read_word(word: str, values: dict[str, Any]) -> Iterable[str]:
    """Adds what one word sets to `values`; yields what is wrong with it."""
    key, sign, value = word.partition("=")
    if not sign:
        if word in NAMED:
            yield from _add(NAMED[word].stated, values)
        else:
            yield _unknown(word, NAMED, "name")
        return
    key = SYNONYMS.get(key, key)
    if key not in READERS:
        yield _unknown(key, READERS, "key")
        return
    read, problem = _read(key, value)
    yield from _add({key: read}, values) if problem is None else [f"{key}={value}: {problem}"]


def _add(new: dict[str, Any], values: dict[str, Any]) -> Iterable[str]:
    for key, value in new.items():
        if values.get(key) in (None, "auto"):
            values[key] = value
        elif value not in (values[key], "auto"):
            yield f"{key} is set to both {values[key]} and {value}"


def _unknown(word: str, known: Iterable[str], kind: str) -> str:
    near = get_close_matches(word, [*known], n=1)
    return f"unknown {kind} {word!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


def _product(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axes.items())
