"""The reference: a plain training loop on one device, short enough to check by reading.

It shares no code with the engine but the pure rules that define the run: the order of samples, microbatches, blocks and
the keys of random streams. Everything else is plain torch: sums of losses, one division by the total weight,
`clip_grad_norm_`, the optimizer, the schedule.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from evenly.data.generators import seed_past_torch, seeded, undisturbed_past_torch
from evenly.data.microbatch import cut
from evenly.data.stream import stream_key
from evenly.errors import RunError, UserError, describe
from evenly.job import EMA, Job, hooks_of
from evenly.model.modes import in_training
from evenly.model.overlap import find_overlapping
from evenly.torch_private import plain_name
from evenly.verify.reference_data import WEIGHTS, batches, read_microbatch
from evenly.verify.reference_forward import drawing, loss_of, reference_evaluation
from evenly.verify.reference_sums import LossSums, check_finite


@dataclass(frozen=True)
class ReferenceStep:
    """A step and the state after it.

    tensors:   every parameter and buffer, by name; and `average of` each parameter that trains, where there is one.
    state:     every tensor of the optimizer's state, by parameter and key.
    rates:     the learning rate of each parameter group, after an evaluation that it follows.
    eval_loss: the evaluation loss after the step, where it was asked for; of several sets that of the first.
    groups:    of each parameter group, the names of its parameters, and those that it has itself.
    metrics:   of the step, by name. evaluation: by set and name its loss, its metrics and the figures of `evaluate`.
    """

    step: int
    loss: float
    grad_norm: float
    tensors: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    rates: list[float]
    eval_loss: float | None
    groups: list[list[list[str]]]
    metrics: dict[str, float]
    evaluation: dict[str, dict[str, float]]


def reference_steps(
    job: Job,
    steps: int,
    *,
    device: str = "cpu",
    around: Callable[[torch.nn.Module], AbstractContextManager[None]] | None = None,
) -> Iterator[ReferenceStep]:
    """Trains `job` on `device` in this process; yields after every step, with an evaluation where `evaluates` says.

    around: given the model, a context for the forward and backward of each microbatch.
    Raises `UserError` for a loss that cannot be trained on.
    """
    run = ReferenceRun(job, steps, device, around)
    for batch in run.batches():
        run.step(batch)
        if evaluates(job, run.steps_done, steps):
            run.evaluate()
        if saves(job, run.steps_done):
            run.save()
        yield run.record()


@dataclass(frozen=True, eq=False)
class _Phase:
    """What updates some parameters of the model; of a job without phases all, under the name ''.

    job: with its loss, optimizer and schedule. own: the names of the parameters that it may update.
    """

    name: str
    job: Job
    own: set[str]
    every: int
    optimizer: torch.optim.Optimizer
    schedule: Any
    scaler: torch.amp.GradScaler


@contextmanager
def _evaluating(phases: Iterable[_Phase]) -> Generator[None]:
    """Within, optimizers with two faces show the one for evaluations, as a script has it."""
    for phase in phases:
        _turn(phase.optimizer, "eval")
    yield
    for phase in phases:
        _turn(phase.optimizer, "train")


def _turn(optimizer: Any, face: str) -> None:
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        getattr(optimizer, face)()


class OwnCodeError(RunError):
    """An error of the job's hooks, or of its own loop, in the plain loop."""


class ReferenceBatch(list[Callable[[], list[Any]]]):
    """The microbatches of a batch, which read their samples."""

    def samples(self) -> list[Any]:
        """All samples, in the order of the microbatches."""
        with seeded(0):
            return [sample for microbatch in self for sample in microbatch()]


