"""A look at the job before its first step, where several devices share it: what no rank could see by itself later.

The ranks must have the same job. Reading a microbatch again must give the same, and so must running it after another:
what a model, a loss or a data set remembers outside of the model's state is another on each rank. `evenly verify` looks
more thoroughly.
"""

from __future__ import annotations

import platform
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenly.checkpoint.state import EXECUTION
from evenly.comm.collectives import gather_values
from evenly.comm.world import World
from evenly.data.alone import looking
from evenly.data.generators import undisturbed
from evenly.data.loader import HeldStream, Loader, Microbatch, microbatches_of_step, share_of_step
from evenly.data.nest import strided_parts, tensors_by_path
from evenly.data.sampler_order import in_words
from evenly.data.split_streams import held_by, split_path
from evenly.engine.assemble import roots_of
from evenly.engine.executor import Executor
from evenly.engine.updaters import Updaters
from evenly.errors import ContractError, EvenlyError, RunError, SampleError, UserError, describe, note_rank
from evenly.job import Job, is_stream
from evenly.parallel.core.attributes import NumbersAndWords, own_attributes
from evenly.parallel.core.calls import ForwardEnded
from evenly.parallel.core.mutation_guard import fingerprint
from evenly.parallel.core.optimizer_kinds import is_known
from evenly.parallel.core.places import places_restored
from evenly.plan import Plan
from evenly.train.counters import Counters
from evenly.train.look_buffers import check_averages, find_averages, refuse_rounded
from evenly.train.look_gradients import BackwardLook, check_gradients
from evenly.train.same_numbers import same

if TYPE_CHECKING:
    from evenly.train.streaming import StreamFeed

SETTINGS = (
    *("global_batch", "steps", "microbatch", "microbatch_cost", "shuffle", "shuffle_buffer", "clip_norm", "seed"),
    *("precision", "eval_every", "save_every", "frozen"),
)
STEPS_COMPARED = 3
NAMED = 3  # of the attributes that change, in a message
FEW_PRIMITIVES = 16  # those of the layers of a block, and not those of every length that a dataset has


def check_job(job: Job, plan: Plan, world: World, feed: StreamFeed | None = None) -> list[Microbatch]:
    """Raises `UserError`, on all ranks alike, where ranks have different jobs or its data are not the same twice.

    Returns the microbatches to look at the model with: the first of the first step and its last; none where no rank can
    read them, which the step will report. Raises `SampleError`, on all ranks alike, where some can. Of a stream, which
    `feed` reads once, they come from rank 0.
    """
    if plan.devices == 1:
        return []
    with undisturbed():
        found, held = facts(job), [held_by(data) for data in _streams(job)]
        read, problem = _read(job, [0, -1, 0]) if feed is None else (feed.look(), None)
    found |= {f"microbatch {m.number} of the first step": digest(m.batch) for m in read[:2]}
    found["again"] = [m.number for m in read[2:] if digest(m.batch) != digest(read[0].batch)]
    all_found, problems, all_held = zip(*gather_values((found, problem, held), world.group("files")), strict=True)
    if split := next(filter(None, map(split_path, zip(*all_held, strict=False))), None):
        raise _split_by_rank(split)
    if None in problems and (unread := first_problem(problems)):
        raise unread
    if different := differing_field(all_found):
        raise different
    return read[:2]


def first_problem(problems: Sequence[tuple[str, str, str] | None]) -> SampleError | None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            error = SampleError(*problem)
            note_rank(error, rank)
            return error
    return None


def _streams(job: Job) -> list[Any]:
    data: Any = job.data.data if isinstance(job.data, HeldStream) else job.data
    return [one for one in (data, *job.eval_sets.values()) if is_stream(one)]


def _split_by_rank(path: str) -> UserError:
    return UserError(
        "a stream of the job on several ranks",
        f"it was split already: {path} follows from the rank",
        "give the whole stream (without split_dataset_by_node), of which each rank gets its share; where a library "
        "asks for the rank as it makes the stream, give a function that makes it (data=lambda: iter(...))",
    )


