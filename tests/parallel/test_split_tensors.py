"""Functions of torch on tensors that are split over ranks, held against the same on whole tensors."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kept_ranks import KeptRanks
from torch import nn
from torch.nn import functional as F

import evenly.parallel.tensor.ops  # noqa: F401  # registers them
from evenly.comm.connect import connect, disconnect
from evenly.errors import RunError
from evenly.launcher.environment import find_here
from evenly.nn import losses
from evenly.parallel.tensor import axis as tensors
from evenly.parallel.tensor.axis import Axis, SplitTensor, is_split
from evenly.parallel.tensor.layout import Layout
from evenly.parallel.tensor.model import SplitModel
from evenly.torch_private import with_torch_function, without_subclasses

T = torch.Tensor


@dataclass(frozen=True)
class Case:
    """`call` on tensors of `shapes`, of which those in `cut` (place -> dim, outer, units) are split.

    gathered: how many functions are expected to need the whole.
    """

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    cut: dict[int, tuple[int, int, int]]
    gathered: int = 0


def heads(q: T, k: T, v: T, **how: Any) -> T:
    return F.scaled_dot_product_attention(q, k, v, **how)


MASK = torch.ones(5, 5, dtype=torch.bool).tril()
QKV = ((2, 6, 5, 3), (2, 6, 5, 3), (2, 6, 5, 4))
GROUPED = ((2, 12, 5, 3), (2, 6, 5, 3), (2, 6, 5, 4))
HEADS = {0: (1, 1, 6), 1: (1, 1, 6), 2: (1, 1, 6)}
X, PACKED = (5, 2, 12), ((36, 12), (36,), (12, 12))
PACKED_HEADS = {1: (0, 3, 6), 2: (0, 3, 6), 3: (1, 1, 6)}
PADDING = torch.tensor([[False, False, True, False, True], [False, True, True, True, True]])
TARGET = torch.tensor([[0, 5, -100], [11, 3, 7]])


def head(hidden: T, weight: T, **how: Any) -> T:
    """Of chunks of as many rows as the hidden states are wide."""
    with patch.multiple(losses, LEAST_LOGITS=1, LEAST_ROWS=1):
        return losses.linear_cross_entropy(hidden, weight, TARGET, **how)


def by_hand(q: T, k: T, v: T) -> T:
    scores = (q @ k.transpose(-2, -1) / 3**0.5).masked_fill(~MASK, float("-inf"))
    return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


def packed_of(q: T, k: T, v: T) -> T:
    return q * k + v


def packed(x: T) -> T:
    return packed_of(*x.chunk(3, dim=-1))


def changed(x: T, y: T) -> T:
    z = x * 2
    z += y
    z.mul_(3).masked_fill_(y > 0, 0.5)
    return F.relu(z, inplace=True)


def by_heads(q: T, k: T, v: T, weight: Any, bias: T | None, out: T, *, of: int = 6, **how: Any) -> T:
    """The output of nn.MultiheadAttention's function, and its weights where they are asked for."""
    projected = weight if isinstance(weight, tuple) else (None,) * 3
    parts = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), projected, strict=True))
    packed = None if isinstance(weight, tuple) else weight
    extra = (how.pop("bias_k", None), how.pop("bias_v", None), False, how.pop("dropout", 0.0))
    how = {"need_weights": False, "use_separate_proj_weight": packed is None, **parts, **how}
    found, seen = F.multi_head_attention_forward(q, k, v, q.shape[-1], of, packed, bias, *extra, out, None, **how)
    return found if seen is None else torch.cat([found.flatten(), seen.flatten()])


def by_heads_of_itself(x: T, weight: T, bias: T, out: T, **how: Any) -> T:
    return by_heads(x, x, x, weight, bias, out, **how)


def changed_meanwhile(x: T, w: T) -> T:
    h = x * 2
    first = F.linear(h.clone(), w).sum() + (h @ w.detach().T).sum()
    h += 1
    return first + F.linear(h, w)


