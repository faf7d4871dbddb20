"""What the blocks of other stages return: its form, found once for each form of their arguments.

A block runs on fake tensors once; later a stage that ran it says what shapes its result has (`result_forms`). Where its
code needs numbers, what it does inside is no other stage's concern, and it runs on made-up ones (`example_tensor`):
only the shapes of what it returns count.

Where more counts, since hooks look on, or the block leaves something behind or returns an object with tensors in it, it
is *run through*: its code and hooks run on the remote tensors of every run, whose every result may be received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from evenly.data.nest import hidden_in, map_tensors, tensors_by_path
from evenly.errors import PlanError
from evenly.model.fake import shared_fake_mode
from evenly.parallel.core.calls import BlockCall, own_forward
from evenly.parallel.core.left_behind import LeftBehind
from evenly.parallel.pipeline.example_tensor import ExampleTensor, example_of, example_weight, examples
from evenly.parallel.pipeline.hooks import run_with_hooks
from evenly.parallel.pipeline.remote_tensor import (
    MAX_CACHED,
    OTHER_PLAN,
    RUNNING_STAGE,
    RemoteTensor,
    cache_key,
    fake_like,
    materialized,
    remote,
)
from evenly.parallel.pipeline.result_forms import ResultForm, TensorMeta
from evenly.torch_private import version

if TYPE_CHECKING:
    from evenly.parallel.pipeline.model import StagedModel, StageRun, StageTensor

NEEDS_NUMBERS = "needs numbers inside"
RETURNS = "returns an iterator, or an object that has tensors in its attributes"
LEAVES = "changes a list, a dict or an object that other code has too"


@dataclass(frozen=True)
class SkippedResult:
    """What a skipped block returns: a nest of fake tensors.

    argument_paths: id of a fake tensor -> path of the argument that the block returns in its place.
    leaves_tensors: whether the block has also put a tensor into an attribute.
    """

    nest: Any
    argument_paths: dict[int, str]
    leaves_tensors: bool = False

    def of_form(self, form: ResultForm, paths: Sequence[str]) -> SkippedResult | None:
        """The same with the sizes of `form`; None where it is of other tensors. paths: of the arguments' tensors."""
        fakes = [tensor for _, tensor in tensors_by_path(self.nest)]
        if [(one.dim(), one.dtype) for one in fakes] != [(len(meta.strides), meta.dtype) for meta in form.metas]:
            return None
        given = [paths[number] if number >= 0 else None for number in form.arguments]
        if given != [self.argument_paths.get(id(one)) for one in fakes]:
            return None
        with shared_fake_mode(), torch.no_grad():
            made = {id(one): _fake_of(meta, one.device) for one, meta in zip(fakes, form.metas, strict=True)}
        found = {id(made[old]): path for old, path in self.argument_paths.items()}
        return SkippedResult(map_tensors(lambda one: made.get(id(one), one), self.nest), found)


