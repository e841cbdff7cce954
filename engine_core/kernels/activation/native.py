"""The gated activations, by kernels compiled for a CPU."""

from __future__ import annotations

from torch import Tensor

from engine_core.kernels.compiled import Kernel, threads

# Results per thread, at least.
_LEAST = 2**13


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of ``x [..., 2 * I]``; the activation is "silu" or "gelu_tanh"."""
    x = x if x.is_contiguous() else x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    numbers = out.numel()
    _KERNEL.run(
        (x.dtype, activation),
        threads(numbers, _LEAST),
        x.data_ptr(),
        out.data_ptr(),
        numbers // size if size else 0,
        size,
    )
    return out


_KERNEL = Kernel("engine_core.kernels.activation.numba:make", "4q")