class ReferenceRun:
    """The plain loop, with as much of a `Run` as hooks and loops of one's own ask for.

    around: as of `reference_steps`. seen: called with the record of every step, after the hooks of `on_step`.
    """

    def __init__(
        self,
        job: Job,
        steps: int,
        device: str = "cpu",
        around: Callable[[torch.nn.Module], AbstractContextManager[None]] | None = None,
        seen: Callable[[ReferenceStep], None] = lambda _: None,
    ) -> None:
        self.job, self.steps, self.steps_done, self._around, self._seen = job, steps, 0, around, seen
        self.model, self._phases = _build(job, device)
        self.optimizer, self.schedule = self._phases[0].optimizer, self._phases[0].schedule
        self.world, self.devices = SimpleNamespace(rank=0, size=1, is_main=True, device=device), [device]
        self.out, self.is_main, self.goes_on = None, True, steps > 0
        self._averaged = _averaged_model(job, self.model)
        self._open, self._passes, self._asked_to_end, self._calling = LossSums(), 0, False, list[str]()
        self._loss, self._grad_norm, self._wholes = 0.0, 0.0, 0
        self._figures: dict[str, float] = {}
        self._evaluation: dict[str, dict[str, float]] = {}

    def batches(self) -> Iterator[ReferenceBatch]:
        numbered = enumerate(batches(self.job))
        while self.goes_on:
            number, microbatches = next(numbered)
            if self.job.streams or number >= self.steps_done:
                yield ReferenceBatch(microbatches)

    def batch(self, samples: Sequence[Any]) -> ReferenceBatch:
        cuts = cut([*range(len(samples))], size=self.job.samples_per_microbatch)
        return ReferenceBatch(partial(list[Any], [samples[place] for place in places]) for places in cuts)

    def step(self, batch: ReferenceBatch, loss: Any = None) -> SimpleNamespace:
        """Trains one step on `batch`, or all phases that are due; calls the hooks of `on_step`."""
        return self._end_step(batch, loss)

    def forward_backward(self, batch: ReferenceBatch, loss: Any = None) -> SimpleNamespace:
        """Adds the gradients of `batch` to those of the step."""
        sums = self._pass(self._phases[0], batch, loss)
        seed_past_torch(stream_key(self.job.seed, "after pass", self.steps_done, self._passes))
        return SimpleNamespace(loss=sums.loss, weight=sums.weight)

    def update(self) -> SimpleNamespace:
        """Ends the step that `forward_backward` has begun."""
        return self._end_step(None, None)

    def _pass(self, phase: _Phase, microbatches: ReferenceBatch, loss: Any) -> LossSums:
        """Adds up losses and gradients of a phase of the next step."""
        model, step, device = self.model, self.steps_done, self.world.device
        job, own = phase.job if loss is None else replace(phase.job, loss=loss), LossSums()
        stream = ("microbatch", phase.name) if phase.name else ("microbatch",)
        if not (first := len(self._open.totals)):
            model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in phase.own and not _is_frozen(job, name, step + 1))
        for number, microbatch in enumerate(microbatches):
            samples, batch = read_microbatch(job, microbatch, stream_key(job.seed, "data", step, number), device)
            with (
                nullcontext() if self._around is None else self._around(model),
                drawing(model, stream_key(job.seed, *stream, step, first + number), device),
            ):
                found = loss_of(job, model, batch, samples)
                if found.total.requires_grad:
                    phase.scaler.scale(found.total).backward()
            self._open.add(found)
            own.add(found)
        self._passes += 1
        check_finite(step + 1, self._open)
        _check_dense(model)
        return own

    def _end_step(self, batch: ReferenceBatch | None, loss: Any) -> SimpleNamespace:
        step = self.steps_done + 1
        running = [phase for phase in self._phases if step % phase.every == 0]
        losses, norms, rates = list[float](), list[float](), list[float]()
        self._figures, self._evaluation = {}, {}
        for phase in running:
            rates.append(rate_of(phase.optimizer.param_groups[0]))
            if batch is not None:
                self._pass(phase, batch, loss)
            sums, self._open = self._open, LossSums()
            losses.append(sums.loss)
            norms.append(_update(phase, self.model, step, sums))
            own = {"loss": sums.loss, "grad_norm": norms[-1], "lr": rates[-1]} if phase.name else {}
            prefix = f"{phase.name}/" if phase.name else ""
            self._figures |= {prefix + name: value for name, value in {**own, **sums.metrics}.items()}
        self._loss, self._grad_norm = sum(losses), norms[0] if len(norms) == 1 else math.hypot(*norms)
        self.steps_done, self._passes, self._wholes = step, 0, 0
        if self._averaged is not None and _is_averaged(self.job, step):
            with _evaluating(self._phases):
                self._averaged.update_parameters(self.model)
        for phase in self._phases:
            _advance(phase.schedule, self.job, step, {}, counts=phase in running)
        seed_past_torch(stream_key(self.job.seed, "after step", step))
        self.goes_on = step < self.steps and not self._asked_to_end
        figures = {"loss": self._loss, "grad_norm": self._grad_norm, "lr": rates[0], "metrics": self._figures}
        report = SimpleNamespace(step=step, weight=sums.weight, skipped=None, **figures)  # pyright: ignore
        self._call("on_step", report)
        self._seen(self.record())
        return report

    def _call(self, event: str, found: object) -> None:
        """Calls the hooks of `event`; what they do themselves calls no hooks of the same event."""
        if event in self._calling:
            return
        self._calling.append(event)
        key = stream_key(self.job.seed, event, self.steps_done)
        with undisturbed_past_torch(), seeded(key, self.world.device):
            for hook in hooks_of(self.job, event):
                try:
                    hook(self, found)  # type: ignore[arg-type]
                except Exception as problem:
                    raise OwnCodeError(f"{event} in a plain loop", describe(problem)) from problem
        self._calling.remove(event)
        self.goes_on = self.goes_on and not self._asked_to_end

    def evaluate(self, *, average: bool = True) -> SimpleNamespace:
        """Evaluates all sets; calls the hooks of `on_evaluation`."""
        model = _evaluated(self.model, self._averaged if average else None)
        with _evaluating(self._phases) if model is self.model else nullcontext():
            self._evaluation = by_name = reference_evaluation(self.job, model, self.world.device)
        for phase in self._phases:
            _advance(phase.schedule, self.job, self.steps_done, by_name, counts=False)
        sets = {name: SimpleNamespace(loss=one["loss"], metrics=one) for name, one in by_name.items()}
        found = SimpleNamespace(**vars(next(iter(sets.values()))), sets=sets, by_name=sets)
        self._call("on_evaluation", found)
        return found

    def record(self) -> ReferenceStep:
        optimizers, named = [phase.optimizer for phase in self._phases], [*self.model.named_parameters()]
        return ReferenceStep(
            self.steps_done,
            self._loss,
            self._grad_norm,
            named_tensors(self.model) | _named_averages(self._averaged),
            {name: value for one in optimizers for name, value in named_state(self.model, one).items()},
            [rate_of(group) for one in optimizers for group in one.param_groups],
            next((found["loss"] for found in self._evaluation.values()), None),
            [group for one in optimizers for group in named_groups(named, one)],
            self._figures,
            self._evaluation,
        )

    def save(self, *, score: float | None = None) -> None:
        """Calls the hooks of `on_save`; nothing is written."""
        self._call("on_save", self.steps_done)

    def stop(self) -> None:
        """Ends the run as `Run.stop` does."""
        self._asked_to_end = True

    def log(self, values: Mapping[str, Any]) -> None:
        """Does nothing."""

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Parameters are whole here."""
        return nullcontext()

    @contextmanager
    def whole_model(self, *, main_only: bool = False, device: str | None = None) -> Generator[torch.nn.Module]:
        """A copy of the model in evaluation mode; numbers drawn within are those of a `Run`."""
        key = stream_key(self.job.seed, "whole model", self.steps_done, self._wholes)
        self._wholes += not self._calling
        with nullcontext() if self._calling else seeded(key, self.world.device):
            yield copy.deepcopy(self.model).eval().to(device or self.world.device)


def _update(phase: _Phase, model: torch.nn.Module, step: int, sums: LossSums) -> float:
    """The update by the gradients of a phase of `step`, from 1; returns their norm."""
    phase.scaler.unscale_(phase.optimizer)
    grad_norm = _clip_mean(phase.job, model, sums.weight)
    _check_norm(phase.job, step, grad_norm)
    with seeded(stream_key(phase.job.seed, "optimizer", step)):
        phase.scaler.step(phase.optimizer)
    phase.scaler.update()
    return grad_norm


def _clip_mean(job: Job, model: torch.nn.Module, weight: float) -> float:
    """Divides the summed gradients by `weight`, and clips them; returns their norm before."""
    used = [p for p in model.parameters() if p.grad is not None]
    for parameter in used:
        assert parameter.grad is not None
        parameter.grad /= weight
    return float(torch.nn.utils.clip_grad_norm_(used, job.clip_norm or float("inf")))


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group; 0 where it has none."""
    return float(group.get("lr") or 0.0)


