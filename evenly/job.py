"""What to train: the model, the loss and the data, as for a single device.

No field of a `Job` names a device, a rank or a strategy, and none may: a run is a function of the job
and its seed alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from evenly.errors import UserError
from evenly.job_data import is_a, is_stream, stream_problems, taken_over
from evenly.loss import JointLoss
from evenly.loss import Loss as Loss

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    EvaluationData = Dataset[Any] | IterableDataset[Any] | Callable[[], Iterable[Any]]

Precision = Literal["float32", "float64", "bfloat16", "float16", "pure-bfloat16", "pure-float16"]
Hook = Callable[[Any, Any], object]  # of the run and what it has come to
PRECISIONS: tuple[str, ...] = get_args(Precision)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # of files with weights: to read one may run its code
TO_CONVERT = (
    "convert it once, where you trust it: safetensors.torch.save_model(model, 'model.safetensors') or, of a "
    "transformers model, model.save_pretrained(FOLDER)"
)


@dataclass(frozen=True)
class EMA:
    """The exponential moving average of the weights, by the rule of `torch.optim.swa_utils.get_ema_multi_avg_fn`.

    decay: share of the average that an update keeps, from 0 to 1; the rest comes of the weights.
    start: the step after which the average begins, as a copy of the weights.
    every: steps between updates.
    """

    decay: float = 0.999
    start: int = 1
    every: int = 1


@dataclass(frozen=True)
class SWA:
    """The mean of the weights after some steps, by the rule of `torch.optim.swa_utils.get_swa_multi_avg_fn`.

    start: the first of these steps.
    every: steps from one to the next.
    """

    start: int
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One of several updates of a step: of some of the parameters, by a loss and an optimizer of their own.

    parameters: pattern of their names (as `fnmatch`), or several: "generator.*". A parameter belongs to one phase.
    loss:       as that of a `Job`; only the gradients of these parameters count.
    optimizer, schedule, clip_norm: as those of a `Job`, of these parameters. The schedule counts the phase's updates.
    every:      the phase is run in the steps, counted from 1, that are multiples of it.
    """

    parameters: str | Sequence[str]
    loss: Callable[[torch.nn.Module, Any], Loss | torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    clip_norm: float | None = None
    every: int = 1

    @property
    def patterns(self) -> list[str]:
        """Those of `parameters`."""
        return [self.parameters] if isinstance(self.parameters, str) else [*self.parameters]


def _not_given(*_: Any) -> Any:
    """Stands for a loss and an optimizer that a job with phases does not have."""
    raise UserError("the job's loss", "it has phases, each with its own, and none besides", "give the Job a loss")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job.

    model:           builds the module; called once per rank under the job's own random stream.
    weights:         what the model starts from: a file of safetensors, or a folder with one or several and an index;
                     names as in its `state_dict`, all of them and no others. A run that is resumed does not read it.
    loss:            (model, batch) -> `Loss`, `Sum`, or a scalar tensor that is the mean over the microbatch's samples.
    data:            map-style dataset, `len(data)` samples; or a stream: what can be iterated from the start for every
                     epoch (torch's or Hugging Face's IterableDataset), or a function that returns a fresh iterator. Of
                     a DataLoader, its dataset, order, collate_fn and batch_size are taken.
    optimizer:       parameters -> torch Optimizer; where its first parameter is called `named_parameters` it gets pairs
                     of a name and a parameter, as the model's own `named_parameters()` gives them.
    global_batch:    samples per step, however many devices share them; that of a DataLoader need not be given.
    steps:           optimizer steps of the whole run.
    microbatch:      samples that one forward runs; where neither this nor `microbatch_cost` is given, what the plan
                     names, else an eighth of the global batch, rounded up. "auto": `--plan auto` chooses it, and with
                     it the numbers.
    collate:         list of samples -> batch (any nest of tensors); default: torch's default_collate.
    cost:            index of a sample in `data` -> its length; of a stream, the sample itself -> its length. The
                     samples of a batch are then put together by like length.
    microbatch_cost: budget of padded length (longest sample x number of samples) of one microbatch.
    shuffle:         whether every epoch has an order of its own; otherwise the dataset's. A stream has its own order.
    sampler:         the order of every epoch in place of `shuffle`: torch's Sampler, which yields indices of samples
                     (again and again, if it likes), of whatever kind `data` takes.
    batch_sampler:   the same in batches of up to `global_batch` indices; a BatchSampler may be given as `sampler`.
    num_workers, pin_memory, prefetch_factor: of the loader of each rank, as of torch's DataLoader; None: what the
                     DataLoader that is `data` states, else four workers of each rank with a GPU, and pinned memory.
    shuffle_buffer:  samples of a stream that are held back, to deliver one of them at random in the place of the next.
    frozen:          pattern of names of parameters (as `fnmatch`) -> how many steps they are frozen from the first on,
                     None: for ever. Of several patterns that match a name, the last one decides.
    schedule:        optimizer -> torch LRScheduler; counts steps, but ReduceLROnPlateau, which follows the evaluations
                     that `eval_every` asks for.
    schedule_metric: which metric or figure of the (first) evaluation set that follows; by default the loss.
    phases:          several updates in each step, by name and in their order, all on the same batch; in place of
                     `loss`, `optimizer`, `schedule` and `clip_norm`. A `loss` is then that of evaluations.
    clip_norm:       largest global gradient norm.
    average:         which average of the weights is kept besides them, `EMA` or `SWA`; evaluations are of the average.
    eval_data:       map-style dataset or stream, evaluated whole every `eval_every` steps and after the last; or
                     several by name ({"valid": a, "test": b}), of which the first decides which checkpoint is best.
    eval_every:      steps between evaluations; without it there is one, after the last step.
    evaluate:        figures that need all predictions: `Loss.outputs` of a whole evaluation, in the order of its
                     samples -> numbers by name; called on the main rank, on the CPU. Or a torchmetrics Metric or
                     MetricCollection, whose `update` takes the outputs.
    on_step, on_evaluation, on_save: hooks, one or several each, called on all ranks after each step with the run and
                     its `StepReport`, after each evaluation with the run and its `Evaluation`, and after each save with
                     the run and the step. Those with `state_dict` and `load_state_dict` are saved and resumed.
    save_every:      steps between checkpoints; the last step is always saved.
    precision:       numbers of the forward and backward pass; the weights of bfloat16 and float16 are float32, those of
                     pure-bfloat16 and pure-float16 have that type too, and so have the gradients and the optimizer's
                     state.
    seed:            of the order of samples and of every random stream.
    name:            in reports and in plan.json.

    Raises `UserError`, naming every field that is out of range.
    """

    model: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module, Any], Loss | torch.Tensor] = _not_given
    data: Dataset[Any] | IterableDataset[Any] | DataLoader[Any] | Callable[[], Iterable[Any]]
    optimizer: Callable[[Any], torch.optim.Optimizer] = _not_given
    global_batch: int = 0
    steps: int
    microbatch: int | Literal["auto"] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    cost: Callable[[Any], float] | None = None
    microbatch_cost: float | None = None
    shuffle: bool = True
    frozen: Mapping[str, int | None] | None = None
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    shuffle_buffer: int | None = None
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    schedule_metric: str | None = None
    clip_norm: float | None = None
    phases: Mapping[str, Phase] | None = None
    average: EMA | SWA | None = None
    eval_data: EvaluationData | Mapping[str, EvaluationData] | None = None
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    eval_every: int | None = None
    save_every: int | None = None
    on_step: Hook | Sequence[Hook] = ()
    on_evaluation: Hook | Sequence[Hook] = ()
    on_save: Hook | Sequence[Hook] = ()
    precision: Precision = "float32"
    seed: int = 0
    name: str = "job"
    weights: str | Path | None = None

    def __post_init__(self) -> None:
        taken, problems = taken_over(self) if is_a(self.data, "DataLoader") else ({}, [])
        for field, value in taken.items():
            object.__setattr__(self, field, value)
        if is_a(self.sampler, "BatchSampler") and self.batch_sampler is None:
            object.__setattr__(self, "batch_sampler", self.sampler)
            object.__setattr__(self, "sampler", None)
        problems += _problems(self)
        if problems:
            raise UserError(f"job {self.name!r} cannot be run", "; ".join(problems), "correct these fields of the Job")
        if self.phases:
            _ = self.by_phase  # whose fields are checked too

    @property
    def length(self) -> int:
        """The number of training samples; a stream has none."""
        return _length(self.data)

    @property
    def streams(self) -> bool:
        """Whether `data` is a stream."""
        return is_stream(self.data)

    @property
    def loading(self) -> dict[str, Any]:
        """What the job states of its loader's processes and memory, by name."""
        names = ("num_workers", "pin_memory", "prefetch_factor")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def order(self) -> Any:
        """The sampler or batch sampler of every epoch; None where the order follows from `shuffle`."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    @property
    def samples_per_microbatch(self) -> int:
        """Samples of one forward where samples are counted; the rule of `microbatch` above."""
        return self.microbatch if isinstance(self.microbatch, int) else -(-self.global_batch // 8)

    @property
    def eval_sets(self) -> dict[str, EvaluationData]:
        """The datasets and streams of an evaluation by name; one that has none has the name ''."""
        return _eval_sets(self.eval_data)

    def with_eval_data(self, data: EvaluationData) -> Job:
        """The job with one evaluation set: one of `eval_sets`."""
        return dataclasses.replace(self, eval_data=data)

    @property
    def by_phase(self) -> dict[str, Job]:
        """The job as each of its phases sees it, by name: with the loss and the optimizer of that; a job without
        phases under ''.
        """
        if not self.phases:
            return {"": self}
        fields = ("loss", "optimizer", "schedule", "clip_norm")
        return {
            name: dataclasses.replace(self, phases=None, **{field: getattr(phase, field) for field in fields})
            for name, phase in self.phases.items()
        }

    @property
    def traced_loss(self) -> Callable[[torch.nn.Module, Any], Any]:
        """The loss whose forward runs all that a step does."""
        return JointLoss([phase.loss for phase in self.phases.values()]) if self.phases else self.loss

    def build_optimizer(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer over the parameters of a model, given with their names or alone, as it asks for.

        Raises `UserError` for one that wants to evaluate the loss in its step, as LBFGS does.
        """
        made = self.optimizer(iter([*named]) if takes_names(self.optimizer) else iter([p for _, p in named]))
        closure = inspect.signature(getattr(made, "step", len)).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            found = "it evaluates the loss several times per step"
            raise UserError(f"optimizer {type(made).__name__}", found, "use an optimizer with one gradient per step")
        return made


def takes_names(optimizer: Callable[..., Any]) -> bool:
    """Whether the first parameter of a job's `optimizer` is called `named_parameters`."""
    try:
        return next(iter(inspect.signature(optimizer).parameters), "") == "named_parameters"
    except (TypeError, ValueError):  # written in another language than Python
        return False


HOOKS = ("on_step", "on_evaluation", "on_save")


def hooks_of(job: Job, event: str) -> list[Hook]:
    """The hooks of one of the `HOOKS`, in their order."""
    given = getattr(job, event)
    return [*given] if isinstance(given, Sequence) else [given]  # pyright: ignore[reportUnknownVariableType]


def _eval_sets(data: Any) -> dict[str, Any]:
    """A mapping of names is one of datasets; any other object is a dataset itself."""
    if data is None:
        return {}
    return dict(data) if isinstance(data, Mapping) and all(isinstance(name, str) for name in data) else {"": data}


def _length(data: object) -> int:
    return len(data)  # pyright: ignore[reportArgumentType]


def _problems(job: Job) -> Iterable[str]:
    for field in ("model", "loss", "optimizer"):
        if not callable(getattr(job, field)):
            yield f"{field} is a {type(getattr(job, field)).__name__}, not a callable"
    yield from _phase_problems(job) if job.phases is not None else _missing(job)
    if hasattr(job.model, "state_dict") and not isinstance(job.model, type):
        kind = type(job.model).__name__
        yield f"model is a {kind}, not what builds one (model=lambda: {kind}(...))"
    for field in ("collate", "cost", "schedule", "evaluate"):
        if getattr(job, field) is not None and not callable(getattr(job, field)):
            yield f"{field} is a {type(getattr(job, field)).__name__}, not a callable"
    yield from _frozen_problems(job.frozen)
    for field in HOOKS:
        for hook in hooks_of(job, field):
            if not callable(hook):
                yield f"{field} has a {type(hook).__name__}, not a callable"
    yield from _positive(job, ("global_batch", "steps"), ("microbatch", "shuffle_buffer", "eval_every", "save_every"))
    for field in ("microbatch_cost", "clip_norm"):
        value = getattr(job, field)
        if value is not None and not 0 < value < float("inf"):
            yield f"{field} is {value!r}, must be a finite number above 0"
    if job.microbatch_cost is not None and job.cost is None:
        yield "microbatch_cost is set but cost is not"
    if not isinstance(job.schedule_metric, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        yield f"schedule_metric is a {type(job.schedule_metric).__name__}, not the name of a metric"
    if job.precision not in PRECISIONS:
        yield f"precision is {job.precision!r}, must be one of {', '.join(PRECISIONS)}"
    if not isinstance(job.seed, int) or isinstance(job.seed, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        yield f"seed is {job.seed!r}, must be an integer"
    yield from _weights_problems(job.weights)
    for field in ("eval_every", "evaluate"):
        if getattr(job, field) is not None and job.eval_data is None:
            yield f"{field} is set but eval_data is not"
    yield from _average_problems(job)
    yield from _data_problems(job)


def _missing(job: Job) -> Iterator[str]:
    for field in ("loss", "optimizer"):
        if getattr(job, field) is _not_given:
            yield f"{field} is missing (or phases, each with its own)"


def _phase_problems(job: Job) -> Iterator[str]:
    if not isinstance(job.phases, Mapping) or not job.phases:
        yield f"phases is {job.phases!r:.80}, must be a mapping of names to evenly.Phase(...)"
        return
    for field, missing in {"optimizer": _not_given, "schedule": None, "clip_norm": None}.items():
        if getattr(job, field) is not missing:
            yield f"{field} is set, and so are phases; give it to each of them"
    if job.eval_data is not None and job.loss is _not_given:
        yield "eval_data is set, and the job has phases but no loss to evaluate; give it a loss"
    given: Mapping[Any, Any] = job.phases
    for name, phase in given.items():
        if not isinstance(name, str) or not name or "/" in name:
            yield f"phases has the name {name!r}, must be a text without /"
        if not isinstance(phase, Phase):
            yield f"phases[{name!r}] is a {type(phase).__name__}, must be an evenly.Phase(...)"
            return
        for field in ("loss", "optimizer"):
            if not callable(getattr(phase, field)):
                yield f"the {field} of phase {name!r} is a {type(getattr(phase, field)).__name__}, not a callable"
        if not isinstance(phase.every, int) or isinstance(phase.every, bool) or phase.every < 1:  # pyright: ignore
            yield f"every of phase {name!r} is {phase.every!r}, must be a whole number of at least 1"
        if not phase.patterns or not all(isinstance(one, str) for one in phase.patterns):  # pyright: ignore
            yield f"parameters of phase {name!r} is {phase.parameters!r}, must be a pattern of names, or several"
    if all(getattr(phase, "every", 1) != 1 for phase in given.values()):
        yield "no phase is run in every step; give one of them every=1"


def _weights_problems(weights: object) -> Iterable[str]:
    if weights is not None and not isinstance(weights, str | Path):
        yield f"weights is a {type(weights).__name__}, not the path of a file or folder"
    elif weights is not None and Path(weights).suffix in PICKLES:
        yield f"weights is {str(weights)!r}, a pickle: {TO_CONVERT}"


def _positive(job: Job, required: Sequence[str], optional: Sequence[str]) -> Iterable[str]:
    for field in (*required, *optional):
        value = getattr(job, field)
        if field in optional and (value is None or (field, value) == ("microbatch", "auto")):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{field} is {value!r}, must be a whole number of at least 1"


def _average_problems(job: Job) -> Iterable[str]:
    average: Any = job.average
    if average is None:
        return
    if not isinstance(average, EMA | SWA):
        kind = getattr(average, "__name__", type(average).__name__)
        yield f"average is a {kind}, must be evenly.EMA(...) or evenly.SWA(...)"
        return
    for field in ("start", "every"):
        value = getattr(average, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"average.{field} is {value!r}, must be a whole number of at least 1"
    decay: Any = getattr(average, "decay", 0.0)
    if not isinstance(decay, int | float) or not 0 <= decay <= 1:
        yield f"average.decay is {decay!r}, must be a number from 0 to 1"


def _frozen_problems(frozen: Any) -> Iterator[str]:
    if frozen is not None and not isinstance(frozen, Mapping):
        yield f"frozen is a {type(frozen).__name__}, not a mapping of patterns to numbers of steps"
        return
    patterns: Mapping[Any, Any] = frozen or {}
    for pattern, steps in patterns.items():
        if not isinstance(pattern, str):
            yield f"frozen has the pattern {pattern!r}, which is no text"
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 0):
            yield f"frozen[{pattern!r}] is {steps!r}, must be a number of steps, or None: for ever"


def _data_problems(job: Job) -> Iterable[str]:
    sets = {f"eval_data {name!r}" if name else "eval_data": data for name, data in job.eval_sets.items()}
    for field, data in {"data": job.data, **sets}.items():
        if is_a(data, "DataLoader"):
            yield f"{field} is a DataLoader; give its dataset"
        elif is_stream(data):
            yield from stream_problems(field, data)
            if data is job.data and field != "data" and hasattr(data, "load_state_dict"):
                yield f"{field} is the stream of data, which keeps its place in itself; give another object of the same"
        elif not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            kind = f"{field} is a {type(data).__name__}"
            yield f"{kind}, neither a map-style dataset (with __len__ and __getitem__) nor a stream (with __iter__)"
        elif _length(data) == 0:
            yield f"{field} is empty"
    if job.eval_data is not None and not sets:
        yield "eval_data has no dataset in it"
    yield from _order_problems(job)
    if job.streams or job.order is not None or not hasattr(job.data, "__len__"):
        return
    if isinstance(job.global_batch, int) and 0 < job.length < job.global_batch:  # pyright: ignore[reportUnnecessaryIsInstance]
        yield f"global_batch is {job.global_batch} but data has only {job.length} samples"


def _order_problems(job: Job) -> Iterable[str]:
    if (job.num_workers or 0) < 0:
        yield f"num_workers is {job.num_workers!r}, must be a whole number of at least 0"
    if job.shuffle_buffer is not None and not (job.streams and job.shuffle):
        yield "shuffle_buffer is set but " + ("shuffle is False" if job.streams else "data is not a stream")
    for sampler in (job.order, getattr(job.order, "sampler", None)):
        if hasattr(sampler, "num_replicas"):
            yield f"the sampler is a {type(sampler).__name__}, which deals samples to ranks; give the order of all"
    if job.order is not None and not (hasattr(job.order, "__iter__") and getattr(job.order, "__hash__", None)):
        yield f"sampler is a {type(job.order).__name__}, not a torch.utils.data.Sampler"
    if job.sampler is not None and job.batch_sampler is not None:
        yield "sampler and batch_sampler are both given; the second has the order of both"
    if job.streams and job.order is not None:
        yield "sampler is set but data is a stream, which has its own order"
