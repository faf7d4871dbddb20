"""A look at the loss of the first microbatch: whether it adds up over samples, as the numbers of one forward need it.

The outputs of the model are kept; the loss is then called with those of either half of the samples, by a stand-in for
the model that returns them. So no forward is run again, and neither dropout nor BatchNorm makes a difference. What
cannot be cut by samples is not judged: a model that computes the loss itself, a batch of other dims.
"""

from __future__ import annotations

import dis
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from evenly.data.generators import undisturbed
from evenly.data.loader import idle_ranks
from evenly.data.nest import copied, map_tensors, tensors_by_path
from evenly.engine.executor import LossFunction
from evenly.engine.step_totals import as_loss
from evenly.errors import JobWarning
from evenly.job import Job, Loss
from evenly.model.norms import BATCH_NORMS

if TYPE_CHECKING:
    from evenly.engine.executor import Batch
    from evenly.plan import Plan
    from evenly.train.run import Run

TOLERANCE = 1e-3  # relative; of outputs in 16 bits
TOLERANCE_16_BITS = 3e-2
MOST_ELEMENTS = 2**24  # of the outputs that are kept
STORES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_DEREF")
PLAIN = (type, ModuleType, FunctionType, BuiltinFunctionType, int, float, str, NoneType, torch.dtype, torch.Tensor)
LIBRARIES = ("torch", "transformers", "evenly", "numpy")
IGNORED = -100  # the target that cross_entropy and the models of transformers leave out


class NotBySamples(Exception):
    """Something has no samples in its first dim."""


class FirstLoss:
    """The loss function of a job, whose first call is looked at.

    note: what is wrong with it in words, or ''.
    """

    def __init__(self, loss: LossFunction, samples: int) -> None:
        """samples: of the first microbatch."""
        self.loss, self.samples, self.note = loss, samples, ""
        self._called = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self._called:
            return self.loss(model, batch)
        self._called = True
        kept = copied(batch)  # a loss may take entries out of it, or write into it
        with torch.compiler.set_stance("force_eager"), _outputs_of(model) as outputs:  # hooks are in no graph
            found = self.loss(model, batch)
        with suppress(Exception), _nothing_drawn(outputs):
            self.note = _loss_note(self.loss, found, kept, outputs, self.samples)
        return found


def first_loss(run: Run, batch: Batch) -> FirstLoss | None:
    """The job's loss, to be looked at in the first step of `run`; None where it is not, or a batch is one forward.
    Losses of phases are not looked at.

    Ranks that share a microbatch have outputs that are not all theirs. A loss that may count its calls is not called
    more often than it would be without the look: on one device it may.
    """
    plan, microbatches = run.plan, batch.share.microbatches
    if run.job.phases or run.steps_done or not run.world.is_main or len(microbatches) < 2 or not batch.share.own:
        return None
    if plan.tensor.active or plan.pipeline.active or plan.replicas.count > 1 or plan.compile != "off":
        return None
    if may_remember(run.job.loss):
        return None
    return FirstLoss(run.job.loss, len(microbatches[batch.share.own[0]]))


def may_remember(function: Any, known: frozenset[Any] = frozenset()) -> bool:
    """Whether a call of `function` may leave something behind for the next.

    It leaves nothing where its code, and that of the functions of other files than libraries' that it calls, stores
    into local names alone and uses nothing from outside but modules, functions, classes and values without parts.
    """
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or function in known:
        return code is None
    if any(one.opname in STORES for inner in _codes_of(code) for one in dis.get_instructions(inner)):
        return True
    given = inspect.getclosurevars(function)
    values = [*given.nonlocals.values(), *given.globals.values(), *(function.__defaults__ or ())]
    if any(isinstance(value, torch.Tensor) for value in values) and any(name.endswith("_") for name in code.co_names):
        return True  # an operation in place
    return any(_remembers(value, known | {function}) for value in values)


def _remembers(value: Any, known: frozenset[Any]) -> bool:
    library = getattr(value, "__module__", None) or ""
    if isinstance(value, FunctionType) and library.partition(".")[0] not in LIBRARIES:
        return may_remember(value, known)
    if isinstance(value, nn.Module):
        return type(value).__module__.partition(".")[0] != "torch"
    return not isinstance(value, PLAIN)


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