def hooked(x: T, hook: Callable[[T], T | None]) -> T:
    x.register_hook(hook)
    return x * 3


def without_gradient(x: T) -> T:
    with torch.no_grad():
        return (x * 2).pow(2).sum()


def written_without_gradient(x: T) -> T:
    with torch.no_grad():
        y = x * 2
        y[y > 1] = 3
        y[2] = y[0] * 0.5
        y.cumsum_(0)
        mask = y > 0
        mask ^= x > 1
        found = y + mask
    return found * x


CASES = {
    "written-without-gradient": Case(written_without_gradient, ((6, 6),), {0: (0, 1, 6)}, gathered=10),
    "elements": Case(lambda x, y: F.gelu(x * 2 + y) / (1 + y.sigmoid()), ((2, 3, 6), (2, 3, 6)), {0: (2, 1, 6)}),
    "broadcast": Case(lambda x, y: x * y + y, ((2, 3, 6), (3, 1)), {0: (2, 1, 6)}),
    "broadcast-split": Case(lambda x, y: x + y, ((2, 3, 6), (6,)), {1: (0, 1, 6)}),
    "no-dims": Case(lambda x, y: torch.where(x > 0, x, y), ((2, 6), ()), {0: (1, 1, 6)}),
    "other-dims": Case(lambda x, y: x + y, ((6, 6), (6, 6)), {0: (1, 1, 6), 1: (0, 1, 6)}),
    "in-place": Case(changed, ((4, 6), (4, 6)), {0: (1, 1, 6), 1: (1, 1, 6)}),
    "uneven": Case(lambda x, y: (x * y).tanh(), ((2, 7), (2, 7)), {0: (1, 1, 7)}),
    "column": Case(F.linear, ((2, 3, 5), (6, 5), (6,)), {1: (0, 1, 6), 2: (0, 1, 6)}),
    "column-whole-bias": Case(F.linear, ((2, 3, 5), (6, 5), (6,)), {1: (0, 1, 6)}),
    "row": Case(F.linear, ((2, 3, 6), (5, 6), (5,)), {0: (2, 1, 6), 1: (1, 1, 6)}),
    "row-in-place": Case(
        lambda x, w, r: F.linear(x, w).add_(r).mul_(2), ((3, 6), (5, 6), (3, 5)), {0: (1, 1, 6), 1: (1, 1, 6)}
    ),
    "entering-in-place": Case(
        lambda x, w: F.linear(x * 2, w) + F.linear((x * 2).mul_(3), w), ((3, 5), (6, 5)), {1: (0, 1, 6)}
    ),
    "changed-meanwhile": Case(changed_meanwhile, ((3, 5), (6, 5)), {1: (0, 1, 6)}),
    "row-of-whole": Case(F.linear, ((2, 3, 6), (5, 6), (5,)), {1: (1, 1, 6)}),
    "row-uneven": Case(F.linear, ((3, 7), (5, 7)), {0: (1, 1, 7), 1: (1, 1, 7)}),
    "rows-of-a-batch": Case(F.linear, ((6, 4), (5, 4), (5,)), {0: (0, 1, 6)}),
    "whole-weight": Case(F.linear, ((3, 6), (5, 6)), {0: (1, 1, 6)}, gathered=1),
    "addmm": Case(torch.addmm, ((6,), (3, 5), (5, 6)), {0: (0, 1, 6), 2: (1, 1, 6)}),
    "addmm-contracted": Case(torch.addmm, ((5,), (3, 6), (6, 5)), {1: (1, 1, 6), 2: (0, 1, 6)}),
    "tied-by-use": Case(lambda h, w: h @ w.T, ((2, 3, 5), (6, 5)), {1: (0, 1, 6)}),
    "weight-first": Case(lambda w, h: w @ h, ((6, 5), (2, 5, 3)), {0: (0, 1, 6)}),
    "bmm": Case(torch.bmm, ((6, 2, 3), (6, 3, 4)), {0: (0, 1, 6), 1: (0, 1, 6)}),
    "batch-of-whole": Case(torch.matmul, ((6, 2, 3), (6, 3, 4)), {0: (0, 1, 6)}),
    "attention": Case(heads, QKV, HEADS),
    "attention-mask": Case(lambda *t: heads(*t, attn_mask=MASK), QKV, HEADS),
    "attention-bias": Case(lambda q, k, v, b: heads(q, k, v, attn_mask=b), (*QKV, (1, 6, 5, 5)), HEADS),
    "attention-causal": Case(lambda *t: heads(*t, is_causal=True, scale=0.3), QKV, HEADS),
    "attention-grouped": Case(lambda *t: heads(*t, enable_gqa=True), GROUPED, {**HEADS, 0: (1, 1, 12)}),
    "attention-shared": Case(
        lambda *t: heads(*t, enable_gqa=True), ((2, 6, 5, 3), (2, 1, 5, 3), (2, 1, 5, 4)), {0: (1, 1, 6)}
    ),
    "attention-of-width": Case(heads, ((2, 4, 5, 3), (2, 4, 5, 3), (2, 4, 5, 6)), {2: (3, 1, 6)}),
    "attention-of-width-dropout": Case(
        lambda *t: heads(*t, dropout_p=0.3), ((2, 4, 5, 3), (2, 4, 5, 3), (2, 4, 5, 6)), {2: (3, 1, 6)}
    ),
    "attention-by-hand": Case(by_hand, QKV, HEADS),
    "attention-of-whole-keys": Case(heads, QKV, {0: (1, 1, 6)}),
    "multi-head": Case(by_heads_of_itself, (X, *PACKED), PACKED_HEADS),
    "multi-head-unbatched": Case(by_heads_of_itself, (X[::2], *PACKED), PACKED_HEADS),
    "multi-head-masks": Case(
        lambda *t: by_heads_of_itself(*t, attn_mask=~MASK, key_padding_mask=PADDING), (X, *PACKED), PACKED_HEADS
    ),
    "multi-head-mask-by-head": Case(
        lambda x, w, b, o, m: by_heads_of_itself(x, w, b, o, attn_mask=m), (X, *PACKED, (12, 5, 5)), PACKED_HEADS
    ),
    "multi-head-causal": Case(
        lambda *t: by_heads_of_itself(*t, attn_mask=~MASK, is_causal=True), (X, *PACKED), PACKED_HEADS
    ),
    "multi-head-dropout": Case(
        lambda *t: by_heads_of_itself(*t, key_padding_mask=PADDING, dropout=0.3), (X, *PACKED), PACKED_HEADS
    ),
    "multi-head-weights": Case(
        lambda *t: by_heads_of_itself(*t, need_weights=True, attn_mask=~MASK, dropout=0.3), (X, *PACKED), PACKED_HEADS
    ),
    "multi-head-weights-by-head": Case(
        lambda *t: by_heads_of_itself(*t, need_weights=True, average_attn_weights=False),
        (X, *PACKED),
        PACKED_HEADS,
        gathered=1,  # by the test's own `cat`
    ),
    "multi-head-uneven": Case(
        lambda x, w, b, o: by_heads_of_itself(x, w, b, o, of=5),
        ((5, 2, 10), (30, 10), (30,), (10, 10)),
        {1: (0, 3, 5), 2: (0, 3, 5), 3: (1, 1, 5)},
    ),
    "multi-head-of-memory": Case(
        lambda x, m, w, b, o: by_heads(x, m, m, w, b, o, key_padding_mask=PADDING, dropout=0.3),
        ((3, 2, 12), X, *PACKED),
        {2: (0, 3, 6), 3: (0, 3, 6), 4: (1, 1, 6)},
    ),
    "multi-head-of-three": Case(
        lambda q, k, v, w, o: by_heads(q, k, v, w, None, o),
        ((3, 2, 12), X, X, PACKED[0], PACKED[2]),
        {3: (0, 3, 6), 4: (1, 1, 6)},
    ),
    "multi-head-of-widths": Case(
        lambda q, k, v, a, b, c, d, o: by_heads(q, k, v, (a, b, c), d, o, need_weights=True),
        ((3, 2, 12), (5, 2, 4), (5, 2, 7), (12, 12), (12, 4), (12, 7), *PACKED[1:]),
        {3: (0, 1, 6), 4: (0, 1, 6), 5: (0, 1, 6), 6: (0, 3, 6), 7: (1, 1, 6)},
    ),
    "multi-head-of-split": Case(by_heads_of_itself, (X, *PACKED), {0: (2, 1, 6), **PACKED_HEADS}),
    "multi-head-with-biases": Case(
        lambda x, w, b, o, k, v: by_heads_of_itself(x, w, b, o, bias_k=k, bias_v=v),
        (X, *PACKED, (1, 1, 12), (1, 1, 12)),
        PACKED_HEADS,
        gathered=1,
    ),
    "packed": Case(packed, ((2, 3, 18),), {0: (2, 3, 6)}),
    "packed-view": Case(lambda x: x.view(2, 3, 3, 6, 2).unbind(2)[1].transpose(1, 2), ((2, 3, 36),), {0: (2, 3, 6)}),
    "packed-sizes": Case(lambda x: x.split([12, 6], -1)[0].unflatten(-1, (2, 6)), ((2, 18),), {0: (1, 3, 6)}),
    "unpacked": Case(lambda x: packed_of(*x), ((3, 2, 6),), {0: (2, 1, 6)}),
    "unpacked-along-the-split": Case(lambda x: packed_of(*x), ((3, 2),), {0: (0, 1, 3)}, gathered=3),
    "crossing": Case(lambda x: x.chunk(4, -1)[1], ((2, 12),), {0: (1, 1, 6)}, gathered=1),
    "shapes": Case(
        lambda x: (
            x.view(x.shape[0], -1, 6, 4).permute(0, 2, 1, 3).contiguous().reshape(x.size(0), 6, -1).unsqueeze(1)[:, 0]
        ),
        ((2, 5, 24),),
        {0: (2, 1, 6)},
    ),
    "groups": Case(
        lambda x: x[:, :, None].expand(2, 6, 3, 5, 4).reshape(2, 18, 5, 4) + x.repeat_interleave(3, dim=1),
        ((2, 6, 5, 4),),
        {0: (1, 1, 6)},
    ),
    "indices": Case(lambda x: x[..., 1:3, :][:, None, -1], ((2, 5, 6),), {0: (2, 1, 6)}),
    "rotate": Case(
        lambda x, c: x * c + torch.cat([-x[..., 2:], x[..., :2]], dim=-1), ((2, 6, 5, 4), (5, 4)), {0: (1, 1, 6)}
    ),
    "stack": Case(lambda x, y: torch.stack([x, y], 1).sum(1), ((6, 2), (6, 2)), {0: (0, 1, 6)}),
    "sum": Case(lambda x: x.sum(-1) + x.mean((0, 2)) + x.sum(), ((3, 3, 6),), {0: (2, 1, 6)}),
    "sum-over-others": Case(lambda x: x.pow(2).mean(1, keepdim=True) * x, ((3, 3, 6),), {0: (2, 1, 6)}),
    "norm": Case(lambda x, w, b: F.layer_norm(x, (4,), w, b), ((6, 4), (4,), (4,)), {0: (0, 1, 6)}),
    "norm-of-split": Case(lambda x, w: F.rms_norm(x, (6,), w), ((2, 6), (6,)), {0: (1, 1, 6)}, gathered=1),
    "softmax-of-split": Case(lambda x: x.softmax(-1), ((2, 6),), {0: (1, 1, 6)}, gathered=1),
    "embedding": Case(lambda w: F.embedding(TARGET.clamp(0), w), ((12, 5),), {0: (0, 1, 12)}),
    "embedding-uneven": Case(lambda w: F.embedding(TARGET.clamp(0), w), ((13, 5),), {0: (0, 1, 13)}),
    "embedding-padding": Case(lambda w: F.embedding(TARGET.clamp(0), w, 11), ((12, 5),), {0: (0, 1, 12)}),
    "embedding-width": Case(lambda w: F.embedding(TARGET.clamp(0), w), ((12, 6),), {0: (1, 1, 6)}),
    "loss": Case(lambda x: F.cross_entropy(x, TARGET.flatten(), reduction="sum"), ((6, 12),), {0: (1, 1, 12)}),
    "loss-uneven": Case(lambda x: F.cross_entropy(x, TARGET.flatten()), ((6, 13),), {0: (1, 1, 13)}),
    "loss-none": Case(lambda x: F.cross_entropy(x, TARGET, reduction="none"), ((2, 12, 3),), {0: (1, 1, 12)}),
    "loss-smoothed": Case(
        lambda x: F.cross_entropy(x, TARGET.flatten(), label_smoothing=0.1), ((6, 12),), {0: (1, 1, 12)}, gathered=1
    ),
    "head": Case(lambda x, w: head(x, w, reduction="sum"), ((2, 3, 2), (12, 2)), {1: (0, 1, 12)}),
    "head-uneven": Case(lambda x, w: head(x, w), ((2, 3, 5), (13, 5)), {1: (0, 1, 13)}),
    "head-bias": Case(lambda x, w, b: head(x, w, bias=b), ((2, 3, 5), (13, 5), (13,)), {1: (0, 1, 13), 2: (0, 1, 13)}),
    "head-whole-bias": Case(lambda x, w, b: head(x, w, bias=b), ((2, 3, 5), (13, 5), (13,)), {1: (0, 1, 13)}),
    "head-none": Case(lambda x, w: head(x, w, reduction="none"), ((2, 3, 4), (13, 4)), {1: (0, 1, 13)}),
    "head-of-split": Case(lambda x, w: head(x, w), ((2, 3, 5), (12, 5)), {0: (1, 1, 3), 1: (0, 1, 12)}),
    "head-of-other-dims": Case(lambda x, w: head(x, w), ((2, 3, 6), (12, 6)), {1: (1, 1, 6)}, gathered=1),
    "head-whole": Case(lambda x, w: head(x, w), ((2, 3, 6), (12, 6)), {0: (2, 1, 6)}, gathered=1),
    "dropout": Case(lambda x: F.dropout(x, 0.3), ((4, 3, 6),), {0: (2, 1, 6)}),
    "dropout-turned": Case(lambda x: F.dropout(x.transpose(0, 2), 0.3), ((4, 3, 6),), {0: (2, 1, 6)}),
    "dropout-attention": Case(lambda *t: heads(*t, dropout_p=0.4, is_causal=True), QKV, HEADS),
    "dropout-channels": Case(lambda x: F.dropout2d(x, 0.5), ((4, 6, 2, 2),), {0: (1, 1, 6)}, gathered=1),
    "hook": Case(lambda x: hooked(x * 2, lambda g: g / g.norm()), ((2, 6),), {0: (1, 1, 6)}),
    "hook-unchanged": Case(lambda x: hooked(x * 2, lambda g: None), ((2, 6),), {0: (1, 1, 6)}),
    "no-gradient": Case(lambda x, y: y * without_gradient(x), ((2, 6), (2, 6)), {0: (1, 1, 6)}),
    "indices-of": Case(lambda x: x[torch.where(x > 0)[0]] * 1.0, ((3, 6),), {0: (1, 1, 6)}, gathered=1),
    "along-the-split": Case(lambda x: torch.cumsum(x, -1), ((2, 6),), {0: (1, 1, 6)}, gathered=1),
    "sorted-along-the-split": Case(lambda x: torch.sort(x, axis=1)[0], ((3, 6),), {0: (1, 1, 6)}, gathered=1),
    "unknown": Case(lambda x: torch.kron(x, torch.ones(2)), ((2, 6),), {0: (1, 1, 6)}, gathered=1),
    "unknown-of-several": Case(
        lambda x, y: torch.kron(x, y), ((2, 6), (6, 2)), {0: (1, 1, 6), 1: (0, 1, 6)}, gathered=1
    ),
}


