"""Cross entropy of a linear head without its logits: chunk by chunk of the tokens, or of a part of the vocabulary.

A *chunk* is some rows of the hidden states. Its logits are computed, give losses and, where gradients are wanted, the
gradients of the chunk, and are gone before the next. So a gradient is there before the backward, which scales it by
the gradient of the loss; products are as many as those of a head with all its logits. Where the scale has to be known
earlier (a loss per token, and float16, whose range needs the loss scale before anything is rounded) the backward
computes the logits of each chunk a second time.

How many rows a chunk has follows from shapes alone, not from the plan or the type: the same microbatch has the same
chunks, and so the same bits, wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from evenly.errors import RunError, UserError
from evenly.torch_private import without_subclasses

T = torch.Tensor
Reduction = Literal["mean", "sum", "none"]

# Rows of a chunk: as many as the head is wide, so that its logits take what the gradient of its weight takes. Fewer
# make slow products, and pass too often over that gradient; more make them no faster.
LEAST_ROWS, MOST_ROWS = 256, 1024
LEAST_LOGITS = 1 << 20  # fewer are not worth a chunk
# Rows of logits begin at multiples of so many numbers: a product that writes rows of 50,257 takes 1.6 times as long.
ALIGNED = 16


def linear_cross_entropy(
    hidden: T, weight: T, targets: T, *, bias: T | None = None, ignore_index: int = -100, reduction: Reduction = "mean"
) -> T:
    """`cross_entropy(linear(hidden, weight, bias), targets)`, in the memory of a chunk of the logits.

    hidden: [..., D]. weight: [V, D], a head's or an embedding's. targets: [...], classes from 0 to V - 1, or
    `ignore_index` for what does not count. bias: [V].

    Returns losses [...] with "none" (0 for what does not count), else their sum, or with "mean" the sum over the number
    that counts. Types are those of the two functions of torch: sums of 16-bit numbers are made in float32, under
    autocast products are in its type and the loss in float32.

    Raises `UserError` for shapes that do not fit together, and `RunError` in a backward that is to have gradients.
    """
    tensors = (hidden, weight, targets, bias)
    options: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index, "reduction": reduction}
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(linear_cross_entropy, tensors, hidden, weight, targets, **options)
    _check(hidden, weight, targets, bias, reduction)
    counted = targets != ignore_index
    return loss_in_chunks(hidden, weight, bias, targets.masked_fill(~counted, 0), counted, reduction)


def _check(hidden: T, weight: T, targets: T, bias: T | None, reduction: str) -> None:
    shapes = {"hidden": tuple(hidden.shape), "weight": tuple(weight.shape), "targets": tuple(targets.shape)}
    shapes |= {} if bias is None else {"bias": tuple(bias.shape)}
    fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:] and hidden.shape[:-1] == targets.shape
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise UserError(
            "evenly.nn.linear_cross_entropy",
            ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items()),
            "give hidden [..., D], weight [V, D], targets [...] and bias [V]",
        )
    if reduction not in ("mean", "sum", "none") or targets.dtype != torch.long:
        raise UserError(
            "evenly.nn.linear_cross_entropy",
            f"reduction={reduction!r} and targets of {targets.dtype}",
            "use 'mean', 'sum' or 'none', and targets of torch.int64, each the number of a class",
        )


@dataclass(frozen=True)
class SplitVocabulary:
    """What a rank knows that has some rows of the weight, and others the rest.

    elsewhere: [N], whether another rank has the row of a target. largest: rows of the rank that has most.
    log_sum:   of this rank's logarithms of sums [R] that of all ranks' together.
    total:     the sum over ranks of losses [N].
    """

    elsewhere: T
    largest: int
    log_sum: Callable[[T], T]
    total: Callable[[T], T]


def loss_in_chunks(
    hidden: T,
    weight: T,
    bias: T | None,
    indices: T,
    counted: T,
    reduction: Reduction,
    vocabulary: SplitVocabulary | None = None,
) -> T:
    """The loss of `linear_cross_entropy`, of plain tensors.

    indices: [...], rows of `weight`, any where not `counted`. vocabulary: where `weight` is this rank's part.
    """
    mixed = _autocasts(hidden)
    if not mixed and hidden.dtype != weight.dtype:
        raise UserError(
            "evenly.nn.linear_cross_entropy",
            f"hidden states are {hidden.dtype}, and the weight is {weight.dtype}",
            "give them one type, or a precision to the job (bfloat16)",
        )
    products = torch.get_autocast_dtype(hidden.device.type) if mixed and hidden.dtype != torch.float64 else hidden.dtype
    each = reduction == "none"
    ahead = torch.is_grad_enabled() and not each and products != torch.float16
    head = _Head(indices.flatten(), counted.flatten(), products, each, ahead, vocabulary)
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss: T = _LinearCrossEntropy.apply(rows, weight, bias, head)  # pyright: ignore[reportUnknownMemberType]
    loss = loss.view(indices.shape) if each else loss
    loss = loss / counted.sum() if reduction == "mean" else loss
    return loss if mixed else loss.to(hidden.dtype)


def _autocasts(tensor: T) -> bool:
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def chunks_of(rows: int, classes: int, width: int) -> Iterator[slice]:
    """The rows of each chunk, all about as many."""
    most = max(min(max(width, LEAST_ROWS), MOST_ROWS), LEAST_LOGITS // max(classes, 1))
    size = -(-rows // max(-(-rows // most), 1))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1)))


@dataclass(frozen=True)
class _Head:
    """What is asked of the logits.

    products: the type in which products are made. each: whether every row has a loss of its own, or all have one.
    ahead:    whether gradients are computed in the forward. The rest is as in `loss_in_chunks`, with rows [N].
    """

    indices: T
    counted: T
    products: torch.dtype
    each: bool
    ahead: bool
    vocabulary: SplitVocabulary | None

    @property
    def wide(self) -> torch.dtype:
        """The type of sums."""
        return torch.float32 if self.products.itemsize < 4 else self.products

    def cast(self, hidden: T, weight: T, bias: T | None) -> tuple[T, T, T | None]:
        return hidden.to(self.products), weight.to(self.products), None if bias is None else bias.to(self.products)

    def chunks(self, weight: T) -> list[slice]:
        classes = len(weight) if self.vocabulary is None else self.vocabulary.largest  # all ranks have the same chunks
        return [*chunks_of(len(self.indices), classes, weight.shape[1])]

    def room(self, weight: T) -> T:
        """For the logits [R, V] of any chunk; what is behind them in a row is no class."""
        rows = max((one.stop - one.start for one in self.chunks(weight)), default=0)
        room = weight.new_empty(rows, -(-len(weight) // ALIGNED) * ALIGNED, dtype=self.products)
        room[:, len(weight) :] = -torch.inf
        return room

    def probabilities(self, rows: slice, given: tuple[T, T, T | None], room: T, log_sums: T, *, known: bool) -> T:
        """[R, V and more]; the logits are left in `room`.

        given: hidden, weight and bias. log_sums: logarithms of the sums of all classes [N], to be found, or `known`.
        """
        hidden, weight, bias = given
        logits = room[: rows.stop - rows.start]
        torch.mm(hidden[rows], weight.T, out=logits[:, : len(weight)])
        if bias is not None:
            logits[:, : len(weight)] += bias
        found = torch.softmax(logits, -1, dtype=self.wide)
        # The sum is that of a row over its largest number, whose probability is the inverse of that.
        own = logits.amax(1).to(self.wide) - found.amax(1).log()
        if self.vocabulary is None:
            log_sums[rows] = own
            return found
        if not known:
            log_sums[rows] = self.vocabulary.log_sum(own)
        return found.mul_((own - log_sums[rows]).exp().unsqueeze(1))

    def losses(self, log_sums: T, scores: T) -> T:
        """[N], of split classes their sum over ranks. scores: the logits of targets that are here."""
        if self.vocabulary is None:
            losses = log_sums - scores
        else:
            losses = self.vocabulary.total((log_sums - scores).masked_fill_(self.vocabulary.elsewhere, 0))
        return losses.masked_fill(~self.counted, 0)

    def slopes(self, rows: slice, probabilities: T) -> T:
        """Of each row's loss by its logits, in the memory of the probabilities."""
        places = self.indices[rows].unsqueeze(1)
        here: Any = 1
        if self.vocabulary is not None:
            here = (~self.vocabulary.elsewhere[rows]).unsqueeze(1).to(self.wide)
        return probabilities.scatter_(1, places, probabilities.gather(1, places) - here)


