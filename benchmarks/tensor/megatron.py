"""The GPT of peers/workloads.py with the layers that Megatron-LM has for tensor parallelism, written by hand.

Column: rows of the weight are split, forward identity, backward all_reduce. Row: columns are split, forward all_reduce,
backward identity. Embedding and head are split by vocabulary; cross entropy adds three small all_reduces forward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
import workloads
from torch import nn

# How parameters are split, here and in dtensor.py: the last two parts of the name -> (dim, parts that are split each).
SPLIT = {
    "tok.weight": (0, 1), "qkv.weight": (0, 3), "proj.weight": (1, 1), "up.weight": (0, 1), "up.bias": (0, 1),
    "down.weight": (1, 1), "head.weight": (0, 1),
}  # fmt: skip


def how_split(name: str) -> tuple[int, int]:
    return SPLIT.get(".".join(name.split(".")[-2:]), (0, 0))


def own_piece(name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    dim, parts = how_split(name)
    if not parts:
        return whole.detach().clone()
    pieces = [part.chunk(dist.get_world_size(), dim)[dist.get_rank()] for part in whole.detach().chunk(parts, dim)]
    return torch.cat(pieces, dim).contiguous()


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.adjoint = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.adjoint(grad), None, None


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def summed(x: torch.Tensor) -> torch.Tensor:
    """In place: it is given products that nobody else needs."""
    dist.all_reduce(x)
    return x


class Column(nn.Linear):
    def forward(self, x):
        return F.linear(Pair.apply(x, same, summed), self.weight, self.bias)


class Row(nn.Linear):
    def forward(self, x):
        return Pair.apply(F.linear(x, self.weight), summed, same) + self.bias


def local_index(ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids this rank has, and where; 0 for the others."""
    index = ids - size * dist.get_rank()
    return (own := (index >= 0) & (index < size)), index * own


class VocabularyEmbedding(nn.Embedding):
    def forward(self, ids):
        own, index = local_index(ids, self.num_embeddings)
        return Pair.apply(F.embedding(index, self.weight) * own[..., None], summed, same)


class CrossEntropy(torch.autograd.Function):
    """Mean over tokens; logits (..., own part of the vocabulary), labels (...)."""

    @staticmethod
    def forward(ctx, logits, labels):
        highest = logits.amax(-1, keepdim=True)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        shifted = logits - highest
        own, index = local_index(labels[..., None], logits.shape[-1])
        target = summed(shifted.gather(-1, index) * own)
        weights = shifted.exp_()
        sums = summed(weights.sum(-1, keepdim=True))
        ctx.save_for_backward(weights.div_(sums), index, own)
        return (sums.log() - target).mean()

    @staticmethod
    def backward(ctx, grad):
        grads, index, own = ctx.saved_tensors
        grads.scatter_add_(-1, index, -own.to(grads.dtype))
        return grads.mul_(grad / index.numel()), None


class Block(nn.Module):
    def __init__(self, width, heads, ranks):
        super().__init__()
        self.heads, self.head_width = heads // ranks, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = Column(width, 3 * width // ranks, bias=False), Row(width // ranks, width)
        self.up, self.down = Column(width, 4 * width // ranks), Row(4 * width // ranks, width)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(workloads.GPT):
    """From the weights of the plain model; its logits are those of this rank's part of the vocabulary."""

    def __init__(self, whole, width, heads):
        nn.Module.__init__(self)
        ranks, (vocab, _) = dist.get_world_size(), whole.tok.weight.shape
        self.tok, self.pos = VocabularyEmbedding(vocab // ranks, width), nn.Embedding(len(whole.pos.weight), width)
        self.blocks = nn.ModuleList(Block(width, heads, ranks) for _ in whole.blocks)
        self.norm, self.head = nn.LayerNorm(width), Column(width, vocab // ranks, bias=False)
        self.load_state_dict({name: own_piece(name, tensor) for name, tensor in whole.state_dict().items()})


def clip(named: dict[str, torch.Tensor]) -> None:
    """Scales gradients, each rank its own part of the split ones, to a global norm of at most 1."""
    split = [p.grad for name, p in named.items() if how_split(name)[1]]
    whole = [p.grad for name, p in named.items() if not how_split(name)[1]]
    squares = summed(torch.stack(torch._foreach_norm(split)).square().sum())
    norm = (squares + torch.stack(torch._foreach_norm(whole)).square().sum()).sqrt()
    torch._foreach_mul_([*split, *whole], (1 / (norm + 1e-6)).clamp(max=1.0))


def contender(workload, contexts):
    dist.init_process_group("gloo")
    model = GPT(workload.model(), workload.width, workload.heads)
    named = dict(model.named_parameters())
    return named, lambda ids, labels: CrossEntropy.apply(model(ids), labels), lambda: clip(named)
