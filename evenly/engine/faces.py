"""Optimizers with two faces (schedule-free): `eval()` turns the weights for evaluations and saves, `train()` back."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

FACES = ("train", "eval")


def has_faces(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in FACES)


def turn(optimizer: Optimizer, face: str) -> None:
    """Call `train` or `eval` of an optimizer that has both."""
    if has_faces(optimizer):
        getattr(optimizer, face)()


class Faces:
    """Training and evaluation weights of an optimizer that has both; to turn it turns all that the plan has cut.

    filled: a context within which the optimizer has its parameters whole.
    """

    def __init__(self, optimizer: Any, filled: Callable[[], AbstractContextManager[None]]) -> None:
        self._optimizer, self._filled, self._shown = optimizer, filled, ""
        if has_faces(optimizer):
            self._turns = {name: getattr(optimizer, name) for name in FACES}
            vars(optimizer).update({name: partial(self._turn, name) for name in FACES})

    def _turn(self, face: str, *args: Any, **kwargs: Any) -> Any:
        with self._filled():
            found = self._turns[face](*args, **kwargs)
        self._shown = face
        return found

    @contextmanager
    def evaluating(self) -> Generator[None]:
        """Within, the weights are those of evaluations, unless the job's loop has turned them already; a collective."""
        turned = self._shown == "train"
        if turned:
            turn(self._optimizer, "eval")
        try:
            yield
        finally:
            if turned:
                turn(self._optimizer, "train")
