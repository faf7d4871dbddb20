"""The unmodified model on DTensors throughout, its parameters split as in megatron.py."""

from __future__ import annotations

import torch
import workloads
from megatron import clip, how_split, own_piece
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.parallel import loss_parallel
from torch.distributed.tensor.placement_types import _StridedShard

aten, rules_of_ops = torch.ops.aten, DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
WHOLE, SUM, PLAIN = Replicate(), Partial(), (Shard(0), Shard(1))
PACKED = (_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=3))


# What DTensor lacks. Attention on the CPU: whole, or split by heads.
@register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(query, key, value, dropout_p=0.0, is_causal=False, attn_mask=None, scale=None):
    return [([p, p], [p, p, p, None, None, None, None]) for p in (WHOLE, Shard(1))]


@register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(grad, q, k, v, out, logsumexp, dropout_p, is_causal, attn_mask=None, scale=None):
    return [([p] * 3, [p] * 6 + [None] * 4) for p in (WHOLE, Shard(1))]


# Its own rule gathers q, k and v packed in one tensor wherever they are summed over, twice per block. In torch 2.13 it
# comes before a registered one, and for packed tensors the cost of leaving all as it is counts as infinite.
rules_of_ops.pop(aten.mm.default, None)


@register_sharding(aten.mm.default)
def product(a, b):
    split = [[([SUM], [d1, d0]), ([d0], [d0, WHOLE]), ([d1], [WHOLE, d1])] for d0, d1 in (PLAIN, PACKED)]
    rules = [([WHOLE], [WHOLE, WHOLE]), ([SUM], [SUM, WHOLE]), ([SUM], [WHOLE, SUM]), *split[0], *split[1]]
    return [rule for rule in rules if rule[1] == [*a.placements, *b.placements]] or rules


def reduce_once(module, arguments, output):
    """A sum that is still to be taken over ranks is taken here, not by each that uses it."""
    if not output.placements[0].is_partial():
        return output
    return DTensor.from_local(output.redistribute(placements=[WHOLE]).to_local(), output.device_mesh, [WHOLE])


def contender(workload, contexts):
    """Norm and optimizer have each rank's own tensors, the same memory: on DTensors they are slow."""
    model, mesh = workload.model(), init_device_mesh("cpu", (2,))
    for name, p in list(model.named_parameters()):
        dim, parts = how_split(name)
        placement = [WHOLE, PLAIN[dim], None, PACKED[dim]][parts]
        whole = DTensor.from_local(own_piece(name, p), mesh, [placement], shape=p.shape, stride=p.stride())
        module = model.get_submodule(name.rpartition(".")[0])
        module.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(whole))
        module.register_forward_hook(reduce_once)
    contexts.enter_context(implicit_replication())
    contexts.enter_context(loss_parallel())
    split = dict(model.named_parameters())
    own = {name: p.detach().to_local().requires_grad_() for name, p in split.items()}

    def loss(ids, labels):
        return workloads.loss(model(ids), labels).redistribute(placements=[WHOLE]).to_local()

    def clip_own():
        for name, p in split.items():
            own[name].grad, p.grad = p.grad.redistribute(placements=p.placements).to_local(), None
        clip(own)

    return own, loss, clip_own
