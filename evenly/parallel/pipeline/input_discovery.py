"""A run of one stage on fake tensors, which finds what it has to receive."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from evenly.data.nest import map_tensors, tensors_by_path
from evenly.errors import PlanError
from evenly.parallel.core.calls import BlockCall, own_forward
from evenly.parallel.pipeline.draws import Draws
from evenly.parallel.pipeline.example_tensor import example_of, example_weight
from evenly.parallel.pipeline.example_tensor import examples as running_examples
from evenly.parallel.pipeline.hooks import run_with_hooks
from evenly.parallel.pipeline.model import StagedModel, StageRun, StageTensor
from evenly.parallel.pipeline.needs import Made, NeedFound
from evenly.parallel.pipeline.remote_tensor import OTHER_PLAN, RUNNING_STAGE, RemoteTensor, is_remote, materialized
from evenly.parallel.pipeline.stages import CallId, TensorSite


class StageEnded(Exception):
    """Ends the run of a stage at the first block of the next."""


class InputDiscovery(StageRun):
    """A run of one stage that finds the tensors it must receive; fake tensors take their place."""

    discovers = True

    def __init__(self, model: StagedModel, stage: int, *, training: bool, examples: bool) -> None:
        super().__init__(model, stage, [None] * len(model.stage_plan.stage_inputs[training][stage]), training=training)
        self.stack, self.random, self._examples = ExitStack(), Draws(), examples
        self._own: dict[str, torch.Tensor] = {}
        self._last_site: TensorSite | None = None
        self._families: dict[int, list[RemoteTensor]] = {}  # by id of the root, what is received of its views
        self._overwritten: set[int] = set()  # ids of roots
        self.inputs: list[TensorSite] = []
        self._made, self._written, self._early = Made(), model.needs.written, model.needs.early
        if examples and self.entered:
            self.stack.enter_context(running_examples())
        self._site_of: dict[int, tuple[RemoteTensor, TensorSite]] = {}

    def value_of(self, tensor: RemoteTensor) -> torch.Tensor | None:
        """A fake tensor for each one used once the stage is entered, which it must receive; None if it has no site."""
        if not self.entered:
            return None
        if (found := super().value_of(tensor)) is not None:
            return found
        site = self._site_of.get(id(tensor))
        if site is None:
            return None
        self.inputs.append(site[1])
        self._families.setdefault(id(tensor.root), []).append(tensor)
        self._check_family(tensor)
        return example_of(tensor.fake) if self._examples else tensor.fake.clone()  # no leaf: may be overwritten

    def view_of(self, module: nn.Module, name: str, stage_tensor: StageTensor) -> torch.Tensor | None:
        found = super().view_of(module, name, stage_tensor)
        if found is not None:
            return found
        if not self._examples:
            return stage_tensor.fake
        return self._own.setdefault(stage_tensor.name, example_weight(stage_tensor.fake))

    def _note(self, call: CallId, side: str, nest: Any) -> None:
        for path, tensor in tensors_by_path(nest):
            self._note_at(TensorSite(call, side, path), tensor)

    def note_results(self, function: str, results: Any, *, new: bool) -> Any:
        """As in `StageRun`; notes what is new."""
        kept = super().note_results(function, results, new=new)
        if new and kept is results and self._last_site is not None:
            self._made.note(self._last_site, results)
        return kept

    def refuses_write(self, target: torch.Tensor, function: str) -> Exception:
        return self._made.need(target, super().refuses_write(target, function))

    def note_write(self, target: RemoteTensor) -> None:
        self._overwritten.add(id(target.root))
        self._check_family(target)

    def _check_family(self, tensor: RemoteTensor) -> None:
        if id(tensor.root) in self._overwritten and len(self._families.get(id(tensor.root), [])) > 1:
            raise PlanError(
                RUNNING_STAGE,
                "a tensor of an earlier stage and a view of it are both needed, and one of them is written into",
                f"take the view where it is written into, or {OTHER_PLAN}",
            )

    def want_numbers(self, tensors: list[RemoteTensor]) -> None:
        """Raises the sites of `tensors` as needs, where they could be received before the stage is entered."""
        sites = [self._site_of[id(one)][1] for one in tensors if id(one) in self._site_of]
        if not self.entered and len(sites) == len(tensors):
            raise NeedFound(early=frozenset(sites), problem=self.not_sent_error("its code"))

    def _fill(self, site: TensorSite, tensor: torch.Tensor | None) -> None:
        if not self.entered and isinstance(tensor, RemoteTensor):
            self.inputs.append(site)
            self._families.setdefault(id(tensor.root), []).append(tensor)
            made = example_of(tensor.fake).as_subclass(torch.Tensor)
            tensor.fill(made.logical_not() if made.dtype is torch.bool and self._model.needs.all_false else made)
        else:
            super()._fill(site, tensor)

    def _note_at(self, site: TensorSite, tensor: torch.Tensor) -> None:
        self._last_site = site
        super()._note_at(site, tensor)
        if not self.entered and isinstance(tensor, RemoteTensor):
            self._site_of.setdefault(id(tensor), (tensor, site))

    def _enter(self, call: BlockCall | None) -> None:
        arguments = () if call is None else (call.args, call.kwargs)
        for path, tensor in tensors_by_path(arguments):
            if isinstance(tensor, RemoteTensor):
                self._site_of[id(tensor)] = (tensor, TensorSite(None, "in", path))
        if self._examples:
            self.stack.enter_context(running_examples())
        super()._enter(call)
        map_tensors(materialized, arguments)  # all arguments must be received

    def draws(self) -> bool:
        """Notes that a function draws for remote tensors."""
        return self.random.note()

    def call(self, call: BlockCall) -> Any:
        self.random.at_block(between=False)
        result = self._called(call)
        self.random.at_block(between=True)
        return result

    def _ended(self, call: BlockCall | None) -> Exception:
        self._payload(call)
        return StageEnded()

    def _called(self, call: BlockCall) -> Any:
        stage = self._model.stage_plan.stage_of[call.block.name, call.number]
        if stage > self.stage:
            if not self.entered:
                self._enter(call)
            raise self._ended(call)
        return super().call(call)

    def _run_block(self, call: BlockCall, args: Any, kwargs: Any) -> Any:
        module = call.block.module
        result = run_with_hooks(module, own_forward(module), args, kwargs)
        call.skip()
        return result

    def _check(self, nest: Any, call: BlockCall | None) -> None:
        for path, tensor in tensors_by_path(nest):
            if is_remote(tensor):
                where = f"block {call.block.name}" if call is not None else "the loss"
                raise PlanError(
                    RUNNING_STAGE,
                    f"{where} needs (at {path}) what an earlier stage computes inside a block and does not return, "
                    f"of shape {tuple(tensor.shape)}",
                    f"return it from the block, or {OTHER_PLAN}",
                )
