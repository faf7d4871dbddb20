"""Recomputation: activations of a block are not kept for the backward but computed again there.

`full` keeps what goes into a block; `selective` also what its matrix products and its attention give, which cost most
to compute. A recurrent layer changes its products in place: a block that has one keeps none of them. The second forward
draws the same random numbers as the first, and leaves no trace in running statistics: it runs outside of
`RunningStatistics.recording`.

Order: around compiled code, of which both forwards run the same; before parameters are cut over ranks, whose hooks must
lie around the block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from evenly.data.generators import DrawnNumbers
from evenly.data.nest import map_tensors, tensors_in
from evenly.errors import PlanError, RunError
from evenly.model.blocks import Block
from evenly.parallel.core.attributes import NumbersAndWords
from evenly.parallel.core.calls import Change, Forward
from evenly.parallel.core.places import Drawn, ValuePlace, is_generator, places, places_restored, put_back
from evenly.torch_private import ATTENTION

_aten = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    *(kernel.default for kernel in ATTENTION),
}


# What torch says where a block cannot be computed selectively, what that means, and what to do about it.
REFUSALS = (
    (
        "selective activation checkpoint has been mutated",
        "a block changes the result of a matrix product in place, which was kept",
        "leave out its inplace=True (or relu_, +=), or ",
    ),
    (
        "encountered during backward but not found in storage",
        "a block runs other operations when it is computed again: a forward uses a weight twice and casts it once, say",
        "",
    ),
)
CHANGED = "has been modified by an inplace operation"

PutBack = Callable[[], AbstractContextManager[None]]


def recomputing(*, selective: bool, device: str = "cpu", alone: bool = False) -> Change:
    """What makes a forward recompute.

    device: of the block. alone: whether one device runs it, which lets it change buffers and use them as it likes.
    """

    def change(block: Block, forward: Forward) -> Forward:
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # `RepeatedForward` does
        if selective and not _is_recurrent(block.module):
            how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        counts = BlockCounts(block.module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            _refuse_caches((*args, *kwargs.values()))
            tensors, modules = list[torch.Tensor](), [*block.module.modules()]
            buffers, attributes = BlockBuffers(modules if alone else ()), NumbersAndWords(modules)
            try:
                kept = map_tensors(lambda one: tensors.append(one) or one, (args, kwargs))
            except (TypeError, ValueError):  # of a class that cannot be made again of its fields
                kept, tensors = (args, kwargs), [*tensors_in((args, kwargs))]
            given = [one for one in (*args, *kwargs.values()) if is_generator(one)]
            with counts.noted(given) as before:
                state = buffers.put_back, attributes.put_back, partial(counts.put_back, before, given)
                return checkpoint(RepeatedForward(forward, (args, kwargs), kept, state, device), *tensors, **how)

        return run

    return change


class RepeatedForward:
    """A forward of a block that runs with the arguments that are `given` first, and again with those that are `kept`.

    kept: the same tensors in containers that nobody changes. state: what puts the block back to as the first found it.

    It is called with all tensors among them, which torch saves: it raises where one was changed in place. By itself it
    would not look into containers and named arguments, and would leave out the random numbers of a GPU on which none of
    the others is.
    """

    def __init__(
        self, forward: Forward, given: Any, kept: Any, state: tuple[PutBack, PutBack, PutBack], device: str
    ) -> None:
        self._forward, self._given, self._kept, self._state = forward, given, kept, state
        self._drawn = DrawnNumbers(device)

    def __call__(self, *_: torch.Tensor) -> Any:
        given, self._given = self._given, None
        try:
            if given is not None:
                result = self._forward(*given[0], **given[1])
                self._drawn.end()
                return result
            args, kwargs = self._kept
            buffers, attributes, counts = self._state
            with buffers(), attributes(), counts(), self._drawn.again():
                return self._forward(*args, **kwargs)
        except RuntimeError as problem:
            for said, found, to_do in REFUSALS:
                if said in str(problem):
                    raise PlanError("recompute=selective", found, f"{to_do}use recompute=full") from problem
            raise


class BlockBuffers:
    """The buffers of the `modules` of a block as a forward of it begins."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found = [(one, name, b.clone()) for one in modules for name, b in one.named_buffers(recurse=False)]

    @contextmanager
    def put_back(self) -> Generator[None]:
        """Within, the modules have these in place of their own, which the first forward has changed already."""
        own = [(module, name, getattr(module, name)) for module, name, _ in self._found]
        for module, name, value in self._found:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, buffer in own:
                setattr(module, name, buffer)


