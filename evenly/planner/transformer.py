"""What a transformer's blocks compute and save, from its shape alone: arithmetic, no torch, no module.

Letters as in the literature: s tokens of a sample, b samples of a microbatch, h hidden, a heads, t ranks of the tensor
axis. Operations are those of Korthikanti et al. 2022 (arXiv 2205.05198), appendix A; parameters those of
`evenly.planner.shape`. In a model of encoder and decoder both read as many tokens as the shape has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from evenly.model.parts import BlockCost, Collective, ModelCosts, OpCost, Recompute
from evenly.planner.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How evenly computes blocks, as far as it shows in time and memory; what others do otherwise they override.

    norm_passes, residual_passes, activation_passes: how often, reading or writing, the elements of a tensor pass
                  through memory in a norm, where a block's output joins the residual stream, and in the MLP's
                  activation; what is not fused passes more often.
    loss_bytes:   read and written per logit by loss and its gradient.
    """

    norm_passes: float = 2.0
    residual_passes: float = 3.0
    activation_passes: float = 1.0
    loss_bytes: float = 24.0

    def of_block(self, number: int) -> Kernels:
        return self

    def attend(self, shape: Shape, split: Split, *, causal: bool) -> Sequence[OpCost]:
        """The operations of one attention; a fused one never writes the scores of all pairs of tokens."""
        attended = _attended(shape, split, causal=causal)
        flops, moved = attention_flops(shape, split) * attended, attention_elements(shape, split) * split.element_bytes
        return [OpCost(kind="attention", flops=flops, moved_bytes=moved, dtype=split.outer_dtype)]

    def attend_backward(self, one: OpCost) -> OpCost:
        """The scores are computed again: 5 products for 2 (Dao 2023, arXiv 2307.08691, section 3)."""
        return replace(one, flops=2.5 * one.flops, moved_bytes=2 * one.moved_bytes)

    @property
    def join_passes(self) -> float:
        """Passes where a block's output joins the residual stream."""
        return self.residual_passes

    def recomputed(
        self, products: Sequence[OpCost], attention: Sequence[OpCost], passes: Sequence[OpCost]
    ) -> Sequence[OpCost]:
        """What selective recomputation computes again in the backward pass: all but matrix products and attention."""
        return passes

    def sums_again(self, sums: Sequence[Collective]) -> Sequence[Collective]:
        """Sums over the tensor axis that selective recomputation repeats; a block's last one is not needed again."""
        return sums[:-1]

    def saved_bytes(self, shape: Shape, kind: Kind, split: Split) -> dict[Recompute, int]:
        """What a block saves of a microbatch under each recomputation (Korthikanti et al. 2022, section 4)."""
        # A fused attention saves a float32 number per token and head.
        softmax = (1 + kind.cross) * split.tokens * shape.heads / split.tensor * 4
        everything = stream_saved(shape, kind, split) + inner_saved(shape, kind, split) + softmax
        least = split.own_tokens * shape.hidden * split.element_bytes
        selective = least + _products_saved(shape, kind, split) + softmax
        return {"none": int(everything), "selective": int(selective), "full": int(least)}


@dataclass(frozen=True, kw_only=True)
class Split:
    """What one rank has of a microbatch: `samples` of `sequence` tokens, over the ranks of the tensor axis.

    split_sequence: whether what the tensor axis does not split over heads it splits over tokens.
    dtype:          of the matrix products of blocks.
    element_bytes:  of an activation.
    """

    samples: int
    sequence: int
    tensor: int = 1
    split_sequence: bool = False
    dtype: str = "bfloat16"
    element_bytes: int = 2

    @property
    def tokens(self) -> int:
        """The tokens of a microbatch on this rank, where only the tensor axis shares them."""
        return self.samples * self.sequence

    @property
    def own_tokens(self) -> float:
        """The tokens of what lies between the parts that the tensor axis splits over heads and columns."""
        return self.tokens / self.tensor if self.split_sequence else self.tokens

    @property
    def outer_dtype(self) -> str:
        return self.dtype


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
    width, keys = widths(shape, tensor)
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
    found: dict[tuple[Kind, Kernels], BlockCost] = {}
    blocks: list[BlockCost] = []
    for number, kind in enumerate(block_kinds(shape)):
        key = kind, kernels.of_block(number)
        if key not in found:
            found[key] = _block(shape, kind, split, key[1])
        blocks.append(found[key])
    return ModelCosts(
        before=_embedding(shape, split),
        blocks=blocks,
        after=_head(shape, split, kernels),
        tied_parameters=shape.vocab * shape.hidden // split.tensor if shape.tied else 0,
    )


