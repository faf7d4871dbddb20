"""What a GPU computes in one kernel is read as one: it saves no more for the backward than that kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from evenly.engine.precision import autocast_as_on, functions_as_on
from evenly.torch_private import fake_mode

ROWS, WIDTH = 512, 64
ELEMENTS = ROWS * WIDTH
Act = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(x, (WIDTH,), weight)


def attention(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 2, ROWS // 2, WIDTH)
    return F.scaled_dot_product_attention(q, q, q, None, 0.1, True)


def attention_module(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Functions of torch that are written in Python call the kernel."""
    return nn.MultiheadAttention(WIDTH, 2, dropout=0.1)(x, x, x, need_weights=False)[0]


def saved_bytes(act: Act, device: str, dtype: torch.dtype = torch.float32, weight: torch.dtype | None = None) -> int:
    """Bytes that autograd saves of `act`, its arguments apart; of `x` and a weight of these types."""
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        return tensor

    with fake_mode():
        x = torch.empty(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        w = torch.empty(WIDTH, dtype=weight or dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one), functions_as_on(device):
            result = act(x, w)
        assert result.dtype is dtype
        return sum(
            size for key, size in found.items() if key not in {x.untyped_storage()._cdata, w.untyped_storage()._cdata}
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_saves_numbers_of_rows(dtype: torch.dtype) -> None:
    assert saved_bytes(rms_norm, "cuda", dtype) == 2 * ROWS * dtype.itemsize
    assert saved_bytes(lambda x, w: torch.rms_norm(x, (WIDTH,), w, 1e-6), "cuda", dtype) == 2 * ROWS * dtype.itemsize
    assert saved_bytes(lambda x, _: rms_norm(x, None), "cuda", dtype) == 2 * ROWS * dtype.itemsize
    assert saved_bytes(rms_norm, "cpu", dtype) > ELEMENTS * dtype.itemsize


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_of_two_types_a_gpu_has_no_kernel() -> None:
    on_gpu, on_cpu = (saved_bytes(rms_norm, one, torch.bfloat16, torch.float32) for one in ("cuda", "cpu"))
    assert on_gpu == on_cpu


@pytest.mark.skipif(torch.__version__ < "2.13", reason="autocast leaves rms_norm alone")
def test_autocast_makes_two_types_one() -> None:
    x, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.ones(8, requires_grad=True)
    with autocast_as_on("cuda", "bfloat16"):
        result = F.rms_norm(x, (8,), weight)
    assert (result.dtype, type(result.grad_fn).__name__) == (torch.float32, "NativeLayerNormBackward0")


def test_numbers_without_a_weight_stay() -> None:
    x = torch.randn(4, 8)
    with functions_as_on("cuda"):
        torch.testing.assert_close(F.rms_norm(x, (8,)), x / x.pow(2).mean(-1, keepdim=True).sqrt())


def test_dropout_saves_a_byte_per_element() -> None:
    assert saved_bytes(lambda x, _: F.dropout(x, 0.1), "cuda") == ELEMENTS
    assert saved_bytes(lambda x, _: F.dropout(x, 0.1), "cpu") == 4 * ELEMENTS
    for p, training, inplace in ((0.0, True, False), (1.0, True, False), (0.1, False, False)):
        on_gpu, on_cpu = (
            saved_bytes(lambda x, _: F.dropout(x, p, training, inplace), one)  # noqa: B023
            for one in ("cuda", "cpu")
        )
        assert on_gpu == on_cpu


@pytest.mark.parametrize("act", [attention, attention_module])
def test_attention_with_dropout_saves_no_scores(act: Act) -> None:
    scores = 4 * 2 * (ROWS // 2) ** 2
    assert saved_bytes(act, "cpu") > 2 * scores
    assert saved_bytes(act, "cuda") < saved_bytes(act, "cpu") - 2 * scores