@contextmanager
def axis_of_all() -> Iterator[Axis]:
    world = connect(find_here())
    try:
        yield Axis(world.group("world"))
    finally:
        disconnect(world)


def tensors_of(case: Case) -> list[T]:
    torch.manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in case.shapes]


def held_against_the_whole(names: list[str]) -> dict[str, str]:
    """What differs, by case; on every rank."""
    wrong: dict[str, str] = {}
    with axis_of_all() as axis:
        for name in names:
            if problem := what_differs(CASES[name], axis):
                wrong[name] = problem
    return wrong


def what_differs(case: Case, axis: Axis) -> str:
    whole, given = tensors_of(case), tensors_of(case)
    used: list[T] = []
    for place, tensor in enumerate(given):
        if place in case.cut:
            dim, outer, units = case.cut[place]
            inner = tensor.shape[dim] // (outer * units)
            used.append(axis.part(tensor, Layout.of(dim, outer, units, inner, axis.group.size)))
        else:
            used.append(tensor)
    torch.manual_seed(2)
    expected = case.call(*whole)
    torch.manual_seed(2)
    gathered: list[Any] = []
    compute_full = tensors.compute_full
    tensors.compute_full = lambda func, *rest: (gathered.append(func), compute_full(func, *rest))[1]
    try:
        found = case.call(*used)
    finally:
        tensors.compute_full = compute_full
    if found.shape != expected.shape:
        return f"shape {found.shape}, not {expected.shape}"
    weight = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    pairs = [(axis.gather_full(found) if is_split(found) else found, expected)]
    pairs += [(mine.grad, theirs.grad) for mine, theirs in zip(given, whole, strict=True)]
    for place, (mine, theirs) in enumerate(pairs):
        if theirs is not None and (mine is None or (mine - theirs).abs().max() > 1e-12):
            return f"{'the gradient of argument ' + str(place - 1) if place else 'the result'} differs"
    if len(gathered) != case.gathered:
        return f"the whole was needed for {[f.__name__ for f in gathered]}"
    return ""


