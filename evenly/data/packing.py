"""Token streams: documents of any length, put end to end and cut into samples of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from evenly.errors import UserError

Document = torch.Tensor | Sequence[int]


class PackedStream(IterableDataset[torch.Tensor]):
    """The tokens of a stream of documents in samples of `length` tokens, int64; what is left at the end of an epoch,
    less than a sample, is left out.

    eos: token that is put behind every document. Has a state where the stream has one: that of the stream, and the
    tokens that were read and not yet delivered.
    """

    def __init__(self, stream: Any, length: int, *, eos: int | None = None) -> None:
        self._stream, self._length, self._eos = stream, length, eos
        self._rest = torch.empty(0, dtype=torch.int64)
        self._goes_on = False  # with `_rest`, which a state has left
        if hasattr(stream, "load_state_dict"):
            self.state_dict, self.load_state_dict = self._state_dict, self._load_state_dict

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._goes_on:
            self._rest = self._rest[:0]
        self._goes_on = False
        yield from self._samples()
        end = [] if self._eos is None else [torch.tensor([self._eos])]
        for document in self._stream if hasattr(self._stream, "__iter__") else self._stream():
            self._rest = torch.cat([self._rest, _tokens_of(document), *end])
            yield from self._samples()

    def _samples(self) -> Iterator[torch.Tensor]:
        """The whole samples of what was read; what is delivered is no longer in the rest."""
        while len(self._rest) >= self._length:
            sample, self._rest = self._rest[: self._length].clone(), self._rest[self._length :]
            yield sample

    def _state_dict(self) -> dict[str, Any]:
        return {"rest": self._rest.tolist(), "stream": self._stream.state_dict()}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self._rest, self._goes_on = torch.tensor(state["rest"], dtype=torch.int64), True
        self._stream.load_state_dict(state["stream"])


def packed(
    stream: Iterable[Document] | Callable[[], Iterable[Document]], length: int, *, eos: int | None = None
) -> PackedStream:
    """The tokens of `stream`, whose samples are 1-D tensors or lists of tokens, in samples of exactly `length` tokens.

    eos: token that is put behind every document. Raises `UserError` for a length below 1.
    """
    if length < 1:
        raise UserError(f"packed samples of {length} tokens", "a sample has at least one", "give a larger length")
    return PackedStream(stream, length, eos=eos)


def _tokens_of(document: Any) -> torch.Tensor:
    """The tokens of a document, int64; raises `UserError` for what is none."""
    try:
        tokens = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.empty(())
    if tokens.dim() != 1 or (len(tokens) and (tokens.is_floating_point() or tokens.is_complex())):
        raise UserError(
            "packing a stream of tokens",
            f"a document is {document!r:.80}",
            "let the stream yield 1-D tensors or lists of integers (of a dict, the field that has them)",
        )
    return tokens.to(torch.int64)
