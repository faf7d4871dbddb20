"""The functions of torch that the tensor axis knows: one table, from a function's name to what it means for a split.

Every entry says both how a split of the inputs passes to the outputs (`propagate`, on the dims of a traced call) and
how the function is computed on the parts (`execute`): nothing is derived through a function that cannot be executed.
A function that is not here needs its tensors in full: what it takes is not split, and where a split tensor meets it
all the same, that is gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from evenly.nn import losses
from evenly.parallel.tensor import convolutions as c
from evenly.parallel.tensor import execution as e
from evenly.parallel.tensor import execution_products as products
from evenly.parallel.tensor import indexing
from evenly.parallel.tensor import propagation as p
from evenly.parallel.tensor import shapes as s
from evenly.parallel.tensor import shown_parameters as shown
from evenly.parallel.tensor.axis import EXECUTIONS, LOCAL, OF_PARAMETERS, PRODUCTS
from evenly.parallel.tensor.graph import Rule
from evenly.parallel.tensor.shapes import decided
from evenly.torch_private import FOREACH, GROUPED_PRODUCT

T = torch.Tensor
HOMES = (torch, T, F)


@dataclass(frozen=True)
class Op:
    """What one name stands for.

    propagate: takes the graph and a traced call; unites and forbids dims of the inputs, and gives the outputs theirs.
    execute:   takes the function and its arguments, of which some are split; the result, or `NotImplemented` to have
               them gathered.
    homes:     where functions of this name take these arguments.
    """

    propagate: Rule
    execute: e.Execution
    homes: Sequence[Any] = HOMES


def functions_of(name: str, homes: Sequence[Any] = HOMES) -> list[Callable[..., Any]]:
    """torch's functions, methods and attributes of this name, as a subclass of Tensor is asked for them."""
    name = name.rpartition(".")[2]
    found = [(home, getattr(home, name, None)) for home in (homes if not name.startswith("__") else (T,))]
    return [one if callable(one) else one.__get__ for home, one in found if callable(one) or (home is T and one)]


def _table(propagate: Rule, execute: e.Execution, names: str) -> dict[str, Op]:
    return {name: Op(propagate, execute) for name in names.split()}


# Of several tensors, broadcast against each other.
POINTWISE = """
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power rsub
    maximum minimum fmax fmin atan2 hypot lerp addcmul addcdiv where masked_fill clamp clip clamp_min clamp_max
    eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
# Of one tensor.
UNARY = """
    abs absolute neg negative exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos
    atan sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid logit sign sgn floor ceil round trunc frac
    relu relu6 gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid logsigmoid
    tanhshrink hardshrink softshrink threshold __neg__ __pos__ __abs__ __invert__ positive bitwise_not logical_not
    isnan isinf isfinite nan_to_num real detach clone contiguous
    float double half bfloat16 int long short bool byte char cpu cuda
    zeros_like ones_like empty_like full_like fill