@pytest.mark.parametrize("size", [2, 3])
def test_functions_of_parts_are_those_of_the_whole(ranks: KeptRanks, size: int) -> None:
    assert ranks.run(held_against_the_whole, [*CASES], size=size) == [{}] * size


def what_is_shown() -> list[bool]:
    """Whether a split tensor is taken for the whole: outside, within `without_subclasses`, and with that lifted
    again.
    """
    with axis_of_all() as axis:
        tensor = axis.part(torch.zeros(6), Layout.of(0, 1, 6, 1, axis.group.size))
        found = [tensor.shape == (6,)]
        with without_subclasses():
            found.append(tensor.shape == (6,))
            with with_torch_function():
                found.append(tensor.shape == (6,))
            found.append(tensor.shape == (6,))
        return [*found, tensor.shape == (6,)]


def test_parts_are_shown_as_the_whole_within_rules_where_they_ask_for_it(ranks: KeptRanks) -> None:
    assert ranks.run(what_is_shown) == [[True, False, True, False, True]] * 2


def gradient_of_a_gradient() -> str:
    """What is said of one of cross entropy over classes that are split."""
    with axis_of_all() as axis:
        logits = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
        loss = F.cross_entropy(axis.part(logits, Layout.of(1, 1, 12, 1, axis.group.size)), TARGET.flatten())
        with pytest.raises(RunError, match="create_graph=True") as refused:
            torch.autograd.grad(loss, logits, create_graph=True)
        return str(refused.value)