class BlockCounts:
    """What the forwards of a block change in lists, tensors, generators or objects that it holds or, as for generators,
    is given, or in variables that it names.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changes: bool | None = None  # known when the first forward has run

    @contextmanager
    def noted(self, given: Sequence[Any]) -> Generator[dict[str, ValuePlace]]:
        """Around a forward that is `given` these generators: as it begins; nothing of a block that changes none."""
        roots = self._with(given)
        before = {} if self._changes is False and not given else places(roots)
        yield before
        if self._changes is None:
            now = places(roots)
            # A later forward may draw where this one has not.
            self._changes = any(
                isinstance(place.value, Drawn) or place.differs(before.get(name)) for name, place in now.items()
            )

    @contextmanager
    def put_back(self, before: dict[str, ValuePlace], given: Sequence[Any]) -> Generator[None]:
        """Within, it is as it was `before`."""
        if not (before and (self._changes or given)):
            yield
            return
        roots = self._with(given)
        with places_restored(roots):
            put_back(roots, before)
            yield

    def _with(self, given: Sequence[Any]) -> list[tuple[str, Any]]:
        return [("", self._block), *((f"given {number}", one) for number, one in enumerate(given))]


class RecomputedBackward:
    """Around each backward of a plan with `recompute`, and within `context`: explains where a block cannot be repeated.

    Raises `PlanError` where the second forward of a block keeps other tensors for its backward than the first.
    """

    def __init__(self, recompute: str, context: AbstractContextManager[object]) -> None:
        self._recompute, self._context = recompute, context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        self._context.__exit__(kind, problem, trace)
        if isinstance(problem, RuntimeError) and CHANGED in str(problem) and _in_repetition(trace):
            raise PlanError(
                f"recompute={self._recompute}",
                "a tensor that a block is given is changed in place, by the block or after it, and a second forward "
                "would begin with other numbers",
                "let the code change a copy of it, or use recompute=none",
            ) from problem
        if isinstance(problem, CheckpointError):
            raise PlanError(
                f"recompute={self._recompute}",
                "a block that is computed a second time keeps other tensors for its backward than at first: its "
                "forward follows from something that the first has changed (a counter, a cache, a flag)",
                "let the forward of a block follow from its arguments and parameters alone, or use recompute=none",
            ) from problem


def _in_repetition(trace: TracebackType | None) -> bool:
    return any(frame.f_globals["__name__"] == checkpoint.__module__ for frame, _ in walk_tb(trace))


class CachesOff:
    """Has transformers models in `model` hand no cache of keys and values to their blocks; `close` undoes it.

    A second forward of a block would enter its keys a second time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._configs = _caching(model)
        for config in self._configs:
            config.use_cache = False

    def close(self) -> None:
        for config in self._configs:
            config.use_cache = True


def hands_caches(model: nn.Module) -> bool:
    return bool(_caching(model))


def _caching(model: nn.Module) -> list[Any]:
    configs = {id(found): found for module in model.modules() if (found := getattr(module, "config", None))}
    return [config for config in configs.values() if getattr(config, "use_cache", None) is True]


def _refuse_caches(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if hasattr(argument, "get_seq_length"):  # what the caches of transformers have in common
            raise RunError(
                "computing a block again",
                f"it is given a {type(argument).__name__}, which a second forward would fill twice",
                "call the model with use_cache=False",
            )


def _is_recurrent(block: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in block.modules())


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
