"""The shape of a transformer: the sizes from which its parameters, operations and activations follow. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

Activation = Literal["gelu", "relu", "squared-relu", "swiglu", "geglu"]
Norm = Literal["layernorm", "layernorm-no-bias", "layernorm-no-weight", "rmsnorm"]
QueryKeyNorm = Literal["none", "head", "all"]
Positions = Literal["learned", "rotary", "alibi", "relative", "none"]

GATED = ("swiglu", "geglu")
NORM_VECTORS: dict[Norm, int] = {"layernorm": 2, "layernorm-no-bias": 1, "layernorm-no-weight": 0, "rmsnorm": 1}

# What may be 0; every other size is at least 1, and `extra` may be anything.
MAY_BE_0 = ("vocab", "outputs", "encoder_layers", "expert_ffn", "shared_experts", "dense_layers", "patch", "norms")
MOST_LAYERS = 10_000
MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A transformer of `layers` equal blocks; one of encoder and decoder has `encoder_layers` besides, and each block
    of its decoder attends to the encoder too, after one norm more.

    name:       as it is shown.
    hidden:     width of the residual stream. ffn: width within a block's MLP.
    heads, kv_heads: query heads, and key/value heads (grouped-query attention where fewer). head_dim: width of a head.
    vocab:      tokens of the embedding; 0 where none (images). outputs: what the head predicts (vocab, or classes).
    tied:       the head's weight is the embedding's.
    sequence:   tokens of a sample, as it was trained. positions: and what marks their places.
    window:     tokens that a token attends to, None for all before it (causal) or all (not causal).
    experts:    MLPs per block, of which each token goes through `experts_per_token`; 1 for a dense model.
                shared_experts: MLPs that every token goes through besides. dense_layers: first layers without experts.
    bias:       whether linear layers have one. qkv_bias: whether those of queries, keys and values do.
    patch:      values of one patch of an image, 0 for text.
    norms:      of a block, each over the width of the residual stream; one more ends each stack of blocks (a stack
                whose norms come after begins with it).
    qk_norm:    whether queries and keys have norms: of each head, or of all heads together.
    extra:      parameters that follow from nothing above, such as types of tokens, a class token, biases of the ends;
                negative where there are fewer.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    outputs: int
    sequence: int
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    positions: Positions = "learned"
    bias: bool = True
    qkv_bias: bool = True
    tied: bool = False
    causal: bool = True
    window: int | None = None
    encoder_layers: int = 0
    experts: int = 1
    experts_per_token: int = 1
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    patch: int = 0
    norms: int = 2
    qk_norm: QueryKeyNorm = "none"
    extra: int = 0

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def mlp_matrices(self) -> int:
        """Matrices of one MLP, each hidden x ffn."""
        return 3 if self.gated else 2

    @property
    def norm_vectors(self) -> int:
        """Parameters of a norm, in vectors of the width that it is over."""
        return NORM_VECTORS[self.norm]

    @property
    def expert_layers(self) -> int:
        """Blocks that have experts in the place of one MLP."""
        return self.layers - self.dense_layers if self.experts > 1 else 0

    def problems(self) -> Iterator[str]:
        """What is wrong with its sizes, in words; those of a shape that can exist are none."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and field.name != "extra":
                least, most = limits(field.name)
                if not least <= value <= most:
                    yield f"{field.name}={value} is not between {least} and {most}"
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            yield f"heads={self.heads} cannot be shared evenly by kv_heads={self.kv_heads}"
        if self.experts_per_token > self.experts:
            yield f"experts_per_token={self.experts_per_token} is more than experts={self.experts}"
        if self.experts > 1 and not self.expert_ffn:
            yield f"experts={self.experts} have no width: expert_ffn=0"
        if self.dense_layers > self.layers:
            yield f"dense_layers={self.dense_layers} is more than layers={self.layers}"
        if not self.vocab and not self.patch:
            yield "vocab=0 and patch=0: nothing goes in"


def limits(size: str) -> tuple[int, int]:
    """The least and the most that a size of a shape may be."""
    return (0 if size in MAY_BE_0 else 1), (MOST_LAYERS if size in ("layers", "encoder_layers") else MOST)


def parameters(shape: Shape) -> int:
    """All parameters; a tied head is counted once."""
    decoder = shape.expert_layers * block_parameters(shape, experts=True)
    decoder += (shape.layers - shape.expert_layers) * block_parameters(shape, experts=False)
    encoder = shape.encoder_layers * encoder_block_parameters(shape)
    stacks = 2 if shape.encoder_layers else 1
    return (
        embedding_parameters(shape)
        + encoder
        + decoder
        + stacks * norm_parameters(shape)
        + head_parameters(shape)
        + shape.extra
    )


def active_parameters(shape: Shape) -> int:
    """Parameters that one token goes through: all but those of the experts that it is not sent to."""
    idle = shape.experts - shape.experts_per_token
    return parameters(shape) - shape.expert_layers * idle * mlp_parameters(shape, shape.expert_ffn)


def embedding_parameters(shape: Shape) -> int:
    """Counts tokens or patches, and learned positions."""
    positions = shape.sequence if shape.positions == "learned" else 0
    return (shape.vocab + shape.patch + positions) * shape.hidden


def head_parameters(shape: Shape) -> int:
    """Counts the head's matrix; 0 where it is the embedding's."""
    return 0 if shape.tied else shape.hidden * shape.outputs


def block_parameters(shape: Shape, *, experts: bool) -> int:
    """Counts one block, of the decoder where there is an encoder; with `experts` or with one MLP."""
    cross = attention_parameters(shape) + norm_parameters(shape) if shape.encoder_layers else 0
    mlp = experts_parameters(shape) if experts else mlp_parameters(shape, shape.ffn)
    return attention_parameters(shape) + cross + mlp + shape.norms * norm_parameters(shape)


def encoder_block_parameters(shape: Shape) -> int:
    """Counts one block of the encoder, which attends only to itself."""
    mlp = mlp_parameters(shape, shape.ffn)
    return attention_parameters(shape) + mlp + shape.norms * norm_parameters(shape)


def norm_parameters(shape: Shape) -> int:
    """Counts one norm over the width of the residual stream."""
    return shape.norm_vectors * shape.hidden


def attention_parameters(shape: Shape) -> int:
    """Counts the projections to queries, keys and values and back, and norms of queries and keys."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * queries + 2 * keys)
    biases = shape.qkv_bias * (queries + 2 * keys) + shape.bias * shape.hidden
    normed = {"none": 0, "head": 2 * shape.head_dim, "all": queries + keys}[shape.qk_norm]
    return weights + biases + shape.norm_vectors * normed


def mlp_parameters(shape: Shape, width: int) -> int:
    """Counts one MLP whose inner width is `width`."""
    biases = (shape.mlp_matrices - 1) * width + shape.hidden
    return shape.mlp_matrices * shape.hidden * width + shape.bias * biases


def experts_parameters(shape: Shape) -> int:
    """Counts all experts of a block, shared ones among them, and the router."""
    router = shape.hidden * shape.experts
    return router + (shape.experts + shape.shared_experts) * mlp_parameters(shape, shape.expert_ffn)
