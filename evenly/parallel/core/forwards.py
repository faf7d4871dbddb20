"""What a plan does to the forward of every block of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evenly.errors import PlanError
from evenly.model.blocks import Block

Forward = Callable[..., Any]


class WrappedForwards:
    """Runs the forward of `blocks` through `changes`, innermost first, in place; `close` undoes it.

    asked: the plan's words for that. Raises `PlanError` where there are no blocks.
    """

    def __init__(self, blocks: Sequence[Block], changes: Sequence[Callable[[Forward], Forward]], *, asked: str) -> None:
        self._modules = [block.module for block in blocks]
        if not self._modules:
            raise PlanError(
                asked, "the model has no repeated blocks", f"leave out {asked}, or put its layers into a ModuleList"
            )
        for module in self._modules:
            for change in changes:
                module.forward = change(module.forward)

    def close(self) -> None:
        """Gives the blocks their own forward back; safe to call twice."""
        for module in self._modules:
            vars(module).pop("forward", None)