def test_a_gradient_of_the_gradient_of_a_split_loss_is_refused(ranks: KeptRanks) -> None:
    said = ranks.run(gradient_of_a_gradient)
    assert all("gradient of cross_entropy over a vocabulary that is split" in one for one in said)


FAST = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_nested_tensor_from_mask")


def encoder_in_evaluation(split: tuple[int, ...]) -> dict[str, Any]:
    """What differs in torch's encoder of two layers, those in `split` split by heads, without gradients."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(12, 6, 16, batch_first=True)
    whole = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(12, bias=False)).double().eval()
    model, x = copy.deepcopy(whole), torch.randn(2, 5, 12).double()
    behind = torch.arange(5) >= torch.tensor([[5], [3]])
    between = torch.tensor([[False] * 5, [False, True, False, True, False]])
    seen = torch.zeros(5, 5, dtype=torch.bool)
    calls: dict[str, Callable[[Any], T]] = {
        "attention": lambda encoder: encoder.layers[0].self_attn(x, x, x)[0],
        "no padding": lambda encoder: encoder(x),
        "behind": lambda encoder: encoder(x, src_key_padding_mask=behind),
        "behind, as numbers": lambda encoder: encoder(x, None, torch.zeros(2, 5).double().masked_fill(behind, -1e9)),
        "between": lambda encoder: encoder(x, src_key_padding_mask=between),
        "with a mask": lambda encoder: encoder(x, seen, behind),
    }
    cut = {"in_proj_weight": (0, 3), "in_proj_bias": (0, 3), "out_proj.weight": (1, 1)}
    with axis_of_all() as axis, pytest.MonkeyPatch.context() as patch, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are new
        expected = {name: call(whole) for name, call in calls.items()}
        used: set[str] = set()
        for name in FAST:
            function = getattr(torch, name)
            patch.setattr(torch, name, lambda *a, n=name, f=function, **k: (used.add(n), f(*a, **k))[1])
        layouts = {
            f"layers.{at}.self_attn.{name}": Layout.of(dim, outer, 6, 2, axis.group.size)
            for at in split
            for name, (dim, outer) in cut.items()
        }
        parts = SplitModel(model, layouts, axis.group)
        with parts.axis:
            found = {name: call(model) for name, call in calls.items()}
        parts.close()
        assert model.use_nested_tensor
        assert not model.layers[-1]._forward_hooks
    wrong = [name for name in calls if not (found[name] - expected[name]).abs().max() < 1e-12]
    zeros = float(expected["behind"][1, 3:].abs().max())
    return {"wrong": wrong, "zeros": zeros, "fast": used}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("split", "fast"), [((0, 1), set()), ((1,), {*FAST[:2]})])
def test_torchs_fast_ways_to_evaluate_are_for_whole_layers_alone(
    split: tuple[int, ...], fast: set[str], size: int, ranks: KeptRanks
) -> None:
    """And what they put at padded positions stands there all the same."""
    for found in ranks.run(encoder_in_evaluation, split, size=size):
        assert found == {"wrong": [], "zeros": 0, "fast": fast}


class Doubled(torch.autograd.Function):
    """A linear layer with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: T, weight: T) -> T:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return F.linear(x * 2, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: T) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * gradients[0] @ weight, 2 * gradients[0].T @ x


