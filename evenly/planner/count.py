"""How many parameters a shape has, exactly, and in which of its pieces. No torch."""

from __future__ import annotations

from evenly.planner.shape import Shape


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