def shapes_vary(job: Job, plan: Plan, seen: Sequence[Microbatch] = ()) -> bool:
    """Whether samples of `job` differ in their shapes, as its `cost` says or the first steps show; of a stream, as
    those that were `seen` do.

    On one device data are not read for that: reading a sample may change the next, as nowhere else (`check_job`).
    """
    if job.cost is not None or plan.devices == 1:
        return job.cost is not None
    with undisturbed():
        read = seen if job.streams else [one for step in range(STEPS_COMPARED) for one in _read(job, [0], step)[0]]
    sizes = [[(path, t.numel() / m.samples) for path, t in tensors_by_path(m.batch)] for m in read]
    return any(found != sizes[0] for found in sizes)


def worthwhile_primitives(model: nn.Module, plan: Plan) -> int:
    """How many primitives oneDNN should keep for `model` where shapes vary: few, or none where making them is cheap.

    A kept one lies among the activations, and what is freed around it fits no other length. On x86, float32 products
    make none; those that are left (GELU) are made in no time. Kernels of convolutions have three dims or more.
    """
    narrow = plan.precision not in ("float32", "float64") or any(
        tensor.is_floating_point() and tensor.itemsize < 4 for tensor in model.parameters()
    )
    kernels = any(tensor.dim() > 2 for tensor in chain(model.parameters(), model.buffers()))
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    cheap = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkl.is_available()
    return 0 if cheap and not (narrow or kernels or recurrent) else FEW_PRIMITIVES


def facts(job: Job) -> dict[str, Any]:
    """What of `job` must be the same on all ranks, as small values by name."""
    found: dict[str, Any] = {name: getattr(job, name) for name in SETTINGS}
    found["len(data)"] = None if job.streams else job.length
    found["len(eval_data)"] = [(name, None if is_stream(data) else len(data)) for name, data in job.eval_sets.items()]  # pyright: ignore
    found["evaluate"] = job.evaluate is not None
    found["schedule"] = [one.schedule is not None for one in job.by_phase.values()]
    found["phases"] = {name: (one.patterns, one.clip_norm, one.every) for name, one in (job.phases or {}).items()}
    found["sampler"] = type(job.order).__name__
    if job.streams:  # rank 0 alone reads it
        return found
    first = in_words(microbatches_of_step(job, 0))
    found["cost"] = [] if job.cost is None or first == in_words(microbatches_of_step(job, 0)) else ["again"]
    found["order of samples"] = first
    return found


def check_update(updaters: Updaters, world: World, *, saves: bool = False) -> None:
    """Raises `UserError`, on all ranks alike, where ranks have different optimizers or schedules, or one does not work.

    saves: whether the run has checkpoints.
    """
    for one in updaters.by_phase.values():
        if not is_known(one.optimizer):
            from evenly.train.look_optimizer import try_optimizer  # what saves takes a second to import

            try_optimizer(one, saves=saves)
    if world.size == 1:
        return
    found: dict[str, Any] = {}
    for phase, one in updaters.by_phase.items():
        of_phase = f" of phase {phase}" * bool(phase)
        found |= {name + of_phase: value for name, value in _facts_of(one.optimizer, one.schedule).items()}
    if problem := differing_field(gather_values(found, world.group("files"))):
        raise problem


def _facts_of(optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, Any]:
    """What of them must be the same on all ranks, as small values by name."""
    found: dict[str, Any] = {
        "optimizer": type(optimizer).__qualname__,
        "number of groups of the optimizer": len(optimizer.param_groups),
        "schedule": None if schedule is None else (type(schedule).__qualname__, repr(schedule.state_dict())),
    }
    for number, group in enumerate(optimizer.param_groups):
        plain = {key: value for key, value in group.items() if isinstance(value, (int, float, str, tuple))}
        found |= {f"{key} of group {number}": value for key, value in plain.items() if key not in EXECUTION}
    return found


