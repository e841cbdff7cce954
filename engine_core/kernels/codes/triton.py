"""Making codes of heads on a GPU, as :func:`engine_core.kernels.codes.quantized` does."""

from __future__ import annotations

import triton
import triton.language as tl

from engine_core.kernels.codes import E4M3_TOP, INT8_TOP, LEAST_SCALE

_INT8_TOP = tl.constexpr(INT8_TOP)
_E4M3_TOP = tl.constexpr(E4M3_TOP)
_LEAST = tl.constexpr(LEAST_SCALE)


@triton.jit
def larger(a, b):
    """The maximum, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """Absolute values' maxima ``[R]`` of ``x [R, L]``, NaN where there is one."""
    return tl.reduce(tl.abs(x.to(tl.float32)), 1, larger)


@triton.jit
def scale_of(maximum, given, CODE: tl.constexpr):
    """Scales of heads with such maxima, NaN for those that are not finite.

    They are those that are ``given``; None to take them from the maxima.
    """
    if given is not None:
        scale = given
    else:
        scale = maximum * (1.0 / (_INT8_TOP if tl.int8 == CODE else _E4M3_TOP)) + _LEAST
    return tl.where(maximum < float("inf"), scale, float("nan"))


@triton.jit
def encoded(x, scale, CLIPS: tl.constexpr, CODE: tl.constexpr):
    """Codes of ``x [R, L]`` by scales ``[R]``, to the nearest, ties to even.

    With CLIPS numbers may be beyond the greatest code, and become it.
    """
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    x = x.to(tl.float32) * inverse[:, None]
    if CLIPS:
        TOP: tl.constexpr = _INT8_TOP if tl.int8 == CODE else _E4M3_TOP
        x = tl.minimum(tl.maximum(x, -TOP), TOP)
    if CODE == tl.int8:  # noqa: SIM300
        # The sum's last bits are the integer.
        codes = (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        codes = x.to(CODE)
    return codes