def evaluates(job: Job, step: int, steps: int) -> bool:
    """Whether a verification of `steps` evaluates after `step`: once in between, which must not change what follows,
    at the end, and where the job does, since its schedule may follow that.
    """
    asked = job.eval_every is not None and step % job.eval_every == 0
    return job.eval_data is not None and (asked or step in (steps // 2, steps))


def saves(job: Job, step: int) -> bool:
    """Whether a verification saves after `step`: where hooks follow that."""
    return job.save_every is not None and step % job.save_every == 0 and bool(hooks_of(job, "on_save"))


def _is_frozen(job: Job, name: str, step: float) -> bool:
    counts = [count for pattern, count in (job.frozen or {}).items() if fnmatchcase(name, pattern)]
    return counts != [] and (counts[-1] is None or step <= counts[-1])


def _advance(schedule: Any, job: Job, step: int, evaluation: Mapping[str, Any], *, counts: bool) -> None:
    """Steps the schedule, if there is one and what it counts or follows is due; counts: whether `step` does."""
    with seeded(stream_key(job.seed, "schedule", step)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step that float16 skips counts for the schedule
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if evaluation and job.eval_every is not None and step % job.eval_every == 0:
                figures, name = next(iter(evaluation.values())), job.schedule_metric or "loss"
                if name not in figures:
                    raise UserError(f"schedule_metric={name!r}", f"an evaluation has {', '.join(figures)}", "name one")
                schedule.step(figures[name])
        elif schedule is not None and counts:
            schedule.step()


def _averaged_model(job: Job, model: torch.nn.Module) -> AveragedModel | None:
    """torch's own average of `model`, which keeps a second model; None where the job asks for none."""
    average = job.average
    if average is None:
        return None
    rule = get_ema_multi_avg_fn(average.decay) if isinstance(average, EMA) else get_swa_multi_avg_fn()
    try:
        return AveragedModel(model, multi_avg_fn=rule)
    except Exception as problem:
        raise UserError(
            "averaging the weights of the model in a plain loop",
            f"torch's AveragedModel cannot copy it: {problem}",
            "let copy.deepcopy take the model, or verify the job without its average",
        ) from problem


def _is_averaged(job: Job, step: int) -> bool:
    return job.average is not None and step in range(job.average.start, step + 1, job.average.every)


def _named_averages(averaged: AveragedModel | None) -> dict[str, torch.Tensor]:
    """Copies of the averages of all parameters that train, once there are averages."""
    if averaged is None or not averaged.n_averaged:
        return {}
    trained = [(name, p) for name, p in averaged.module.named_parameters() if p.requires_grad]
    return {f"average of {plain_name(name)}": parameter.detach().cpu().clone() for name, parameter in trained}


def _evaluated(model: torch.nn.Module, averaged: AveragedModel | None) -> torch.nn.Module:
    if averaged is None or not averaged.n_averaged:
        return model
    with torch.no_grad():
        for mine, current in zip(averaged.module.buffers(), model.buffers(), strict=True):
            mine.copy_(current)
    return averaged.module


def _check_dense(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UserError(f"the gradient of {name}", "it is sparse", "build the model without sparse=True")


def _check_norm(job: Job, step: int, grad_norm: float) -> None:
    """Raises `UserError` for one that no smaller scale of the loss makes finite."""
    if not math.isfinite(grad_norm) and job.precision != "float16":
        raise UserError(
            f"training step {step} on one device",
            f"the norm of the gradient is {grad_norm}",
            "look for a square root or a division at zero, or too high a learning rate",
        )


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, tied ones once, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().cpu().clone() for name, tensor in named}


def named_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of the optimizer's state, as `exp_avg of layer.weight`; its numbers as tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            label = f"{key} of {plain_name(name)}"
            if isinstance(value, torch.Tensor):
                found[label] = value.detach().cpu().clone()
            elif isinstance(value, int | float):
                found[label] = torch.tensor(value, dtype=torch.float64)
    return found


def named_groups(
    named: Iterable[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer
) -> list[list[list[str]]]:
    """Of each parameter group, what the model calls its parameters, and what the group does, if it knows names."""
    names = {id(parameter): name for name, parameter in named}
    return [
        [[names[id(p)] for p in group["params"]], [*group.get("param_names", ())]] for group in optimizer.param_groups
    ]


def build_model(job: Job, device: str = "cpu") -> torch.nn.Module:
    """The job's model in training mode, built on the CPU; what the job itself sets to evaluation stays so."""
    with seeded(stream_key(job.seed, "model")):
        model = job.model()
    if shared := find_overlapping(model):  # in another type they would lie apart
        raise UserError(
            f"training parameters {shared[0]} and {shared[1]}",
            "they are two parameters in one memory",
            "assign the one to both modules, so that it is one parameter",
        )
    for name, parameter in model.named_parameters():
        if _is_frozen(job, name, math.inf):
            parameter.requires_grad_(False)
    if job.precision in WEIGHTS:
        model = model.to(WEIGHTS[job.precision])
    if job.weights is not None:
        _load(model, Path(job.weights))
    return in_training(model).to(device)


def _load(model: torch.nn.Module, weights: Path) -> None:
    """Gives `model` the values of all files of safetensors in `weights`, a file or folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in [weights] if weights.suffix == ".safetensors" else sorted(weights.glob("*.safetensors")):
        tensors |= load_file(file)
    state = model.state_dict()
    # What a model's attribute adds to the names of the one that it holds.
    begins = ["".join(f"{part}." for part in next(iter(state)).split(".")[:count]) for count in range(9)]
    begin = next((one for one in begins if all(one + name in state for name in tensors)), "")
    missing, unexpected = model.load_state_dict({begin + name: one for name, one in tensors.items()}, strict=False)
    loaded = {state[begin + name].data_ptr() for name in tensors if begin + name in state}
    lacking = [name for name in missing if state[name].data_ptr() not in loaded]  # by no other name either
    if lacking or unexpected:
        found = f"missing: {', '.join(lacking) or 'none'}; not in the model: {', '.join(unexpected) or 'none'}"
        raise UserError(f"weights={str(weights)!r}", found, "give the weights of this model")


def _build(job: Job, device: str = "cpu") -> tuple[torch.nn.Module, list[_Phase]]:
    model = build_model(job, device)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    scale = max(1.0, 2.0 ** (16 - (job.global_batch - 1).bit_length()))
    kind = torch.device(device).type
    found: list[_Phase] = []
    for name, one in job.by_phase.items():
        phase = job.phases[name] if job.phases else None
        named = [*model.named_parameters()]
        if phase is not None:
            named = [(n, p) for n, p in named if any(fnmatchcase(n, pattern) for pattern in phase.patterns)]
        with seeded(stream_key(job.seed, "optimizer", 0)):
            optimizer = one.build_optimizer(named)
        _turn(optimizer, "train")
        with seeded(stream_key(job.seed, "schedule", 0)):
            schedule = one.schedule(optimizer) if one.schedule is not None else None
        scaler = torch.amp.GradScaler(kind, init_scale=scale, enabled=job.precision == "float16")
        own = {n for n, _ in named} & {n for n, _ in trained}
        found.append(_Phase(name, one, own, phase.every if phase else 1, optimizer, schedule, scaler))
    return model, found
