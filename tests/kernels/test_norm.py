"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import TOLERANCE, error
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine_core.kernels import layer_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    module = LlamaRMSNorm(x.shape[-1], eps)
    module.weight.data = weight
    return module(x).detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 5, 128)])
def test_rms_norm_is_llamas(shape: tuple[int, ...], dtype: torch.dtype, cpu_path: str) -> None:
    # Sums in another order may round a bfloat16 the other way.
    exact = dtype != torch.bfloat16 or cpu_path == "torch"
    bound = 1e-6 if exact else TOLERANCE[dtype]
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    assert error(rms_norm(x, weight, 1e-5), llama_rms_norm(x, weight, 1e-5)) < bound
    normed, total = rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    assert error(normed, llama_rms_norm(x + residual, weight, 1e-5)) < bound
    assert torch.equal(x, before)


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_apart(dtype: torch.dtype) -> None:
    """As the heads of a fused qkv are."""
    heads, others = torch.randn(2, 7, 6, 80).to(dtype)[:, :, 2:5, :64]
    weight = torch.randn(64).to(dtype)
    normed, total = rms_norm(heads, weight, 1e-6, residual=others)
    assert torch.equal(total, heads + others)
    assert error(normed, llama_rms_norm(heads + others, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("op", [rms_norm, lambda x, w, e, **k: layer_norm(x, w, None, e, **k)])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_threads_share_rows(op, count: int, share_among: Callable[[int], None]) -> None:
    x, residual = torch.randn(2, 5, 63)
    x[1, 5] = torch.nan
    weight = torch.randn(63)
    alone = op(x, weight, 1e-5, residual=residual)
    share_among(count)
    shared = op(x, weight, 1e-5, residual=residual)
    torch.testing.assert_close(shared, alone, rtol=0, atol=0, equal_nan=True)
    assert alone[0].isnan().all(-1).tolist() == [False, True, False, False, False]


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm_is_the_formula(dtype: torch.dtype, with_bias: bool) -> None:
    x, residual = torch.randn(2, 5, 63).to(dtype)
    weight, bias = torch.randn(2, 63).to(dtype)

    def formula(y: torch.Tensor) -> torch.Tensor:
        y = y.double()
        centred = y - y.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        return scaled + bias if with_bias else scaled

    chosen = bias if with_bias else None
    assert error(layer_norm(x, weight, chosen, 1e-5), formula(x)) < TOLERANCE[dtype]
    normed, total = layer_norm(x, weight, chosen, 1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    assert error(normed, formula(x + residual)) < TOLERANCE[dtype]


@pytest.mark.parametrize("op", [rms_norm, lambda x, w, e, **k: layer_norm(x, w, None, e, **k)])
def test_preconditions(op) -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"weight \(3,\)"):
        op(x, torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="stride 1"):
        op(x.t(), torch.ones(2), 1e-5)
    with pytest.raises(ValueError, match=r"contiguous, got strides \(2,\)"):
        op(x, torch.ones(8)[::2], 1e-5)
    with pytest.raises(ValueError, match="residual"):
        op(x, torch.ones(4), 1e-5, residual=torch.zeros(2, 4).half())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (3, 128), (2, 3000), (2, 3, 4, 16)])
def test_kernel(
    shape: tuple[int, ...],
    with_residual: bool,
    centred: bool,
    dtype: torch.dtype,
    launch_device: str,
) -> None:
    from engine_core.kernels.norm import triton

    x, residual = torch.randn(2, *shape, device=launch_device).to(dtype)
    weight, bias = torch.randn(2, shape[-1], device=launch_device).to(dtype)
    normed, total = triton.norm(
        x,
        weight,
        bias if centred else None,
        1e-5,
        residual=residual if with_residual else None,
        centred=centred,
    )
    if with_residual:
        # The interpreter cuts bfloat16 off where a GPU rounds: one unit in the last place.
        exact = dtype != torch.bfloat16 or launch_device == "cuda"
        assert total is not None
        assert error(total, x + residual) <= (0 if exact else 2**-7)
        x = total
    else:
        assert total is None
    if centred:
        expected = torch.nn.functional.layer_norm(
            x.double(), shape[-1:], weight.double(), bias.double(), 1e-5
        )
    else:
        expected = llama_rms_norm(x, weight, 1e-5)
    assert error(normed, expected) < TOLERANCE[dtype]


def test_kernel_per_head(launch_device: str) -> None:
    from engine_core.kernels.norm import triton

    heads = torch.randn(7, 6, 80, device=launch_device)[:, 2:5, :64]
    weight = torch.randn(64, device=launch_device)
    normed, _ = triton.norm(heads, weight, None, 1e-6, residual=None, centred=False)
    assert error(normed, llama_rms_norm(heads, weight, 1e-6)) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (1, 3, 128), (2, 3000), (0, 16)])
def test_kernel_of_partial_sums(
    shape: tuple[int, ...], parts: int, with_bias: bool, dtype: torch.dtype, launch_device: str
) -> None:
    from engine_core.kernels.norm import triton

    size = shape[-1]
    partial = torch.randn(parts, *shape, device=launch_device).view(parts, -1, size)
    residual = torch.randn(*shape[:-1], size + 8, device=launch_device).to(dtype)[..., :size]
    weight, bias = torch.randn(2, size, device=launch_device).to(dtype)
    expected = partial[0].clone()
    for part in partial[1:]:
        expected += part
    if with_bias:
        expected += bias.float()
    expected = (expected.view(shape) + residual.float()).to(dtype)
    normed, total = triton.sum_add_norm(
        partial, bias if with_bias else None, residual, weight, 1e-5
    )
    assert total.dtype == normed.dtype == dtype
    assert total.shape == normed.shape == shape
    # The interpreter cuts bfloat16 off where a GPU rounds: one unit in the last place.
    exact = dtype != torch.bfloat16 or launch_device == "cuda"
    assert error(total, expected) <= (0 if exact else 2**-7)
    assert error(normed, llama_rms_norm(total, weight, 1e-5)) < TOLERANCE[dtype]
