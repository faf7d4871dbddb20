"""A job's model, profiled as a plan runs it: with its precision, its recomputation and what the tensor axis splits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from evenly.comm.fake import fake_group
from evenly.data.loader import CutBatch, Loader, Microbatch, Share, cut_batch, holding_first, share_of_step
from evenly.data.nest import tensors_in
from evenly.engine.build import build_model
from evenly.engine.find_splits import choose_splits, derivation_of
from evenly.engine.precision import autocast, functions_as_on, place_batch
from evenly.engine.step_totals import as_loss
from evenly.engine.updaters import built_optimizers
from evenly.errors import EvenlyError, UserError
from evenly.hardware.devices import Device
from evenly.job import Job
from evenly.model.blocks import Block, find_blocks, find_recomputed
from evenly.model.fake import parameters_on_meta
from evenly.model.parts import Collective
from evenly.parallel.core.calls import WrappedForwards
from evenly.parallel.core.recompute import CachesOff, RecomputedBackward, hands_caches, recomputing
from evenly.parallel.core.statistics import rules_of
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.splits import Derivation
from evenly.plan import Plan
from evenly.planner.equal_calls import EqualCalls, find_equal_calls
from evenly.planner.fake_results import FakeResults
from evenly.planner.optimizer_costs import OptimizerCosts, optimizer_costs
from evenly.planner.profile import Profile, between, blended, scaled
from evenly.planner.profile_recorder import profile_module
from evenly.planner.sample_line import SampleLine
from evenly.planner.training_config import TrainingConfig

# Steps, and samples of them at most, that are dealt to see how much the rank with most has, where samples differ.
STEPS, SAMPLES = 8, 1024


@dataclass(frozen=True)
class Stages:
    """counts: of calls per stage. owners: name of a parameter or buffer -> the stages that hold it."""

    counts: tuple[int, ...]
    owners: Mapping[str, tuple[int, ...]]

    def calls(self, stage: int) -> tuple[int, int]:
        begin = sum(self.counts[:stage])
        return begin, begin + self.counts[stage]


@dataclass(eq=False)
class JobProfiler:
    """Profiles the model of `job`, each way at most once; nothing is computed.

    step: of which the microbatches are taken, from 0. Of several sizes the smallest and the largest are profiled; what
    lies between follows from these two. steps: that are dealt from there on, see `loads`. watch: called with a plan
    before the model is run as that has it. device: type of the devices, "cuda" or "cpu".
    """

    job: Job
    step: int = 0
    steps: int = STEPS
    watch: Callable[[Plan], object] | None = None
    device: str = "cpu"
    _models: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    _derivations: dict[str, Derivation] = field(default_factory=dict[str, Derivation])
    _calls: dict[str, tuple[Any, list[str]]] = field(default_factory=dict[str, Any])
    _lines: dict[tuple[Any, ...], SampleLine] = field(default_factory=dict[tuple[Any, ...], SampleLine])
    _between: dict[tuple[Any, ...], Profile] = field(default_factory=dict[tuple[Any, ...], Profile])
    _equal_calls: dict[str, EqualCalls | None] = field(default_factory=dict[str, EqualCalls | None])
    _optimizers: dict[tuple[Any, ...], OptimizerCosts] = field(default_factory=dict[tuple[Any, ...], OptimizerCosts])
    _results: FakeResults = field(default_factory=FakeResults)
    _typical: dict[tuple[Any, ...], Profile] = field(default_factory=dict[Any, Any], init=False)
    _loads: dict[tuple[int, bool], tuple[tuple[float, ...], ...]] = field(default_factory=dict[Any, Any], init=False)

    def __post_init__(self) -> None:
        self.job = holding_first(self.job)

    def model(self, precision: str) -> nn.Module:
        """The job's model; without memory where its code can be built so."""
        if precision not in self._models:
            self._models[precision] = self._built(precision)
            self._check_weights(self._models[precision])
        return self._models[precision]

    def _built(self, precision: str) -> nn.Module:
        try:
            with torch.device("meta"):
                return build_model(self.job, precision=precision, device=None)
        except UserError:
            return build_model(self.job, precision=precision, device=None)

    def _check_weights(self, model: nn.Module) -> None:
        """Raises `UserError` where the job's weights are not of its model."""
        if self.job.weights is not None:
            from evenly.checkpoint.weights import check_weights  # takes a second to import

            check_weights(Path(self.job.weights), model)

    def share(self, rank: int, ranks: int) -> Share:
        return share_of_step(self.job, self.step, rank=rank, ranks=ranks)

    @cached_property
    def microbatches(self) -> Sequence[Microbatch]:
        share = self.share(0, 1)
        return [*Loader(self.job).read(iter([share]))]

    @cached_property
    def _ends(self) -> tuple[int, int]:
        numbers = sorted(range(len(self.microbatches)), key=self._elements.__getitem__)
        return numbers[0], numbers[-1]

    def profile(self, plan: Plan, number: int = 0, *, held: bool = True) -> Profile:
        """The profile of microbatch `number` under `plan` (fitted and resolved); equal ones are one object.

        held: whether the bytes that it holds count, as of `SampleLine.at`.
        """
        return self._of_elements(plan, self._elements[number], held=held)

    def typical(self, plan: Plan, config: TrainingConfig) -> Profile:
        """The profile of a microbatch of which the replica that has most runs as many in a step as `config` says.

        Where samples differ, between those of the smallest and the largest, by how long their samples are: per element
        attention costs as much more as these are longer, all else the same. The bytes that it holds do not count.
        """
        elements = round(self.elements(config.data, filled=config.zero == 3) / config.microbatches)
        if self.job.cost is None:
            return self._of_elements(plan, elements, held=False)
        key = (self._key(plan), elements)
        if key not in self._typical:
            few, many = (scaled(self.profile(plan, number, held=False), elements) for number in self._ends)
            lengths = self._batches[0].lengths or [[1]]
            short, long = (max(lengths[number]) for number in self._ends)
            at = 1.0 if short == long else min(1.0, max(0.0, (self.length - short) / (long - short)))
            self._typical[key] = blended(few, many, at)
        return self._typical[key]

    @cached_property
    def length(self) -> float:
        """Of the longest sample of a microbatch, the mean over what microbatches cost in the first steps."""
        pairs = [pair for batch in self._batches for pair in zip(_costs(batch), batch.lengths or (), strict=True)]
        return sum(cost * max(of) for cost, of in pairs) / sum(cost for cost, _ in pairs)

    def elements(self, replicas: int, *, filled: bool) -> float:
        """Of all that the replica that has most runs in a step, the mean."""
        per_cost = sum(self._elements) / sum(_costs(self._batches[0]))
        return per_cost * fmean(map(sum, self.loads(replicas, filled=filled)))

    def loads(self, replicas: int, *, filled: bool) -> tuple[tuple[float, ...], ...]:
        """Of the first steps what each microbatch costs that the replica runs which has most.

        Its rounds without one cost nothing; filled: as much as its last one, which is run in their place.
        """
        if (replicas, filled) not in self._loads:
            self._loads[replicas, filled] = tuple(_largest_load(one, replicas, filled) for one in self._batches)
        return self._loads[replicas, filled]

    @cached_property
    def _batches(self) -> Sequence[CutBatch]:
        alike = self.job.cost is None or self.job.streams
        most = 1 if alike else max(1, min(self.steps, SAMPLES // self.job.global_batch))
        return [cut_batch(self.job, step) for step in range(self.step, self.step + most)]

    def _of_elements(self, plan: Plan, elements: int, *, held: bool) -> Profile:
        key = self._key(plan)
        if (key, elements, held) not in self._between:
            few, many = (self._profile(plan, key, self.microbatches[number], held) for number in self._ends)
            self._between[key, elements, held] = between(few, many, elements)
        return self._between[key, elements, held]

    def _key(self, plan: Plan) -> tuple[Any, ...]:
        tensor, cached = plan.tensor, plan.recompute == "none" and not plan.pipeline.active
        of_axes = (tensor.size, tensor.exclude, tensor.sequence_parallel)
        return (plan.precision, plan.recompute, *of_axes, cached and hands_caches(self.model(plan.precision)))

    @cached_property
    def _elements(self) -> Sequence[int]:
        return [*map(_elements_of, self.microbatches)]

    def _profile(self, plan: Plan, key: tuple[Any, ...], microbatch: Microbatch, held: bool) -> Profile:
        shapes = [tuple(tensor.shape) for tensor in tensors_in(microbatch.batch)]
        samples = microbatch.samples
        if all(shape and shape[0] == samples for shape in shapes):  # the same but for the number of samples
            key, shapes = (*key, "by samples"), [shape[1:] for shape in shapes]
        line = self._lines.setdefault((*key, *shapes), SampleLine())
        return line.at(samples, _elements_of(microbatch), lambda: self._profile_now(plan, microbatch), held=held)

    def _profile_now(self, plan: Plan, microbatch: Microbatch) -> Profile:
        """Of the whole model; where calls of blocks are known to do the same, by a run of some of them."""
        if plan.precision not in self._equal_calls:
            whole = self._run(plan, microbatch)
            self._equal_calls[plan.precision] = self._find_equal_calls(whole, plan, microbatch)
            return whole
        equal, layouts = self._equal_calls[plan.precision], self.layouts(plan)
        if equal is not None and all(layouts.get(equal.alike(one)) == layout for one, layout in layouts.items()):
            with suppress(EvenlyError):  # which the whole model says by itself
                if found := equal.whole(self._run(plan, microbatch, equal.left_out)):
                    return found
        return self._run(plan, microbatch)

    def _find_equal_calls(self, whole: Profile, plan: Plan, microbatch: Microbatch) -> EqualCalls | None:
        model = self.model(plan.precision)
        found = find_equal_calls(whole)
        if found and all(_written(model, one) == _written(model, other) for one, other in found.left_out.items()):
            with suppress(EvenlyError):
                short = self._run(plan, microbatch, found.left_out)
                found = replace(found, buffer_bytes=whole.buffer_bytes - short.buffer_bytes)
                return found if found.whole(short) == whole else None
        return None

    def _run(self, plan: Plan, microbatch: Microbatch, without: Collection[str] = ()) -> Profile:
        precision = plan.precision
        if self.watch is not None:
            self.watch(plan)

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            with autocast(precision, "cpu"):
                return as_loss(self.job.traced_loss(model, batch), microbatch.samples).total

        @contextmanager
        def around() -> Generator[None]:
            with changes.around(), functions_as_on(self.device):
                yield

        batch = place_batch(microbatch.batch, precision, "cpu")
        changes = _Changes(self, plan)
        return profile_module(
            self.model(precision),
            loss,
            batch,
            change=changes.applied,
            around=around,
            collectives=changes.collectives,
            without=without,
            results=self._results,
        )

    def layouts(self, plan: Plan) -> dict[str, Layout]:
        if not plan.tensor.active:
            return {}
        if plan.precision not in self._derivations:
            self._derivations[plan.precision] = derivation_of(self.job, self.model(plan.precision), plan.precision)
        splits = choose_splits(plan, self._derivations[plan.precision]).splits
        return {name: Layout.of(s.dim, s.outer, s.units, s.inner, plan.tensor.size) for name, s in splits.items()}

    def stages(self, plan: Plan, device: Device | None) -> Stages:
        """What the pipeline of `plan` cuts the model into on such devices; None: whether or not it fits there."""
        from evenly.engine.find_stages import calls_of_job, counts_of
        from evenly.parallel.pipeline.model import StagedModel  # torch's parts behind these take a while to import
        from evenly.parallel.pipeline.stages import joined_owners

        def found(around: AbstractContextManager[None]) -> tuple[Any, list[str]]:
            with around:
                built = build_model(self.job, precision=plan.precision, device=None)
            model = StagedModel(built, "cpu")
            job = next(iter(self.job.by_phase.values()))
            return calls_of_job(job, model, plan, self.device), [*model.stage_tensors]

        if plan.precision not in self._calls:
            with suppress(EvenlyError):  # which the model with its numbers says by itself
                self._calls[plan.precision] = found(parameters_on_meta())
        if plan.precision not in self._calls:
            self._calls[plan.precision] = found(nullcontext())
        calls, names = self._calls[plan.precision]
        microbatches = len(self.share(0, plan.axes["data"]).own)
        on_gpu = device is not None and device.kind != "cpu"
        limit_bytes = round(device.memory_bytes) if device is not None and on_gpu else None
        kind = "cuda" if on_gpu else "cpu"
        counts = counts_of(calls.costs, plan, device=kind, microbatches=microbatches, limit_bytes=limit_bytes)
        return Stages(counts, joined_owners(names, [(calls, counts)]))

    def optimizer_costs(self, plan: Plan) -> OptimizerCosts:
        key = (plan.precision, plan.exact)
        if key not in self._optimizers:
            model = self.model(plan.precision)
            optimizers = built_optimizers(self.job, dict(model.named_parameters()), plan)
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            found = [optimizer_costs(optimizer, names) for optimizer in optimizers]
            states = {name: state for one in found for name, state in one.states.items()}
            dealt, elementwise = all(o.dealt or o.elementwise for o in found), all(o.elementwise for o in found)
            self._optimizers[key] = OptimizerCosts(states, dealt=dealt, elementwise=elementwise)
        return self._optimizers[key]

    def blocks(self, plan: Plan) -> list[Block]:
        return find_blocks(self.model(plan.precision))

    def statistics_bytes(self, plan: Plan) -> tuple[int, int]:
        """How many layers keep running statistics, and bytes of those that one microbatch leaves."""
        rules = rules_of(self.model(plan.precision))
        return len(rules), sum(one.record_bytes for one in rules)


@dataclass(eq=False)
class _Changes:
    """What a plan does to the model that is profiled."""

    profiler: JobProfiler
    plan: Plan
    collectives: list[Collective] = field(default_factory=list[Collective])
    _axis: AbstractContextManager[Any] = field(default_factory=nullcontext[Any])

    def around(self) -> AbstractContextManager[Any]:
        """Within what the forward and the backward run."""
        return self._axis

    @contextmanager
    def applied(self, model: nn.Module, blocks: Sequence[Block]) -> Generator[None]:
        """Within, the model is as the plan has it."""
        plan = self.plan
        with ExitStack() as stack:
            if plan.recompute in ("selective", "full") or plan.pipeline.active:
                stack.callback(CachesOff(model).close)
            if plan.recompute in ("selective", "full"):
                change = recomputing(selective=plan.recompute == "selective")
                recomputed = find_recomputed(model, blocks)
                stack.callback(WrappedForwards(recomputed, [change], asked=f"recompute={plan.recompute}").close)
            if plan.tensor.active:
                self._axis = self._split(model, stack).axis
            if plan.recompute in ("selective", "full"):
                self._axis = RecomputedBackward(plan.recompute, self._axis)
            yield

    def _note(self, operation: str, size: int) -> None:
        self.collectives.append(Collective(operation, size))

    def _split(self, model: nn.Module, stack: ExitStack) -> Any:
        """Leaves of the model what the first rank of the tensor axis holds."""
        from evenly.parallel.tensor.model import SplitModel  # takes seconds to import

        plan, names = self.plan, dict(model.named_parameters())
        split = SplitModel(
            model,
            {name: layout for name, layout in self.profiler.layouts(plan).items() if name in names},
            fake_group("tensor", plan.tensor.size, self._note),
            sequence=plan.tensor.sequence_parallel,
            recomputed=plan.recompute == "selective",
        )
        stack.callback(split.close)
        return split


def _written(model: nn.Module, name: str) -> str:
    """Classes, shapes and settings of a module, as torch prints them."""
    return repr(model.get_submodule(name))


def _costs(batch: CutBatch) -> Sequence[float]:
    return batch.shares(1)[0].costs or [*map(len, batch.microbatches)]


def _largest_load(batch: CutBatch, ranks: int, filled: bool) -> tuple[float, ...]:
    costs = _costs(batch)
    loads: list[tuple[float, ...]] = []
    for share in batch.shares(ranks):
        fillers = [costs[number] if filled else 0.0 for number in share.filled().fillers]
        loads.append((*(costs[number] for number in share.own), *fillers))
    return max(loads, key=sum)


def _elements_of(microbatch: Microbatch) -> int:
    return sum(tensor.numel() for tensor in tensors_in(microbatch.batch))
