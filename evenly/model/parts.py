"""What one device computes and keeps of a model, part by part: the form in which models are handed to the prediction.

A *part* is a block, what comes before the first (embeddings) or after the last (norm, head, loss). Its costs are those
of one microbatch on one rank: the tensor axis, the microbatch and the precision are in them already. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["matmul", "convolution", "attention", "memory", "host"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """One operation, done `times` times.

    kind:        "matmul" rows x inner x columns; "convolution"; "attention" one fused kernel; "memory" anything
                 that moves bytes; "host" a call from Python, for which only a device waits that is its own host.
    flops:       multiplications and additions, of one of them. moved_bytes: read and written.
    rows, inner, columns: of a matmul; 0 where unknown.
    recomputed:  whether a part that recomputes selectively does it again in the backward pass.
    of_weights:  whether it computes gradients of parameters alone, so that the stage before need not wait for it.
    dtype:       what it multiplies, where that is not the precision of the run.
    as_run:      whether it is one of the operations that run, each with its own bytes; else what they come to if fused.
    looked_at:   share of the pairs of tokens that attention looks at: a causal one leaves out about half.
    """

    kind: Kind
    flops: float = 0.0
    moved_bytes: float = 0.0
    rows: int = 0
    inner: int = 0
    columns: int = 0
    times: int = 1
    recomputed: bool = False
    of_weights: bool = False
    dtype: str = ""
    as_run: bool = False
    looked_at: float = 1.0


class Collective(NamedTuple):
    """One collective, by the name that links are measured by, and bytes of the tensor while it is whole."""

    operation: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """One part of a model on one rank, for one microbatch.

    parameters:     elements that the rank holds of it, before zero shards them.
    forward, backward: what it computes; the backward pass without any recomputation.
    input_bytes:    of the activation that it takes from the part before it, and that its gradient has.
    saved_bytes:     what its forward pass leaves for the backward pass, under each recomputation, its input included.
                    Empty where something else counts memory.
    backward_peak_bytes: the most that a backward pass holds beyond saved activations and the gradients of parameters.
    collectives:    of the tensor axis in the forward pass; collectives_backward: in the backward pass, None for the
                    same. collectives_again: those that a part which recomputes selectively repeats there.
    logits:         elements of what the part predicts.
    """

    name: str
    parameters: int
    forward: Sequence[OpCost]
    backward: Sequence[OpCost]
    input_bytes: int
    saved_bytes: dict[Recompute, int] = field(default_factory=dict[Recompute, int])
    backward_peak_bytes: int = 0
    collectives: Sequence[Collective] = ()
    collectives_backward: Sequence[Collective] | None = None
    collectives_again: Sequence[Collective] = ()
    logits: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model on one rank of the tensor axis, for one microbatch: blocks in their order, and what is around them.

    parameters shared between `before` and `after` (a tied head) are counted in `before`; `tied_parameters` says how
    many elements a last stage that is not the first holds of them again.
    """

    before: BlockCost
    blocks: Sequence[BlockCost]
    after: BlockCost
    tied_parameters: int = 0
