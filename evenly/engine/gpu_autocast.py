"""What torch does on a GPU, on tensors of the CPU: the types of its autocast, and what is one kernel there.

torch has a list of functions for each kind of device, and a model is read on fake tensors of the CPU: there softmax and
norms of 16 bits stay in 16 bits, where a GPU computes them in float32, and the loss of logits of 16 bits copies them to
float32 first, where a GPU has log_softmax give 16 bits and copies these.
Source: aten/src/ATen/autocast_mode.h, and "CUDA Ops that can autocast to float32" of torch.amp's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from evenly.data.nest import map_tensors, tensors_in
from evenly.engine.gpu_kernels import AS_ONE_KERNEL
from evenly.parallel.tensor.axis import SplitTensor, is_split

# By name: functions that get float32, as torch's, as methods and of torch.nn.functional.
_WIDENED = (
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh cosine_similarity "
    "dist erfinv exp expm1 group_norm kl_div l1_loss layer_norm log log10 log1p log2 logsumexp mse_loss nll_loss norm "
    "normalize pairwise_distance pdist pow reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
FLOAT32 = {*_WIDENED.split(), *(("rms_norm",) if torch.__version__ >= "2.13" else ())}
# Those that give it where no other type is asked for.
_GIVING = "softmax softmin log_softmax sum prod cumsum cumprod linalg_vector_norm linalg_norm linalg_matrix_norm"
GIVES_FLOAT32 = {*_GIVING.split()}
# Those that get the wider type where they get both.
PROMOTES = {"bilinear", "dot", "vdot", "tensordot", "scatter_add"}


class AsOnGpu(TorchFunctionMode):
    """Functions save what they do on a GPU; where torch's autocast of the CPU is on, they have the types of a GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        run: Any = AS_ONE_KERNEL.get(func, func)
        # Autocast leaves alone what is written to a tensor of the code's own.
        if torch.is_autocast_enabled("cpu") and kwargs.get("out") is None:
            wide = name in PROMOTES and any(one.dtype is torch.float32 for one in tensors_in((args, kwargs)))
            if wide or name in FLOAT32:
                return run(*map_tensors(_widened, args), **map_tensors(_widened, kwargs))
            if name in GIVES_FLOAT32 and args and _is_narrow(args[0]) and kwargs.get("dtype") is None:
                return func(*args, **{**kwargs, "dtype": torch.float32})
            if func is F.cross_entropy and _is_narrow(logits := kwargs.get("input", args[0] if args else None)):
                # Split logits have a loss of their own, in float32 on any device.
                return func(*args, **kwargs) if is_split(logits) else _cross_entropy(*args, **kwargs)
        if run is not func or (within := _within(func)) is None or any(issubclass(kind, SplitTensor) for kind in types):
            return run(*args, **kwargs)
        with self:
            return within(*args, **kwargs)


@cache
def _within(func: Any) -> Callable[..., Any] | None:
    """A function of torch.nn.functional that is written in Python, so that a mode sees those that it calls; else None.

    Such functions have the mode called with themselves first, and run outside of it.
    """
    if not isinstance(func, FunctionType) or func.__globals__.get("__name__") != F.__name__:
        return None
    asked = {name: _no for name in func.__globals__ if name.startswith("has_torch_function")}
    found = FunctionType(func.__code__, func.__globals__ | asked, func.__name__, func.__defaults__, func.__closure__)
    found.__kwdefaults__ = func.__kwdefaults__
    return found


def _no(*_: Any) -> bool:
    return False


def _is_narrow(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype in (torch.bfloat16, torch.float16)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if _is_narrow(tensor) else tensor


def _cross_entropy(input: torch.Tensor, target: torch.Tensor, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("label_smoothing") or len(args) > 4 or target.is_floating_point():  # other sums follow log_softmax
        return F.cross_entropy(input, target, weight, *args, **kwargs)
    named = dict(zip(("size_average", "ignore_index", "reduce", "reduction"), args, strict=False)) | kwargs
    named.pop("label_smoothing", None)
    return F.nll_loss(F.log_softmax(input, min(1, input.dim() - 1)).float(), target, weight, **named)