def warn_of_loss(job: Job, looked: FirstLoss | None, samples: int) -> None:
    """Warns of what was found. samples: of the batch."""
    if looked is None or not looked.note:
        return
    text = (
        f"{looked.note}; so microbatches of {looked.samples} samples do not have the numbers of one forward of all "
        f"{samples}: return evenly.Loss(total, weight) with sums over what counts, or state microbatch={samples}"
    )
    _warn(text, job.loss)


def warn_of_batch_norm(job: Job, model: nn.Module, microbatch: int) -> None:
    """Warns of a BatchNorm in training whose microbatch, of `microbatch` samples, `job` has not stated."""
    if job.microbatch or job.microbatch_cost or microbatch >= job.global_batch:
        return
    names = [name for name, one in model.named_modules() if isinstance(one, BATCH_NORMS) and one.training]
    if names:
        text = (
            f"BatchNorm ({names[0]}) sees microbatches, of {microbatch} of the {job.global_batch} samples of a batch "
            f"where the job states none: state microbatch={job.global_batch} for one forward of all, or {microbatch}"
        )
        _warn(text, job.model)


def warn_of_idle_ranks(job: Job, plan: Plan) -> None:
    """Warn of ranks of the data axis that have no microbatch of a whole batch."""
    if idle := idle_ranks(job, size := plan.data.size):
        text = (
            f"{idle} of the {size} ranks on the data axis have nothing to compute: a batch has {size - idle} "
            f"microbatch{'es' * (size - idle != 1)}; take data={size - idle}, or state a smaller microbatch (numbers "
            "may follow it)"
        )
        _warn(text, job.model)


def _warn(text: str, place: Callable[..., Any]) -> None:
    code = getattr(getattr(place, "__init__", None) if isinstance(place, type) else place, "__code__", None)
    where = (code.co_filename, code.co_firstlineno) if code is not None else ("job", 0)
    warnings.warn_explicit(text, JobWarning, *where)


# ---------------------------------------------------------------------------------------------- the outputs
@contextmanager
def _outputs_of(model: Any) -> Generator[list[Any]]:
    """Within, copies of what each call of `model` returns are added to the list; none once there are too many."""
    outputs: list[Any] = []
    if not isinstance(model, nn.Module):
        yield outputs
        return

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        elements = sum(tensor.numel() for _, tensor in tensors_by_path([*outputs, output]))
        outputs.append(map_tensors(lambda t: t.detach().clone(), output) if elements <= MOST_ELEMENTS else None)

    handle = model.register_forward_hook(keep)
    try:
        yield outputs
    finally:
        handle.remove()