def left_behind() -> list[bool]:
    """Whether whole tensors that entered a split computation outlive it."""
    with axis_of_all() as axis:
        weight = axis.part(torch.randn(6, 4, requires_grad=True), Layout.of(0, 1, 6, 1, axis.group.size))
        source = torch.randn(3, 4, requires_grad=True)
        entering = source * 2
        entered = [weakref.ref(entering)]
        out = F.linear(entering, weight) * F.linear(entering, weight) + entering.sum(-1, keepdim=True)
        gc.disable()
        try:
            del entering
            out.sum().backward()
            del out
            return [reference() is not None for reference in entered]
        finally:
            gc.enable()


def test_nothing_outlives_its_step(ranks: KeptRanks) -> None:
    assert ranks.run(left_behind) == [[False]] * 2


REFUSED: dict[str, tuple[Callable[[T, T], Any], str]] = {
    "writing": (lambda w, _: w.mul(2).__setitem__(0, 1.0), "__setitem__ on a tensor that is split"),
    "unknown-in-place": (lambda w, _: w.mul(2).cumsum_(0), "cumsum_ on a tensor that is split"),
    "through-a-view": (lambda w, _: w.mul(2).diagonal().fill_(1), "fill_ on a tensor that is split"),
    "through-views": (lambda w, _: w.mul(2).diagonal().view(2, 3)[0].add_(1), "add_ on a tensor that is split"),
    "kept-gradient": (lambda w, _: w.mul(2).retain_grad(), "retain_grad on a tensor that is split"),
    "own-backward": (lambda w, x: Doubled.apply(x, w), "Doubled.forward (test_split_tensors.py:"),
    "own-backward-later": (lambda w, x: Doubled.apply(x.detach(), w), "Doubled.forward (test_split_tensors.py:"),
    "pointer": (lambda w, _: w.data_ptr(), "data_ptr on a tensor that is split"),
    "beyond": (lambda w, _: F.embedding(torch.tensor([6]), w), "index out of range"),
    "max-norm": (lambda w, _: F.embedding(torch.tensor([1]), w, max_norm=1.0), "max_norm"),
}


