"""Codes of heads on a GPU: made as :func:`engine_core.kernels.codes.quantized` does, and read."""

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


# A register of two pairs of codes to two float16: of the low bytes of the pairs, and of the high
# ones. The matrix units' layout of 16 bits is that of pairs too, so that these are products'
# operands as they are. int8: with its sign changed it is the last bits of 1024 and more.
_E4M3_LOW = tl.constexpr("""{
.reg .b32 a;
.reg .b16 l, h;
prmt.b32 a, $1, $1, 0x3120;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 $0, l;
}""")
_E4M3_HIGH = tl.constexpr("""{
.reg .b32 a;
.reg .b16 l, h;
prmt.b32 a, $1, $1, 0x3120;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 $0, h;
}""")
_INT8_LOW = tl.constexpr("""{
.reg .b32 a, b;
lop3.b32 a, $1, 0x00ff00ff, 0x64806480, 0x6a;
mov.b32 b, 0xe480e480;
add.rn.f16x2 $0, a, b;
}""")
_INT8_HIGH = tl.constexpr("""{
.reg .b32 a, b;
shr.u32 a, $1, 8;
lop3.b32 a, a, 0x00ff00ff, 0x64806480, 0x6a;
mov.b32 b, 0xe480e480;
add.rn.f16x2 $0, a, b;
}""")


@triton.jit
def log2_of(scales, NATIVE: tl.constexpr):
    """Logarithms of scales, one instruction each if NATIVE: the compiler's are a polynomial."""
    if NATIVE:
        logarithms = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [scales], tl.float32, True, 1
        )
    else:
        logarithms = tl.log2(scales)
    return logarithms


@triton.jit
def _number_of(byte, CODE: tl.constexpr):
    if CODE == "e4m3":
        number = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        number = byte.to(tl.int8).to(tl.float16)
    return number


@triton.jit
def low_codes(pairs, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """float16 of the codes in the low bytes of int16 ``pairs``, by a GPU's instructions if NATIVE.

    One operation of one operand: so the compiler makes it part of a product's operand.
    """
    if not NATIVE:
        numbers = _number_of(pairs & 255, CODE)
    elif CODE == "e4m3":
        numbers = tl.inline_asm_elementwise(_E4M3_LOW, "=r,r", [pairs], tl.float16, True, 2)
    else:
        numbers = tl.inline_asm_elementwise(_INT8_LOW, "=r,r", [pairs], tl.float16, True, 2)
    return numbers


@triton.jit
def high_codes(pairs, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """float16 of the codes in the high bytes, as :func:`low_codes`."""
    if not NATIVE:
        numbers = _number_of(pairs >> 8 & 255, CODE)
    elif CODE == "e4m3":
        numbers = tl.inline_asm_elementwise(_E4M3_HIGH, "=r,r", [pairs], tl.float16, True, 2)
    else:
        numbers = tl.inline_asm_elementwise(_INT8_HIGH, "=r,r", [pairs], tl.float16, True, 2)
    return numbers