@contextmanager
def _nothing_drawn(outputs: Sequence[Any]) -> Generator[None]:
    """Restores all generators on exit: of torch, where `outputs` are too, of Python and numpy."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    with undisturbed(*{str(tensor.device) for _, tensor in tensors_by_path(outputs)}):
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy is not None:
                numpy.random.set_state(before[1])


class _StandIn:
    """Returns `outputs`, one a call, in the place of a model in training."""

    training = True

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._outputs = iter(outputs)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return next(self._outputs)


# ------------------------------------------------------------------------------------------------- the loss
def _loss_note(loss: LossFunction, found: Any, batch: Any, outputs: Sequence[Any], samples: int) -> str:
    """What is wrong with `loss`, which has `found` something of `batch`. Raises anything where it cannot be judged."""
    plain = not isinstance(found, Loss)
    if plain and _ignores_unevenly(batch):
        return "the loss is a plain scalar, a mean over samples, and samples have different numbers of ignored targets"
    if samples < 2 or _adds_up(loss, batch, outputs, samples):
        return ""
    return (
        "the loss is a plain scalar but no mean over samples (class weights? a sum? pairs within the batch?)"
        if plain
        else "the loss does not add up over samples (a mean for a sum? pairs within the batch?)"
    )


def _ignores_unevenly(batch: Any) -> bool:
    targets = [t for _, t in tensors_by_path(batch) if t.dtype == torch.int64 and t.dim() == 2]
    counts = [(target == IGNORED).sum(1) for target in targets]
    return any(int(count.max()) > int(count.min()) for count in counts)


class _Result(NamedTuple):
    """Total and weight of a loss, and the gradients of the outputs that it was called with."""

    total: float
    weight: float
    gradients: list[torch.Tensor]


def _adds_up(loss: LossFunction, batch: Any, outputs: Sequence[Any], samples: int) -> bool:
    """Whether total, weight and gradients are those of the two halves; also where that is chance, or not finite."""
    if _has_plain_lists(batch) or _has_plain_lists(outputs):
        raise NotBySamples
    whole, again = (_result(loss, batch, outputs, samples) for _ in range(2))
    if not isfinite(whole.total) or _differ(whole, [again], [whole.gradients]):
        return True
    return any(_halves_add_up(loss, batch, outputs, samples, whole, adjacent=one) for one in (True, False))


def _halves_add_up(
    loss: LossFunction, batch: Any, outputs: Sequence[Any], samples: int, whole: _Result, *, adjacent: bool
) -> bool:
    halves = [slice(0, samples // 2), slice(samples // 2, samples)]
    cut = [
        (
            _rows(batch, samples, half, adjacent=adjacent),
            *_rows((outputs, whole.gradients), samples, half, adjacent=adjacent, shared=True),
        )
        for half in halves
    ]
    sizes = [half.stop - half.start for half in halves]
    parts = [_result(loss, one[0], one[1], size) for one, size in zip(cut, sizes, strict=True)]
    return not _differ(whole, parts, [one[2] for one in cut])


def _result(loss: LossFunction, batch: Any, outputs: Sequence[Any], samples: int) -> _Result:
    with torch.enable_grad():
        leaves = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), outputs)
        model = _StandIn(map_tensors(torch.clone, leaves))  # a loss may write into them
        found = as_loss(loss(cast("nn.Module", model), copied(batch)), samples)
        inputs = [t for _, t in tensors_by_path(leaves) if t.requires_grad]
        gradients = torch.autograd.grad(found.total, inputs, allow_unused=True, materialize_grads=True)
    return _Result(float(found.total.detach()), float(found.added_weight), [*gradients])


def _differ(whole: _Result, parts: Sequence[_Result], expected: Sequence[list[torch.Tensor]]) -> bool:
    tolerance = TOLERANCE_16_BITS if any(one.itemsize < 4 for one in whole.gradients) else TOLERANCE
    for number in ("total", "weight"):
        values = [getattr(part, number) for part in parts]
        if abs(getattr(whole, number) - sum(values)) > tolerance * sum(map(abs, values)):
            return True
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place, gradient in enumerate(whole.gradients):
        rows, own = [one[place] for one in expected], [part.gradients[place] for part in parts]
        shared = rows[0].shape == gradient.shape  # of all samples
        pairs += [(gradient, torch.stack(own).sum(0))] if shared else zip(rows, own, strict=True)
    norm = sum(float(rows.double().square().sum()) for rows, _ in pairs) ** 0.5
    return sum(float((rows - own).double().square().sum()) for rows, own in pairs) ** 0.5 > tolerance * norm


def _rows(nest: Any, samples: int, part: slice, *, adjacent: bool, shared: bool = False) -> Any:
    """The rows of the samples `part` in every tensor; adjacent: whether those of one sample are, where it has several.

    A number stays; shared: so does a tensor without rows of samples. Raises `NotBySamples`.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or (shared and len(tensor) % samples):
            return tensor
        if len(tensor) == 0 or len(tensor) % samples:
            raise NotBySamples
        if adjacent:
            return tensor.unflatten(0, (samples, -1))[part].flatten(0, 1)
        return tensor.unflatten(0, (-1, samples))[:, part].flatten(0, 1)

    return map_tensors(cut, nest)


def _has_plain_lists(nest: Any) -> bool:
    if isinstance(nest, Mapping):
        return any(map(_has_plain_lists, nest.values()))
    if isinstance(nest, list | tuple):
        return any(not isinstance(one, torch.Tensor | Mapping | list | tuple) or _has_plain_lists(one) for one in nest)
    return False