"""
# Of positions, from dim 2 on.
POSITIONS = """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate upsample
"""
# By the name that a trace has for it: torch has a function of the same name, with other arguments.
LINEAR_CROSS_ENTROPY = f"{losses.__name__}.{losses.linear_cross_entropy.__name__}"
IN_PLACE = "copy_ zero_ fill_ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __iand__ __ior__"

_OPS: dict[str, Op] = {
    **_table(p.pointwise, e.elementwise, POINTWISE),
    **_table(p.pointwise_unary, e.elementwise, UNARY),
    **_table(p.pointwise_unary, e.cast, "to type type_as"),  # others say a type
    **_table(p.pointwise_unary, e.dropout, "dropout"),
    **_table(p.pointwise_unary, e.EXPAND, "expand broadcast_to"),
    **_table(p.pointwise_unary, e.expand_as, "expand_as"),
    **_table(p.pointwise_unary, e.create_alike, "rand_like randn_like"),
    **_table(p.created, e.create, "new_zeros new_ones new_empty new_full"),
    **_table(
        p.created, e.gather, "zeros ones empty full eye arange linspace tensor as_tensor scalar_tensor new_tensor"
    ),
    **_table(p.created, e.gather, "rand randn randint randperm"),
    **_table(p.viewed, e.VIEW, "view reshape"),
    **_table(p.viewed, e.view_as, "view_as reshape_as"),
    **_table(p.viewed, decided(s.flatten), "flatten ravel"),
    **_table(p.viewed, decided(s.unflatten), "unflatten"),
    **_table(p.viewed, e.UNSQUEEZE, "unsqueeze"),
    **_table(p.viewed, decided(s.squeeze), "squeeze"),
    **_table(p.transposed, e.TRANSPOSE, "transpose swapaxes swapdims"),
    **_table(p.last_two_transposed, decided(s.reverse_dims), "t T"),
    **_table(p.last_two_transposed, e.matrix_transpose, "mT mH H adjoint"),
    **_table(p.permuted, decided(s.permute), "permute"),
    **_table(p.moved, decided(s.movedim), "movedim moveaxis"),
    **_table(p.repeated, decided(s.repeat), "repeat"),
    **_table(p.repeated, decided(s.tile), "tile"),
    **_table(p.repeated_each, e.repeat_interleave, "repeat_interleave"),
    **_table(p.triangle, e.triangle, "tril triu"),
    **_table(p.padded, e.pad, "pad"),
    **_table(p.along(1), e.along(1), "softmax log_softmax softmin cumsum cumprod logcumsumexp flip"),
    **_table(p.along(1), e.narrow, "narrow"),
    **_table(p.along(1, -1), e.along(1, -1), "sort argsort"),
    **_table(p.along(2, -1), e.along(2, -1), "topk"),
    **_table(p.along(2, 1), e.along(2, 1), "normalize"),
    **_table(p.along(2), e.along(2), "roll"),
    **_table(p.reduced(1), e.reduced(1), "amax amin argmax argmin prod nansum nanmean any all logsumexp"),
    **_table(p.reduced(1), e.reduced(1), "var std var_mean std_mean count_nonzero median"),
    **_table(p.reduced(2), e.reduced(2), "norm"),
    **_table(p.extreme, e.extreme, "max min"),
    **_table(p.summed, e.sum_or_mean, "sum mean"),
    **_table(p.pieces(2), decided(s.split), "split split_with_sizes unsafe_split"),
    **_table(p.pieces(2), e.CHUNK, "chunk unsafe_chunk"),
    **_table(p.gated, e.glu, "glu"),
    **_table(p.unbound, e.UNBIND, "unbind"),
    **_table(p.cat, e.cat, "cat concat concatenate"),
    **_table(p.stacked, e.stack, "stack"),
    **_table(indexing.propagate, indexing.execute, "__getitem__"),
    **_table(p.index_selected, e.index_select, "index_select"),
    **_table(p.selected, e.select, "select"),
    **_table(p.normalized, e.normalize_rows, "layer_norm rms_norm"),
    **_table(p.linear, products.linear, "linear"),
    **_table(p.matmul, products.matmul, "matmul mm bmm __matmul__"),
    **_table(p.matmul, products.matmul_reversed, "__rmatmul__"),
    **_table(p.matmul_added, products.add_product, "addmm baddbmm"),
    **_table(p.grouped_product, products.grouped_product, f"grouped_mm {GROUPED_PRODUCT}"),
    **_table(p.einsum, products.einsum, "einsum"),
    **_table(p.attention, products.attention, "scaled_dot_product_attention"),
    **_table(p.cross_entropy, products.cross_entropy, "cross_entropy"),
    LINEAR_CROSS_ENTROPY: Op(p.linear_cross_entropy, products.linear_cross_entropy, homes=(losses,)),
    **_table(c.convolved, c.convolution, "conv1d conv2d conv3d"),
    # torch.batch_norm takes its arguments in another order.
    "batch_norm": Op(c.batch_normalized, c.batch_norm, homes=(F,)),
    **_table(c.group_normalized, c.group_norm, "group_norm"),
    **_table(c.pooled, c.positions, POSITIONS),
    # torch.embedding takes its arguments the other way round.
    "embedding": Op(p.embedding, products.embedding, homes=(F,)),
}
# Every function of elements whose result may take the place of its first argument.
_IN_PLACE = {
    f"{name}_": Op(_OPS[name].propagate, e.in_place)
    for name in (POINTWISE + UNARY).split()
    if not name.startswith("_") and functions_of(f"{name}_")
}
OPS: dict[str, Op] = {**_OPS, **_IN_PLACE, **_table(p.pointwise, e.in_place, IN_PLACE)}

# What asks about a tensor, and what is made of other calls: no dims pass through these.
ATTRIBUTES = """
    dtype device requires_grad grad_fn is_leaf layout ndim is_cuda is_sparse is_cpu is_meta is_mps is_quantized
    is_nested _version grad
"""
METHODS = "dim ndimension is_floating_point is_complex get_device element_size is_contiguous"
QUERIES: dict[Callable[..., Any], e.Execution] = {
    **dict.fromkeys([T.shape.__get__, T.size], e.shape),  # pyright: ignore
    **dict.fromkeys([T.numel, T.nelement, torch.numel], e.numel),
    **{getattr(T, name).__get__: e.same_as_local for name in ATTRIBUTES.split()},
    **{getattr(T, name): e.same_as_local for name in METHODS.split()},
    **dict.fromkeys([torch.is_floating_point, torch.is_complex, torch.is_tensor], e.same_as_local),
    T.__format__: e.text,
    T.__len__: e.length,
    T.register_hook: e.register_hook,
    F.multi_head_attention_forward: products.attention_module,
}

EXECUTIONS.update({function: op.execute for name, op in OPS.items() for function in functions_of(name, op.homes)})
EXECUTIONS.update(QUERIES)
EXECUTIONS.update(dict.fromkeys(FOREACH, shown.foreach))
EXECUTIONS[T.data.__get__] = e.data  # pyright: ignore
PRODUCTS.update(
    function for name in ("linear", "addmm", "embedding") for function in functions_of(name, OPS[name].homes)
)
OF_PARAMETERS.update(shown.OF_PARAMETERS)
LOCAL.update(
    function for function, execute in QUERIES.items() if execute in (e.shape, e.numel, e.same_as_local, e.text)
)
