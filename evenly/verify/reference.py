"""The reference: a plain training loop on one device, short enough to check by reading.

It shares no code with the engine but the pure rules that define the run: the order of samples, microbatches, blocks and
the keys of random streams. Everything else is plain torch: sums of losses, one division by the total weight,
`clip_grad_norm_`, the optimizer, the schedule.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from evenly.data.generators import reseed, seeded
from evenly.data.nest import map_tensors
from evenly.data.stream import block_key, stream_key
from evenly.errors import UserError
from evenly.job import EMA, Job
from evenly.loss import UNDIVIDED, Loss
from evenly.model.blocks import find_blocks
from evenly.model.modes import evaluating, in_training
from evenly.model.overlap import find_overlapping
from evenly.torch_private import in_backward, plain_name
from evenly.verify.reference_data import WEIGHTS, batches, evaluation_microbatches, read_microbatch
from evenly.verify.reference_sums import LossSums


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
    model, phases = _build(job, device)
    optimizers = [phase.optimizer for phase in phases]
    averaged = _averaged_model(job, model)
    for step, microbatches in zip(range(steps), batches(job), strict=False):
        running = [phase for phase in phases if (step + 1) % phase.every == 0]
        figures: dict[str, float] = {}
        losses, norms = list[float](), list[float]()
        for phase in running:
            rate = rate_of(phase.optimizer.param_groups[0])
            sums = _sums(phase, model, step, microbatches, device, around)
            grad_norm = _update(phase, model, step + 1, sums)
            own = {"loss": sums.loss, "grad_norm": grad_norm, "lr": rate} if phase.name else {}
            prefix = f"{phase.name}/" if phase.name else ""
            figures |= {prefix + name: value for name, value in {**own, **sums.metrics}.items()}
            losses.append(sums.loss)
            norms.append(grad_norm)
        if averaged is not None and _is_averaged(job, step + 1):
            with _evaluating(phases):
                averaged.update_parameters(model)
        evaluated = _evaluated(model, averaged)
        with _evaluating(phases) if evaluated is model else nullcontext():
            evaluation = reference_evaluation(job, evaluated, device) if evaluates(job, step + 1, steps) else {}
        eval_loss = next((found["loss"] for found in evaluation.values()), None)
        for phase in phases:
            _advance(phase.schedule, job, step + 1, evaluation, counts=phase in running)
        yield ReferenceStep(
            step + 1,
            sum(losses),
            norms[0] if len(norms) == 1 else math.hypot(*norms),
            named_tensors(model) | _named_averages(averaged),
            {name: value for one in optimizers for name, value in named_state(model, one).items()},
            [rate_of(group) for one in optimizers for group in one.param_groups],
            eval_loss,
            [group for one in optimizers for group in named_groups(model.named_parameters(), one)],
            figures,
            evaluation,
        )


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


def _sums(
    phase: _Phase,
    model: torch.nn.Module,
    step: int,
    microbatches: list[Callable[[], list[Any]]],
    device: str,
    around: Callable[[torch.nn.Module], AbstractContextManager[None]] | None,
) -> LossSums:
    """Adds up losses and gradients of a phase of `step`, from 0; around: as of `reference_steps`."""
    job, sums = phase.job, LossSums()
    stream = ("microbatch", phase.name) if phase.name else ("microbatch",)
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in phase.own and not _is_frozen(job, name, step + 1))
    for number, microbatch in enumerate(microbatches):
        samples, batch = read_microbatch(job, microbatch, stream_key(job.seed, "data", step, number), device)
        with (
            nullcontext() if around is None else around(model),
            _drawing(model, stream_key(job.seed, *stream, step, number), device),
        ):
            loss = _loss(job, model, batch, samples)
            if loss.total.requires_grad:
                phase.scaler.scale(loss.total).backward()
        sums.add(loss)
    _check_finite(step + 1, sums)
    _check_dense(model)
    return sums


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


def _is_frozen(job: Job, name: str, step: float) -> bool:
    """Whether the parameter `name` is frozen in `step`, of which the first is 1."""
    counts = [count for pattern, count in (job.frozen or {}).items() if fnmatchcase(name, pattern)]
    return counts != [] and (counts[-1] is None or step <= counts[-1])


def _advance(schedule: Any, job: Job, step: int, evaluation: Mapping[str, Any], *, counts: bool) -> None:
    """Steps the schedule, if there is one and what it counts or follows is due; counts: whether `step` does."""
    with seeded(stream_key(job.seed, "schedule", step)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step that float16 skips counts for the schedule
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if job.eval_every is not None and step % job.eval_every == 0:
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
    """The averaged model, once there are averages, with the buffers that `model` has."""
    if averaged is None or not averaged.n_averaged:
        return model
    with torch.no_grad():
        for mine, current in zip(averaged.module.buffers(), model.buffers(), strict=True):
            mine.copy_(current)
    return averaged.module


def reference_evaluation(job: Job, model: torch.nn.Module, device: str = "cpu") -> dict[str, dict[str, float]]:
    """By evaluation set and name: the loss over all of it, its metrics, and the figures of the job's `evaluate`."""
    return {name: _evaluate(job.with_eval_data(data), model, device) for name, data in job.eval_sets.items()}