class _GradientSums:
    """Gradients of hidden [N, D], weight [V, D] and bias [V], as far as they are wanted, added up chunk by chunk."""

    def __init__(self, hidden: T, weight: T, bias: T | None, wanted: tuple[bool, ...], wide: torch.dtype) -> None:
        self._hidden, self._weight = hidden, weight
        self.of_hidden = torch.empty_like(hidden) if wanted[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.of_bias = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None

    def add(self, rows: slice, slopes: T, counted: T | None = None) -> None:
        """slopes: [R, V and more], in the type of sums. counted: [R], which rows count; None where others' are 0."""
        given, classes = self._hidden[rows], len(self._weight)
        if counted is not None:
            given = given * counted.unsqueeze(1)
        if self.of_bias is not None:
            summed = slopes.sum(0) if counted is None else counted.to(slopes.dtype) @ slopes
            self.of_bias += summed[:classes]
        slopes = slopes.to(self._weight.dtype)[:, :classes]
        if self.of_hidden is not None:
            torch.mul(slopes @ self._weight, 1 if counted is None else counted.unsqueeze(1), out=self.of_hidden[rows])
        if self.of_weight is not None and self.of_weight.dtype == given.dtype:
            torch.addmm(self.of_weight, slopes.T, given, out=self.of_weight)
        elif self.of_weight is not None:
            self.of_weight += slopes.T @ given

    @property
    def all(self) -> tuple[T | None, T | None, T | None]:
        return self.of_hidden, self.of_weight, self.of_bias


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of all rows [], or of each [N], in the type of sums."""

    @staticmethod
    def forward(ctx: Any, hidden: T, weight: T, bias: T | None, head: _Head) -> T:  # type: ignore[override]
        wanted = tuple(head.ahead and one for one in ctx.needs_input_grad[:3])
        with _types_as_given(hidden):
            given = head.cast(hidden, weight, bias)
            log_sums, scores = (hidden.new_empty(len(hidden), dtype=head.wide) for _ in range(2))
            sums, room = _GradientSums(*given, wanted, head.wide) if any(wanted) else None, head.room(weight)
            for rows in head.chunks(weight):
                found = head.probabilities(rows, given, room, log_sums, known=False)
                scores[rows] = room[:, : len(weight)].gather(1, head.indices[rows].unsqueeze(1)).squeeze(1)
                if sums is not None:
                    sums.add(rows, head.slopes(rows, found), head.counted[rows])
                del found  # before the next are made
        losses = head.losses(log_sums, scores)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.types = [None if one is None else one.dtype for one in (hidden, weight, bias)]
        ctx.head, ctx.log_sums, ctx.ahead = head, log_sums, None if sums is None else sums.all
        return losses if head.each else losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_recorded_backward(
            "evenly.nn.linear_cross_entropy", "use torch.nn.functional.cross_entropy of all logits"
        )
        with without_subclasses():
            # Scaled in place, and so for the first backward only; a second one computes them again.
            found, ctx.ahead = ctx.ahead, None
            if found is None:
                found = _gradients_again(ctx, gradients[0])
            else:
                found = [None if one is None else one.mul_(gradients[0]) for one in found]
            typed = (None if one is None else one.to(kind) for one, kind in zip(found, ctx.types, strict=True))
            return *typed, None


def _gradients_again(ctx: Any, gradient: T) -> tuple[T | None, ...]:
    """Of a Function's inputs, from logits that are computed once more. gradient: of the loss, [] or [N]."""
    head: _Head = ctx.head
    hidden, weight, bias = ctx.saved_tensors
    with _types_as_given(hidden):
        cast = head.cast(hidden, weight, bias)
        sums = _GradientSums(*cast, ctx.needs_input_grad[:3], head.wide)
        factors, room = (gradient * head.counted).unsqueeze(1), head.room(weight)
        for rows in head.chunks(weight):
            found = head.probabilities(rows, cast, room, ctx.log_sums, known=True)
            sums.add(rows, head.slopes(rows, found).mul_(factors[rows]))
            del found
    return sums.all


def refuse_recorded_backward(function: str, do: str) -> None:
    """Raises `RunError` in a backward that is to have gradients itself, which would be missing without a word."""
    if torch.is_grad_enabled():
        raise RunError(
            f"a gradient of the gradient of {function}",
            "its backward is recorded (create_graph=True), and uses what was computed in the forward",
            do,
        )


def _types_as_given(tensor: T) -> AbstractContextManager[Any]:
    """Without autocast, which would keep a copy of the weight for all its uses, made where none is differentiated."""
    return torch.autocast(tensor.device.type, enabled=False) if _autocasts(tensor) else nullcontext()