def differing_field(ranks: Sequence[Mapping[str, Any]]) -> UserError | None:
    if any(facts.get("cost") for facts in ranks):
        return UserError(
            "the job's cost on several ranks",
            "called again, it is another",
            "let it follow from the sample's index alone",
        )
    if any(facts.get("again") for facts in ranks):
        return UserError(
            "the job's data on several ranks",
            "a microbatch read again after another is another: reading it depends on what was read before",
            "let a sample follow from its index, and draw from torch, random and numpy, which are seeded; no generator "
            "of its own, no counter",
        )
    for name in ranks[0]:
        if others := [rank for rank, facts in enumerate(ranks) if facts.get(name) != ranks[0][name]]:
            return UserError(
                "every rank must have the same job",
                f"{name} on rank {others[0]} differs from rank 0's",
                "let the job follow from its file and settings alone: no unseeded draw, no set(), no rank in it",
            )
    return None


def digest(nest: Any) -> list[tuple[str, tuple[int, ...], str, int]]:
    """The tensors of `nest`: paths, shapes, types and fingerprints."""
    return [
        (path, tuple(part.shape), str(part.dtype), fingerprint(part))
        for path, tensor in tensors_by_path(nest)
        for part in strided_parts(tensor)
    ]


@looking()
def check_model(
    job: Job, plan: Plan, executor: Executor, microbatches: Sequence[Microbatch], world: World
) -> dict[str, float]:
    """The factors of the moving averages that the model keeps in buffers, by name.

    Raises `UserError`, on all ranks alike, where the loss of a microbatch depends on what ran before it.
    """
    if not microbatches:
        return {}
    averages: dict[str, float] = {}
    for phase in job.by_phase:
        try:
            with executor.computing(phase):
                averages |= _check_phase(plan, executor, microbatches, world)
        except ContractError as problem:
            raise UserError(problem.asked, problem.found, problem.do) from problem  # nothing has been trained yet
    if averages and job.phases:  # where another phase leaves them as they are, they would follow another rule
        raise UserError(
            f"plan {plan} of a job with phases",
            f"buffer {min(averages)} is a moving average of the model's own, which each phase may change otherwise",
            "keep the average outside of the model, or run on one device",
        )
    return averages


def _check_phase(plan: Plan, executor: Executor, microbatches: Sequence[Microbatch], world: World) -> dict[str, float]:
    first, other = microbatches[0], microbatches[-1]
    cut = plan.data.zero_stage == 3 or plan.tensor.active or plan.pipeline.active
    models = [replica.module for replica in executor.composed.replicas]
    known, dtypes, counters = own_attributes(models[0]), _dtypes(models), Counters(executor)
    with undisturbed(*executor.devices), buffers_restored(models), _explained(plan) if cut else nullcontext():
        backward = BackwardLook()
        with _noticing(plan, executor) as changed, backward.watching():
            losses, orders = executor.look([first, other, first], see=backward.see)
        averages = find_averages(executor, [first, other], changed, world)
        if plan.exact == "bitwise":
            refuse_rounded(models[0], averages)
        remembers = not all(same(losses[0], again, exact=world.device == "cpu") for again in losses[2:])
        if plan.pipeline.active:  # what a model writes after its blocks, the first stages do not come to
            before = _buffers(models)
            executor.look([first])
            remembers = remembers or _buffers(models) != before
        with _noticing(plan, executor):
            counters.find(first, world)
    chosen = len(set(orders)) > 1
    now = own_attributes(models[0]) if remembers else known
    changed_here = [name for name in {**known, **now} if known.get(name) != now.get(name)]
    retyped = [name for name, dtype in _dtypes(models).items() if dtypes.get(name, dtype) is not dtype]
    if problem := _problem(plan, gather_values((remembers, chosen, changed_here, retyped), world.group("files"))):
        raise problem
    with undisturbed(*executor.devices), buffers_restored(models), _noticing(plan, executor):
        check_gradients(plan, executor, (first, other), world, backward, known=averages)
        counters.check(first, world, gradients=not backward.is_reentrant)
    counters.put_back()
    return averages