def _evaluate(job: Job, model: torch.nn.Module, device: str) -> dict[str, float]:
    sums, outputs = LossSums(), list[Any]()
    with torch.no_grad(), evaluating(model):
        for number, microbatch in enumerate(evaluation_microbatches(job)):
            key = stream_key(job.seed, "evaluation data", 0, number)
            samples, batch = read_microbatch(job, microbatch, key, device)
            with _drawing(model, stream_key(job.seed, "evaluation", number), device):
                loss = _loss(job, model, batch, samples)
            sums.add(loss)
            outputs.append(loss.outputs)
    if sums.weight == 0:
        raise UserError(
            "evaluating the job", "nothing in its eval_data counts: the weight is 0", "give it samples that count"
        )
    with seeded(stream_key(job.seed, "evaluate")):
        figures = {} if job.evaluate is None else _figures(job.evaluate, _together(outputs))
    return {"loss": sums.loss, **sums.metrics, **figures}


def _together(parts: list[Any]) -> Any:
    """The outputs of all microbatches in order, joined along the samples."""
    first: Any = parts[0]
    kind: Any = type(first)
    if isinstance(first, torch.Tensor):
        return torch.cat([part.detach().cpu() for part in parts])
    if isinstance(first, list):
        return [map_tensors(lambda t: t.detach().cpu(), one) for part in parts for one in part]
    if isinstance(first, Mapping):
        return kind({key: _together([part[key] for part in parts]) for key in first})
    if isinstance(first, tuple):
        columns = [_together([*column]) for column in zip(*parts, strict=True)]
        return kind(*columns) if hasattr(first, "_fields") else kind(columns)
    if is_dataclass(first):
        return replace(first, **{f.name: _together([getattr(p, f.name) for p in parts]) for f in fields(first)})  # type: ignore
    raise UserError("evaluating the job", f"its loss gives a {kind.__name__} as outputs", "give tensors and lists")


def _figures(evaluate: Any, outputs: Any) -> dict[str, float]:
    """What the job's `evaluate` makes of all outputs: a function, or a metric of torchmetrics."""
    if not hasattr(evaluate, "compute"):
        return {name: float(value) for name, value in evaluate(outputs).items()}
    metric = copy.deepcopy(evaluate)
    metric.reset()
    if isinstance(outputs, Mapping):
        metric.update(**outputs)
    else:
        metric.update(*(outputs if isinstance(outputs, tuple) else [outputs]))
    found = metric.compute()
    named = found if isinstance(found, Mapping) else {type(metric).__name__: found}
    return {name: float(value) for name, value in named.items()}


def _check_dense(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UserError(f"the gradient of {name}", "it is sparse", "build the model without sparse=True")


def _check_finite(step: int, sums: LossSums) -> None:
    """Raises `UserError` for a step that no device can train."""
    asked = f"training step {step} on one device"
    for number, (total, weight) in enumerate(zip(sums.totals, sums.weights, strict=True)):
        if not math.isfinite(total) or not math.isfinite(weight) or 0 > weight != UNDIVIDED:
            found = f"microbatch {number} has the loss {total:g} with weight {weight:g}"
            raise UserError(asked, found, "look for a division by zero or a log of zero; weights are 0 or more")
    if sums.weight == 0:
        raise UserError(asked, "the weight is 0 in every microbatch", "leave out samples that do not count")


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


def run_forward(job: Job, model: torch.nn.Module, batch: Any, key: int, samples: int) -> Loss:
    """The job's loss of one microbatch of so many samples, with random numbers from the stream `key`."""
    with _drawing(model, key):
        return _loss(job, model, batch, samples)


@contextmanager
def _drawing(model: torch.nn.Module, key: int, device: str = "cpu") -> Generator[None]:
    """Within, seeds all generators from the stream `key`, and again at the begin and end of every block.

    A block that the model's own checkpointing calls again in the backward draws what its first call drew: that is the
    one before which the generator had the same seed.
    """
    calls: dict[str, int] = {}
    numbers: dict[tuple[str, int], int] = {}  # by block and the seed before its call
    running: dict[str, int] = {}
    handles: list[Any] = []
    for block in find_blocks(model):

        def begin(_: Any, __: Any, name: str = block.name) -> None:
            before = torch.initial_seed()
            if not in_backward():
                numbers[name, before] = calls.get(name, 0)
                calls[name] = numbers[name, before] + 1
            running[name] = numbers.get((name, before), 0)
            reseed(block_key(key, name, running[name], "begin"), device)

        def end(_: Any, __: Any, ___: Any, name: str = block.name) -> None:
            reseed(block_key(key, name, running[name], "end"), device)

        handles += [block.module.register_forward_pre_hook(begin), block.module.register_forward_hook(end)]
    try:
        with seeded(key, device):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _loss(job: Job, model: torch.nn.Module, batch: Any, samples: int) -> Loss:
    mixed = job.precision in ("bfloat16", "float16")
    device = next((p.device.type for p in model.parameters()), "cpu")
    with torch.autocast(device, dtype=getattr(torch, job.precision)) if mixed else nullcontext():
        found = job.loss(model, batch)
    loss = found if isinstance(found, Loss) else Loss(found, samples)
    if not isinstance(loss.total, torch.Tensor) or loss.total.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(
            "the job's loss must return evenly.Loss(total, weight) or a scalar tensor",
            f"it returned a {type(found).__name__}" + (" whose total is no scalar tensor" if found is loss else ""),
            "sum the losses into `total`, a tensor, and count what they cover in `weight`",
        )
    total = loss.total.reshape(())
    return replace(loss, total=total) if found is loss else Loss(total * samples, samples)
