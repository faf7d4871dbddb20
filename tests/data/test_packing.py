"""Packed streams: every token in its order, in samples of one length, and on from any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import evenly
from evenly.errors import UserError

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11, 12], [13, 14]]


class Documents(IterableDataset):
    """With a state."""

    def __init__(self) -> None:
        self.done = self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.done, self.first = self.first, 0
        while self.done < len(DOCUMENTS):
            self.done += 1
            yield DOCUMENTS[self.done - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["done"]


def test_tokens_are_put_end_to_end() -> None:
    packed = evenly.data.packed(lambda: iter(map(torch.tensor, DOCUMENTS[2:])), 4)
    assert [one.tolist() for one in packed] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert [one.tolist() for one in packed] == [[4, 5, 6, 7], [8, 9, 10, 11]]  # from the start
    assert next(iter(packed)).dtype is torch.int64


def test_a_token_stands_behind_every_document() -> None:
    samples = [one.tolist() for one in evenly.data.packed(DOCUMENTS, 5, eos=0)]
    assert samples == [[1, 2, 3, 0, 0], [4, 0, 5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.mark.parametrize("done", range(1, 9))
def test_it_goes_on_after_any_sample(done: int) -> None:
    whole = [one.tolist() for one in evenly.data.packed(Documents(), 2, eos=0)]
    first, second = evenly.data.packed(Documents(), 2, eos=0), evenly.data.packed(Documents(), 2, eos=0)
    iterator = iter(first)
    begun = [next(iterator).tolist() for _ in range(done)]
    second.load_state_dict(first.state_dict())
    assert begun + [one.tolist() for one in second] == whole
    assert [one.tolist() for one in second] == whole  # the next epoch


def test_a_stream_without_a_state_has_none_packed() -> None:
    assert not hasattr(evenly.data.packed(DOCUMENTS, 2), "state_dict")


@pytest.mark.parametrize("document", [{"ids": [1]}, [0.5], "text", [[1, 2]], 3])
def test_what_is_no_document_is_named(document: Any) -> None:
    with pytest.raises(UserError, match="1-D tensors or lists"):
        list(evenly.data.packed([document], 2))


def test_a_length_has_a_token() -> None:
    with pytest.raises(UserError, match="0 tokens"):
        evenly.data.packed([], 0)