def _block(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> BlockCost:
    products = [*_products(shape, kind, split)]
    attention = [*kernels.attend(shape, split, causal=kind.causal)]
    if kind.cross:
        attention += kernels.attend(shape, split, causal=False)
    passes = [_passes(shape, kind, split, kernels)]
    added = Collective("all_reduce", split.tokens * shape.hidden * split.element_bytes)
    sums = [added] * (2 + kind.cross) if split.tensor > 1 else []
    again = {id(one) for one in kernels.recomputed(products, attention, passes)}
    return BlockCost(
        name="block",
        parameters=block_elements(shape, kind, split.tensor),
        forward=[replace(one, recomputed=id(one) in again) for one in (*products, *attention, *passes)],
        backward=[*_backward(products), *map(kernels.attend_backward, attention), *map(twice, passes)],
        input_bytes=int(split.own_tokens * shape.hidden * split.element_bytes),
        saved_bytes=kernels.saved_bytes(shape, kind, split),
        backward_peak_bytes=int(_widest(shape, kind, split) * split.element_bytes),
        collectives=sums,
        collectives_again=kernels.sums_again(sums),
    )


def widths(shape: Shape, tensor: int) -> tuple[int, int]:
    """The widths of queries, and of keys and values together, on all ranks of the tensor axis."""
    return shape.heads * shape.head_dim, 2 * max(shape.kv_heads, tensor) * shape.head_dim


def mlp_width(shape: Shape, kind: Kind) -> int:
    """Inner width of all MLPs that a token goes through."""
    return (shape.experts_per_token + shape.shared_experts) * shape.expert_ffn if kind.experts else shape.ffn


def _products(shape: Shape, kind: Kind, split: Split) -> Iterator[OpCost]:
    """Queries, keys and values; output; the same for the encoder's tokens; up (and gate); down."""
    t, (width, keys) = split.tensor, widths(shape, split.tensor)
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
    for one in products:
        yield replace(one, rows=one.rows, inner=one.columns, columns=one.inner)
        yield replace(one, rows=one.inner, inner=one.rows, columns=one.columns, of_weights=True)


def attention_flops(shape: Shape, split: Split) -> float:
    """Per token that is attended to."""
    return 4.0 * split.tokens * (shape.heads / split.tensor) * shape.head_dim


def attention_elements(shape: Shape, split: Split) -> float:
    """Queries, keys, values and the result."""
    heads = shape.heads / split.tensor
    return split.tokens * shape.head_dim * (2 * heads + 2 * max(1.0, shape.kv_heads / split.tensor))


def _attended(shape: Shape, split: Split, *, causal: bool) -> float:
    """Tokens that a token attends to, in the mean; at the beginning of a sample causal windows are not full."""
    span = min(split.sequence, shape.window or split.sequence)
    return span * (1 - span / (2 * split.sequence)) if causal else span


def twice(one: OpCost) -> OpCost:
    """The backward pass of what is computed: the same for each of two gradients."""
    return replace(one, flops=2 * one.flops, moved_bytes=2 * one.moved_bytes)


def _passes(shape: Shape, kind: Kind, split: Split, kernels: Kernels) -> OpCost:
    """What moves bytes and multiplies next to nothing: norms, residual stream, rotation of queries, activation."""
    t, joins = split.tensor, 2 + kind.cross
    between = (shape.norms + kind.cross) * kernels.norm_passes + joins * kernels.join_passes
    elements = split.own_tokens * shape.hidden * between
    if shape.positions == "rotary":
        elements += 2 * split.tokens * shape.head_dim * (shape.heads + shape.kv_heads) / t
    elements += kernels.activation_passes * split.tokens * mlp_width(shape, kind) * shape.mlp_matrices / t
    if kind.experts:  # tokens are sorted to their experts and back
        elements += 4 * split.tokens * shape.experts_per_token * shape.hidden
    return OpCost(kind="memory", moved_bytes=elements * split.element_bytes)


def _widest(shape: Shape, kind: Kind, split: Split) -> float:
    """Elements that the backward pass of a block holds besides what is saved: gradients about the MLP's activation."""
    inner = split.tokens * mlp_width(shape, kind) * shape.mlp_matrices / split.tensor
    return split.own_tokens * shape.hidden * 2 + inner


def stream_saved(shape: Shape, kind: Kind, split: Split) -> float:
    """Of the residual stream: inputs of norms, and of the products after them, where tokens are split gathered again.

    A block of one norm hands the same tensor to attention and MLP.
    """
    own, entered = split.own_tokens * shape.hidden, (1 if shape.norms == 1 else 2) + kind.cross
    return own * (shape.norms + kind.cross) * split.element_bytes + own * entered * split.element_bytes


def inner_saved(shape: Shape, kind: Kind, split: Split) -> float:
    """What the tensor axis splits: queries, keys, values, attention's output; about the MLP's activation."""
    width, keys = widths(shape, split.tensor)
    # in front of and behind the activation; a gate has its product besides
    ffn = mlp_width(shape, kind) * (3 if shape.gated else 2)
    return split.tokens * ((1 + kind.cross) * (2 * width + keys) + ffn) / split.tensor * split.element_bytes


def _products_saved(shape: Shape, kind: Kind, split: Split) -> float:
    """What products and attention return: sums over the tensor axis before they are added up, whole on every rank."""
    width, keys = widths(shape, split.tensor)
    active = shape.experts_per_token + shape.shared_experts if kind.experts else 1
    parted = (1 + kind.cross) * (2 * width + keys) + mlp_width(shape, kind) * (shape.mlp_matrices - 1)
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
        saved_bytes=dict.fromkeys(("none", "selective", "full"), 0),
        collectives=_summed_once(shape, split),
    )


def _head(shape: Shape, split: Split, kernels: Kernels) -> BlockCost:
    """Final norms, head and loss; what has no vocabulary is predicted once per sample, not per token."""
    rows = split.tokens if shape.vocab else split.samples
    columns = -(-shape.outputs // split.tensor)
    logits = product(rows, shape.hidden, columns, split, dtype=split.outer_dtype)
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
            twice(norm),
        ],
        input_bytes=stream,
        saved_bytes=dict.fromkeys(("none", "selective", "full"), 2 * stream),
        collectives=_summed_once(shape, split),
        logits=scores,
    )


def _summed_once(shape: Shape, split: Split) -> Sequence[Collective]:
    """Embedding and head are summed over the tensor axis in one of the two passes: half in each."""
    half = Collective("all_reduce", split.tokens * shape.hidden * split.element_bytes // 2)
    return [half] if split.tensor > 1 else []