def what_is_said(names: list[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    with axis_of_all() as axis:
        for name in names:
            weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
            x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
            try:
                REFUSED[name][0](axis.part(weight, Layout.of(0, 1, 6, 1, axis.group.size)), x)
            except (RunError, IndexError) as problem:
                said[name] = str(problem)
    return said


def test_what_parts_cannot_stand_in_for_is_refused(ranks: KeptRanks) -> None:
    for said in ranks.run(what_is_said, [*REFUSED]):
        assert said.keys() == REFUSED.keys()
        for name, (_, words) in REFUSED.items():
            assert words in said[name], said[name]


class Tied(nn.Module):
    """An embedding that is the head too, by its own name and by use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok = nn.Embedding(12, 4)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.tok.weight
        self.tok.weight.decay = False  # type: ignore[attr-defined]

    def forward(self, x: T) -> T:
        return self.head(self.tok(x)) + self.tok(x) @ self.tok.weight.t()


def penalised(model: nn.Module) -> T:
    scores = model(torch.tensor([[1, 5, 11]])).pow(2).sum()
    return scores + sum(p.pow(3).sum() for p in model.parameters())


def split_model() -> dict[str, Any]:
    model, whole = Tied().double(), Tied().double()
    with axis_of_all() as axis:
        kept = model.tok.weight
        split = SplitModel(model, {"tok.weight": Layout.of(0, 1, 12, 1, axis.group.size)}, axis.group)
        loss, expected = None, penalised(whole)
        with split.axis:
            inside = [type(p) for p in model.parameters()]
            loss = penalised(model)
        outside = model(torch.tensor([2]))
        loss.backward()
        expected.backward()
        gradient = split.full_view("tok.weight", kept.grad)
        result = {
            "same object": model.tok.weight is kept and model.head.weight is kept and not kept.decay,
            "part": tuple(kept.shape),
            "inside": inside == [SplitTensor],
            "names": [name for name, _ in model.named_parameters()] == ["tok.weight"],
            "state": all(not is_split(t) for t in model.state_dict().values()),
            "outside": torch.equal(axis.gather_full(outside), whole(torch.tensor([2]))),
            "loss": abs(float(loss - expected)) < 1e-12,
            "gradient": bool((gradient - whole.tok.weight.grad).abs().max() < 1e-12),
            "share": split.share,
        }
        split.close()
        return result


def test_a_model_keeps_its_parameters_and_its_ties(ranks: KeptRanks) -> None:
    for result in ranks.run(split_model):
        assert result.pop("part") == (6, 4)
        assert result.pop("share") == 1.0
        assert all(result.values()), result
