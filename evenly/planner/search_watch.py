"""What a search says of itself while it goes on. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evenly.planner.request import PlanRequest

EVERY = 50  # plans, between two texts


@dataclass
class SearchWatch:
    """Tells the request's `watch` how far the search is: of how many plans a bound is known, and what came of them."""

    request: PlanRequest
    choices: int
    _done: int = 0

    def bounded(self, bound_s: float) -> float:
        """Counts a plan whose bound is there; returns this."""
        self._done += 1
        self._tell(lambda: f"{self.request.source.name}: {self._done:,} of {self.choices:,} plans")
        return bound_s

    def looked_at(self, judged: int) -> None:
        """Counts a plan that was looked at closer; `judged`: how many were predicted in full."""
        self._done += 1
        self._tell(lambda: f"{self.request.source.name}: {self.choices:,} plans, {judged:,} of them predicted in full")

    def _tell(self, text: Callable[[], str]) -> None:
        if self.request.watch is not None and self._done % EVERY == 0:
            self.request.watch(text())