@contextmanager
def _noticing(plan: Plan, executor: Executor) -> Generator[set[str]]:
    """Within, the names of buffers that forwards change are added to the set; those of stages raise."""
    with ExitStack() as contexts:
        found = [
            contexts.enter_context(one.noticing()) for one in executor.composed.statistics * (not plan.pipeline.active)
        ]
        yield found[0] if found else set()


def _problem(plan: Plan, ranks: Sequence[tuple[bool, bool, list[str], list[str]]]) -> UserError | None:
    if retyped := next((names for *_, names in ranks if names), []):
        return UserError(
            f"plan {plan}",
            f"the forward changes the type of parameter {retyped[0]}",
            "let the model cast what it computes, not its parameters; or train in the type that it casts them to",
        )
    if any(remembers for remembers, *_ in ranks):
        names = sorted({name for _, _, names, _ in ranks for name in names})
        return UserError(
            f"plan {plan}",
            "the loss of a microbatch is another after another microbatch: the model or the loss remembers something "
            "outside of the model's state "
            + (f"({', '.join(names[:NAMED])} changed)" if names else "(a counter, a generator of its own, a buffer)"),
            "let it follow from the batch and the parameters alone, or run on one device",
        )
    if any(chosen for _, chosen, *_ in ranks):
        return UserError(
            f"plan {plan}",
            "which blocks run depends on the microbatch, and ranks would gather the parameters of different ones",
            "let the model run the same blocks for every microbatch, or use plan zero2 or ddp",
        )
    return None


@looking()
def check_again(
    executor: Executor, microbatches: Sequence[Microbatch], averages: Mapping[str, float], world: World
) -> None:
    """Raises `UserError`, on all ranks alike, where the moving averages are others than at the start."""
    models = [replica.module for replica in executor.composed.replicas]
    attributes = NumbersAndWords(chain.from_iterable(model.modules() for model in models))
    with undisturbed(*executor.devices), buffers_restored(models), places_restored(roots_of(executor.job, models)):
        check_averages(executor, microbatches, averages, world)
    attributes.restore()


@contextmanager
def buffers_restored(models: Sequence[nn.Module]) -> Generator[None]:
    """Undoes what is done within to the buffers of `models`, unless it raises, which ends the run."""
    before = [
        (module, name, buffer, buffer.clone())
        for model in models
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if not buffer.is_meta
    ]
    yield
    with torch.no_grad():
        for module, name, buffer, value in before:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if buffer.shape == value.shape and not torch.equal(buffer, value):
                buffer.copy_(value)


@contextmanager
def _explained(plan: Plan) -> Generator[None]:
    """Turns what a forward raises where parameters are cut into a `RunError`."""
    try:
        yield
    except (EvenlyError, ForwardEnded, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise RunError(
            f"the first forward under plan {plan}",
            describe(problem),
            "if it runs under plan single, it may reach parameters past their modules (a list, a closure, a method): "
            "look them up by name where they are used, or use plan ddp",
        ) from problem


def _dtypes(models: Sequence[nn.Module]) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for model in models for name, parameter in model.named_parameters()}


def _buffers(models: Sequence[nn.Module]) -> list[int]:
    return [fingerprint(b) for model in models for b in model.buffers() if not b.is_meta and b.layout is torch.strided]


def _read(job: Job, numbers: Sequence[int], step: int = 0) -> tuple[list[Microbatch], tuple[str, str, str] | None]:
    """The microbatches of these numbers; or none, and why they cannot be read: the words of a `SampleError`."""
    share = share_of_step(job, step, rank=0, ranks=1)
    own = [range(len(share.microbatches))[number] for number in numbers]
    try:
        return [*Loader(job).read(iter([replace(share, own=own)]))], None
    except SampleError as problem:
        return [], (problem.asked, problem.found, problem.do)
