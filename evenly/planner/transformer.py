"""What a transformer's blocks compute and keep, from its shape alone: arithmetic, no torch, no module.

Letters as in the literature: s tokens of a sample, b samples of a microbatch, h hidden, a heads, t ranks of the tensor
axis. Operations are those of Korthikanti et al. 2022 (arXiv 2205.05198), appendix A; parameters those of
`evenly.planner.shape`. In a model of encoder and decoder both read as many tokens as the shape has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from evenly.model.parts import BlockCost, ModelCosts, OpCost, Recompute
from evenly.planner.shape import Shape

# What a block that recomputes selectively computes again in the backward pass:
#   attention  scores, softmax and what they weigh, as in Megatron-LM (Korthikanti et al. 2022, section 4)
#   cheap      all but matrix products and attention, as evenly does
#   rest       all but queries, keys and values, as MaxText's save_qkv_proj
#   blocks     every second block all of it, the others nothing, as IBM's fms-fsdp
Selective = Literal["attention", "cheap", "rest", "blocks"]
WIDE = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How a library computes blocks, as far as it shows in time and memory.

    attention:    "fused" never writes the scores of all pairs of tokens; "naive" does, and keeps them.
    selective:    what selective recomputation computes again.
    norm_passes, residual_passes, activation_passes: how often, reading or writing, the elements of a tensor pass
                  through memory in a norm, where a block's output joins the residual stream, and in the MLP's
                  activation; what is not fused passes more often.
    dropout:      whether a mask is drawn where a block's output joins (and in naive attention).
    loss_bytes:   read and written per logit by loss and its gradient.
    kept_hidden, kept_ffn: elements per token, in widths of the residual stream and of the MLP, that a block keeps
                  besides those that fused kernels need.
    gathers_kept: whether what the tensor axis gathers from split tokens is kept whole.
    """

    attention: Literal["fused", "naive"] = "fused"
    selective: Selective = "attention"
    norm_passes: float = 2.0
    residual_passes: float = 3.0
    activation_passes: float = 1.0
    dropout: bool = False
    loss_bytes: float = 24.0
    kept_hidden: float = 0.0
    kept_ffn: float = 0.0
    gathers_kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Split:
    """What one rank has of a microbatch: `samples` of `sequence` tokens, over tensor and context ranks.

    split_sequence: whether what the tensor axis does not split over heads it splits over tokens.
    context:        ranks that share the tokens of a sample.
    dtype:          of the matrix products of blocks ("float8" and narrower have 16-bit activations).
    element_bytes:  of an activation.
    """

    samples: int
    sequence: int
    tensor: int = 1
    split_sequence: bool = False
    context: int = 1
    dtype: str = "bfloat16"
    element_bytes: int = 2

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch on this rank, where only the tensor axis shares them."""
        return self.samples * self.sequence // self.context

    @property
    def own_tokens(self) -> float:
        """The tokens of what lies between the parts that the tensor axis splits over heads and columns."""
        return self.tokens / self.tensor if self.split_sequence else self.tokens

    @property
    def wide(self) -> str:
        """What is multiplied outside of the blocks' products with weights: 8 bits and fewer are for those alone."""
        return self.dtype if self.dtype in WIDE else "bfloat16"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of block: whether tokens attend to earlier ones only, and to the encoder, and whether it has experts."""

    causal: bool
    cross: bool = False
    experts: bool = False


def block_kinds(shape: Shape) -> list[Kind]:
    """The kind of every block in order: the encoder's, then the decoder's, of which the first may have no experts."""
    cross = bool(shape.encoder_layers)
    dense = Kind(causal=shape.causal, cross=cross)
    return [
        *[Kind(causal=False)] * shape.encoder_layers,
        *[dense] * (shape.layers - shape.expert_layers),
        *[replace(dense, experts=True)] * shape.expert_layers,
    ]


def block_elements(shape: Shape, kind: Kind, tensor: int) -> int:
    """Elements of a block that a rank of the tensor axis holds; of fewer key heads than ranks, every rank has one.

    Heads and inner widths are split; norms, what is added to the residual stream and the router are whole everywhere.
    """
    attentions = 1 + kind.cross
    width, keys = _widths(shape, tensor)
    split = attentions * (shape.hidden * (2 * width + keys) + shape.qkv_bias * (width + keys))
    split += attentions * shape.norm_vectors * (width + keys // 2) * (shape.qk_norm == "all")
    whole = attentions * (
        shape.bias * shape.hidden + shape.norm_vectors * 2 * shape.head_dim * (shape.qk_norm == "head")
    )
    mlps, ffn = (shape.experts + shape.shared_experts, shape.expert_ffn) if kind.experts else (1, shape.ffn)
    split += mlps * ffn * (shape.mlp_matrices * shape.hidden + shape.bias * (shape.mlp_matrices - 1))
    whole += mlps * shape.bias * shape.hidden + (shape.hidden * shape.experts if kind.experts else 0)
    return -(-split // tensor) + whole + (shape.norms + kind.cross) * shape.norm_vectors * shape.hidden


def transformer_parts(shape: Shape, split: Split, kernels: Kernels) -> ModelCosts:
    """The parts of a transformer, as one rank has them; equal blocks are one object."""
    found: dict[tuple[Kind, bool], BlockCost] = {}
    blocks: list[BlockCost] = []
    for number, kind in enumerate(block_kinds(shape)):
        key = kind, kernels.selective == "blocks" and number % 2 == 1
        if key not in found:
            found[key] = _block(shape, kind, split, kernels, whole=key[1])
        blocks.append(found[key])
    return ModelCosts(
        before=_embedding(shape, split),
        blocks=blocks,
        after=_head(shape, split, kernels),
        tied_parameters=shape.vocab * shape.hidden // split.tensor if shape.tied else 0,
    )


def _block(shape: Shape, kind: Kind, split: Split, kernels: Kernels, *, whole: bool) -> BlockCost:
    """whole: whether selective recomputation computes all of this block again."""
    products = [*_products(shape, kind, split)]
    attention = [*_attentions(shape, kind, split, kernels)]
    passes = [_passes(shape, kind, split, kernels)]
    reduced = [split.tokens * shape.hidden * split.element_bytes] * (2 + kind.cross) if split.tensor > 1 else []
    kept = kept_bytes(shape, kind, split, kernels)
    if kernels.selective == "blocks":
        kept["selective"] = kept["full" if whole else "none"]
    again = _again(products, attention, passes, kernels.selective, whole=whole)
    return BlockCost(
        name="block",
        parameters=block_elements(shape, kind, split.tensor),
        forward=[
            replace(one, recomputed=any(one is other for other in again)) for one in (*products, *attention, *passes)
        ],
        backward=[*_backward(products), *(_backward_of_attention(one) for one in attention), *map(_twice, passes)],
        input_bytes=int(split.own_tokens * shape.hidden * split.element_bytes),
        kept_bytes=kept,
        backward_peak_bytes=int(_widest(shape, kind, split) * split.element_bytes),
        tensor_bytes=reduced,
        tensor_bytes_again=_reduced_again(reduced, kernels.selective, whole=whole),
    )


def _again(
    products: Sequence[OpCost],
    attention: Sequence[OpCost],
    passes: Sequence[OpCost],
    selective: Selective,
    *,
    whole: bool,
) -> Sequence[OpCost]:
    """What selective recomputation computes again; of `rest`, products but the first, of queries, keys and values."""
    if selective == "attention":
        return attention
    if selective == "cheap":
        return [work for work in (*attention, *passes) if work.kind == "memory"]
    if selective == "rest":
        return [*products[1:], *attention, *passes]
    return [*products, *attention, *passes] if whole else []


def _reduced_again(reduced: Sequence[int], selective: Selective, *, whole: bool) -> Sequence[int]:
    """Sums over the tensor axis that selective recomputation repeats; nothing asks for the last one of a block."""
    if selective == "attention" or (selective == "blocks" and not whole):
        return []
    return reduced[:-1]


def _widths(shape: Shape, tensor: int) -> tuple[int, int]:
    """The widths of queries, and of keys and values together, on all ranks of the tensor axis."""
    return shape.heads * shape.head_dim, 2 * max(shape.kv_heads, tensor) * shape.head_dim


def _mlp_width(shape: Shape, kind: Kind) -> int:
    """Inner width of all MLPs that a token goes through."""
    return (shape.experts_per_token + shape.shared_experts) * shape.expert_ffn if kind.experts else shape.ffn


def _products(shape: Shape, kind: Kind, split: Split) -> Iterator[OpCost]:
    """Queries, keys and values; output; the same for the encoder's tokens; up (and gate); down."""
    t, (width, keys) = split.tensor, _widths(shape, split.tensor)
    yield product(split.tokens, shape.hidden, (width + keys) // t, split)
    yield product(split.tokens, width // t, shape.hidden, split)
    if kind.cross:
        yield product(split.tokens, shape.hidden, width // t, split)
        yield product(split.tokens, shape.hidden, keys // t, split)
        yield product(split.tokens, width // t, shape.hidden, split)
    if not kind.experts:
        yield from _mlp(split.tokens, shape.ffn, shape, split)
        return
    yield product(split.tokens, shape.hidden, shape.experts, split)
    rows = max(1, split.tokens * shape.experts_per_token // shape.experts)
    yield from _mlp(rows, shape.expert_ffn, shape, split, times=shape.experts)
    if shape.shared_experts:
        yield from _mlp(split.tokens, shape.expert_ffn * shape.shared_experts, shape, split)


def _mlp(rows: int, ffn: int, shape: Shape, split: Split, *, times: int = 1) -> Iterator[OpCost]:
    up = shape.mlp_matrices - 1
    yield product(rows, shape.hidden, up * ffn // split.tensor, split, times=times)
    yield product(rows, ffn // split.tensor, shape.hidden, split, times=times)


def product(rows: int, inner: int, columns: int, split: Split, *, times: int = 1, dtype: str = "") -> OpCost:
    """A matrix product of a microbatch with a weight, (rows, inner) x (inner, columns)."""
    elements = rows * inner + inner * columns + rows * columns
    return OpCost(
        kind="matmul",
        flops=2.0 * rows * inner * columns,
        moved_bytes=elements * split.element_bytes,
        rows=rows,
        inner=inner,
        columns=columns,
        times=times,
        dtype=dtype or split.dtype,
    )


def _backward(products: Iterable[OpCost]) -> Iterable[OpCost]:
    """For every product those that give the gradients of its input and of its weight."""
    for one in products:
        yield replace(one, rows=one.rows, inner=one.columns, columns=one.inner)
        yield replace(one, rows=one.inner, inner=one.rows, columns=one.columns, of_weights=True)


def _attentions(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> Iterator[OpCost]:
    yield from _attention(shape, split, kernels, causal=kind.causal)
    if kind.cross:
        yield from _attention(shape, split, kernels, causal=False)


def _attention(shape: Shape, split: Split, kernels: Kernels, *, causal: bool) -> Iterator[OpCost]:
    heads = shape.heads / split.tensor
    flops = 4.0 * split.tokens * heads * shape.head_dim  # per token that is attended to
    qkv = split.tokens * shape.head_dim * (2 * heads + 2 * max(1.0, shape.kv_heads / split.tensor))
    if kernels.attention == "fused":
        seen = _seen(shape, split, causal=causal)
        yield OpCost(kind="attention", flops=flops * seen, moved_bytes=qkv * split.element_bytes, dtype=split.wide)
        return
    # Scores are computed of all pairs, then scaled, masked and normalised in one pass, and dropped out.
    pairs = _pairs(shape, split)
    yield OpCost(
        kind="matmul",
        flops=flops * split.sequence,
        moved_bytes=(qkv + 2 * pairs) * split.element_bytes,
        rows=split.sequence,
        inner=shape.head_dim,
        columns=split.sequence,
        dtype=split.wide,
    )
    dropped = 2.5 if kernels.dropout else 0.0
    yield OpCost(kind="memory", moved_bytes=pairs * (2 + dropped) * split.element_bytes)


def _seen(shape: Shape, split: Split, *, causal: bool) -> float:
    """Tokens that a token attends to, in the mean; at the beginning of a sample causal windows are not full."""
    span = min(split.sequence, shape.window or split.sequence)
    return span * (1 - span / (2 * split.sequence)) if causal else span


def _pairs(shape: Shape, split: Split) -> float:
    """Scores of a rank where all pairs of tokens have one, whether or not they attend to each other."""
    return split.tokens * split.sequence * shape.heads / split.tensor


def _backward_of_attention(one: OpCost) -> OpCost:
    """Fused, the scores are computed again: 5 products for 2 (Dao 2023, arXiv 2307.08691, section 3); else twice."""
    if one.kind == "attention":
        return replace(one, flops=2.5 * one.flops, moved_bytes=2 * one.moved_bytes)
    return _twice(one)


def _twice(one: OpCost) -> OpCost:
    return replace(one, flops=2 * one.flops, moved_bytes=2 * one.moved_bytes)


def _passes(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> OpCost:
    """What moves bytes and multiplies next to nothing: norms, residual stream, rotation of queries, activation."""
    t, joins = split.tensor, 2 + kind.cross
    dropped = 1.25 if kernels.dropout else 0.0
    between = (shape.norms + kind.cross) * kernels.norm_passes + joins * (kernels.residual_passes + dropped)
    elements = split.own_tokens * shape.hidden * between
    if shape.positions == "rotary":
        elements += 2 * split.tokens * shape.head_dim * (shape.heads + shape.kv_heads) / t
    elements += kernels.activation_passes * split.tokens * _mlp_width(shape, kind) * shape.mlp_matrices / t
    if kind.experts:  # tokens are sorted to their experts and back
        elements += 4 * split.tokens * shape.experts_per_token * shape.hidden
    return OpCost(kind="memory", moved_bytes=elements * split.element_bytes)


def _widest(shape: Shape, kind: Kind, split: Split) -> float:
    """Elements that the backward pass of a block holds besides what was kept: gradients about the MLP's activation."""
    inner = split.tokens * _mlp_width(shape, kind) * shape.mlp_matrices / split.tensor
    return split.own_tokens * shape.hidden * 2 + inner


def kept_bytes(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> dict[Recompute, int]:
    """What a block keeps of a microbatch under each recomputation (Korthikanti et al. 2022, section 4, generalised)."""
    scores, softmax = _attention_kept(shape, kind, split, kernels)
    most = _stream_kept(shape, kind, split, kernels) + _inner_kept(shape, kind, split, kernels)
    least = split.own_tokens * shape.hidden * split.element_bytes
    by_kernels: dict[Selective, float] = {
        "attention": most,
        "cheap": least + _products_kept(shape, kind, split) + (scores if kernels.attention == "naive" else softmax),
        "rest": least + split.tokens * sum(_widths(shape, split.tensor)) / split.tensor * split.element_bytes,
        "blocks": most + softmax,
    }
    return {"none": int(most + softmax), "selective": int(by_kernels[kernels.selective]), "full": int(least)}


def _attention_kept(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> tuple[float, float]:
    """Bytes of the scores, and of what their softmax keeps: fused, a float32 number per token and head."""
    e, attentions = split.element_bytes, 1 + kind.cross
    if kernels.attention == "fused":
        return 0.0, attentions * split.tokens * shape.heads / split.tensor * 4
    pairs = attentions * _pairs(shape, split)
    return pairs * e, pairs * (e + (e + 1 if kernels.dropout else 0))


def _stream_kept(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> float:
    """Of the residual stream: inputs of norms, and of the products after them, with masks of dropout.

    A block of one norm hands the same tensor to attention and MLP. What goes into products a rank gathers again in the
    backward pass where its tokens are split, or keeps.
    """
    e, mask = split.element_bytes, 1 if kernels.dropout else 0
    hidden, own = split.tokens * shape.hidden, split.own_tokens * shape.hidden
    joins, entered = 2 + kind.cross, (1 if shape.norms == 1 else 2) + kind.cross
    into_products = (hidden if kernels.gathers_kept else own) * entered * e
    return own * ((shape.norms + kind.cross) * e + joins * mask) + into_products


def _inner_kept(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> float:
    """What the tensor axis splits: queries, keys, values, attention's output; about the MLP's activation."""
    width, keys = _widths(shape, split.tensor)
    # in front of and behind the activation; a gate has its product besides
    ffn = _mlp_width(shape, kind) * ((3 if shape.gated else 2) + kernels.kept_ffn)
    elements = (1 + kind.cross) * (2 * width + keys) + ffn + shape.hidden * kernels.kept_hidden
    return split.tokens * elements / split.tensor * split.element_bytes


def _products_kept(shape: Shape, kind: Kind, split: Split) -> float:
    """What products and attention return: sums over the tensor axis before they are added up, whole on every rank."""
    width, keys = _widths(shape, split.tensor)
    active = shape.experts_per_token + shape.shared_experts if kind.experts else 1
    parted = (1 + kind.cross) * (2 * width + keys) + _mlp_width(shape, kind) * (shape.mlp_matrices - 1)
    whole = (1 + kind.cross + active) * shape.hidden + (shape.experts if kind.experts else 0)
    return split.tokens * (parted / split.tensor + whole) * split.element_bytes


def _embedding(shape: Shape, split: Split) -> BlockCost:
    elements = shape.vocab * shape.hidden // split.tensor + shape.patch * shape.hidden + shape.extra
    if shape.positions == "learned":
        elements += shape.sequence * shape.hidden
    stream = split.own_tokens * shape.hidden * split.element_bytes
    look = OpCost(kind="memory", moved_bytes=3 * stream)
    return BlockCost(
        name="before the blocks",
        parameters=elements,
        forward=[look],
        backward=[replace(look, of_weights=True)],
        input_bytes=0,
        kept_bytes={"none": 0, "selective": 0, "full": 0},
        tensor_bytes=_reduced_once(shape, split),
    )


def _head(shape: Shape, split: Split, kernels: Kernels) -> BlockCost:
    """Final norms, head and loss; what has no vocabulary is predicted once per sample, not per token."""
    rows = split.tokens if shape.vocab else split.samples
    columns = -(-shape.outputs // split.tensor)
    logits = product(rows, shape.hidden, columns, split, dtype=split.wide)
    scores = rows * columns
    stream = int(split.own_tokens * shape.hidden * split.element_bytes)
    stacks = 2 if shape.encoder_layers else 1
    norm = OpCost(kind="memory", moved_bytes=kernels.norm_passes * stream)
    return BlockCost(
        name="after the blocks",
        parameters=(0 if shape.tied else columns * shape.hidden) + stacks * shape.norm_vectors * shape.hidden,
        forward=[norm, logits, OpCost(kind="memory", moved_bytes=scores * kernels.loss_bytes / 2)],
        backward=[
            OpCost(kind="memory", moved_bytes=scores * kernels.loss_bytes / 2),
            *_backward([logits]),
            _twice(norm),
        ],
        input_bytes=stream,
        kept_bytes=dict.fromkeys(("none", "selective", "full"), 2 * stream),
        tensor_bytes=_reduced_once(shape, split),
        logits=scores,
    )


def _reduced_once(shape: Shape, split: Split) -> Sequence[int]:
    """Embedding and head are summed over the tensor axis in one of the two passes: half in each."""
    return [split.tokens * shape.hidden * split.element_bytes // 2] if split.tensor > 1 else []