class SkippedBlocks:
    """The results of blocks of `model` that a run skips."""

    def __init__(self, model: StagedModel) -> None:
        self._model = model
        self._cached: dict[Any, SkippedResult] = {}
        self._of_any_sizes: dict[Any, SkippedResult] = {}
        self._need_numbers: set[str] = set()  # names of blocks

    def result(self, call: BlockCall, owner: StageRun, *, runs_through: bool, form: ResultForm | None) -> Any:
        """The result of `call` as remote tensors of `owner`; form: as the stage that ran it says, if it does."""
        if not runs_through:
            return self._result(call, owner, form=form)

        def forward(*args: Any, **kwargs: Any) -> Any:
            hooked = replace(call, args=args, kwargs=kwargs)
            if call.block.name in self._need_numbers:
                return self._result(hooked, owner, cached=False)
            try:
                return _forward(call, args, kwargs)
            except Exception:
                return self._result(hooked, owner, cached=False)

        call.begin()
        return run_with_hooks(call.block.module, forward, call.args, call.kwargs)

    def _result(self, call: BlockCall, owner: StageRun, *, cached: bool = True, form: ResultForm | None = None) -> Any:
        given = dict(tensors_by_path((call.args, call.kwargs)))
        key = self._key(call) if cached else None
        found = self._cached.get(key) if key is not None else None
        if found is None or (found.leaves_tensors and owner.discovers):
            before = owner.shaped
            found = self._found(call, form if cached else None, again=not cached)
            if key is not None and owner.shaped == before and not self._model.stage_plan.shapes_vary:
                if len(self._cached) >= MAX_CACHED:
                    self._cached.clear()
                self._cached[key] = found

        def as_remote(fake: torch.Tensor) -> torch.Tensor:
            path = found.argument_paths.get(id(fake))
            return remote(fake, owner) if path is None else given[path]

        return map_tensors(as_remote, found.nest)

    def _key(self, call: BlockCall, *, sizes: bool = True) -> tuple[Any, ...] | None:
        return cache_key((call.block.name, call.block.module.training, call.args, call.kwargs), sizes=sizes)

    def _found(self, call: BlockCall, form: ResultForm | None, *, again: bool) -> SkippedResult:
        """As `form` says, in the nest that the block has returned for arguments of other sizes; else as it runs.

        again: whether it has run before in this call, and failed: what it leaves behind would be there twice.
        """
        key = self._key(call, sizes=False)
        known = self._of_any_sizes.get(key) if key is not None and form is not None else None
        paths = [path for path, _ in tensors_by_path((call.args, call.kwargs))]
        found = None if known is None or form is None else known.of_form(form, paths)
        if found is None:
            left, runs_once = LeftBehind(call.block.module, (call.args, call.kwargs)), self._key(call) is not None
            found = self._run(call, left)
            if (runs_once or again) and left.values():
                raise _refusal(call, f"{NEEDS_NUMBERS} and {LEAVES}" if again else LEAVES)
            if any(True for _ in hidden_in(found.nest)):
                raise _refusal(call, RETURNS)
            found = replace(found, leaves_tensors=left.tensors())
            if key is not None and not _has_numbers(found.nest) and not found.leaves_tensors:
                self._of_any_sizes[key] = found
        return found

    def _run(self, call: BlockCall, left: LeftBehind) -> SkippedResult:
        paths = {id(tensor): path for path, tensor in tensors_by_path((call.args, call.kwargs))}
        if call.block.name in self._need_numbers:
            return self._run_on_examples(call)
        try:
            return _skipped_result(_forward(call, call.args, call.kwargs), paths)
        except Exception as problem:
            if left.values():
                raise _refusal(call, f"{NEEDS_NUMBERS} and {LEAVES}") from problem
            try:
                found = self._run_on_examples(call)
            except PlanError:
                raise
            except Exception:
                raise problem from None
            self._need_numbers.add(call.block.name)
            return found

    def _run_on_examples(self, call: BlockCall) -> SkippedResult:
        model = self._model
        before, model.running = model.running, _ExampleRun()
        paths: dict[int, str] = {}
        copies: list[torch.Tensor] = []

        def as_example(path: str, tensor: torch.Tensor) -> torch.Tensor:
            tensor = materialized(tensor)
            copy = example_of(tensor.fake) if isinstance(tensor, RemoteTensor) else tensor.detach().clone()
            if not isinstance(tensor, RemoteTensor):
                copies.append(copy)
            paths[id(copy)] = path
            return copy

        try:
            with examples(remotes=True):
                made = {id(t): as_example(path, t) for path, t in tensors_by_path((call.args, call.kwargs))}
                args, kwargs = map_tensors(lambda tensor: made[id(tensor)], (call.args, call.kwargs))
                versions = [version(copy) for copy in copies]
                left = LeftBehind(call.block.module, (args, kwargs))
                found = _skipped_result(result := _forward(call, args, kwargs), paths)
        finally:
            model.running = before
        if [version(copy) for copy in copies] != versions:
            raise _refusal(call, f"{NEEDS_NUMBERS} and writes into a tensor that every stage has")
        if left.values():
            raise _refusal(call, f"{NEEDS_NUMBERS} and {LEAVES}")
        if _has_numbers(result):
            raise _refusal(call, f"{NEEDS_NUMBERS} and returns a number that it computes from its tensors")
        return found


class _ExampleRun:
    """A run of one block on examples."""

    def view_of(self, module: nn.Module, name: str, stage_tensor: StageTensor) -> torch.Tensor:
        """Made-up weights."""
        return example_weight(stage_tensor.fake)

    def begin(self) -> None: ...

    def call(self, call: BlockCall) -> Any:
        """Runs a block that the block calls."""
        return call.run(*call.args, **call.kwargs)


def _forward(call: BlockCall, args: Any, kwargs: Any) -> Any:
    return own_forward(call.block.module)(*args, **kwargs)


def _skipped_result(result: Any, paths: Mapping[int, str]) -> SkippedResult:
    argument_paths: dict[int, str] = {}

    def as_fake(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.as_subclass(torch.Tensor) if isinstance(tensor, ExampleTensor) else tensor
        fake = fake_like(plain.fake if isinstance(plain, RemoteTensor) else plain)
        if id(tensor) in paths:
            argument_paths[id(fake)] = paths[id(tensor)]
        return fake

    return SkippedResult(map_tensors(as_fake, result), argument_paths)


def _fake_of(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    assert meta.shape is not None  # of a result, which is there
    fake = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=device)
    return fake.requires_grad_(meta.requires_grad)


def _has_numbers(nest: Any) -> bool:
    if isinstance(nest, Mapping):
        return any(map(_has_numbers, nest.values()))
    if isinstance(nest, list | tuple):
        return any(map(_has_numbers, nest))
    return isinstance(nest, bool | int | float | complex)


def _refusal(call: BlockCall, found: str) -> PlanError:
    return PlanError(
        RUNNING_STAGE, f"block {call.block.name} {found}", f"have it return what others use, or {OTHER_PLAN}"
    )
