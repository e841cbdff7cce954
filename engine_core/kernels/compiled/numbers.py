"""Building blocks of compiled kernels: numbers of low precision, arrays, exp.

This module imports Numba. To a type checker its functions are ordinary ones of Python.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from engine_core.kernels.codes import LEAST_SCALE
from engine_core.kernels.compiled.openmp import openmp

_Function = TypeVar("_Function")


class _Decorator(Protocol):
    def __call__(self, function: _Function, /) -> _Function: ...


_numba: Any = importlib.import_module("numba")
_types: Any = importlib.import_module("numba.types")
_extending: Any = importlib.import_module("numba.extending")
_ir: Any = importlib.import_module("llvmlite.ir")

# Sums may be reordered, as vectors need; NaN and infinity are kept.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_INT32 = _ir.IntType(32)
_FLOAT = _ir.FloatType()

#: The type that arrays of a torch dtype have in a body; bfloat16 and e4m3 are seen as their bits.
STORED: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.int8: np.int8,
    torch.float8_e4m3fn: np.uint8,
}

float32: Any = _types.float32

_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _extending.intrinsic

inline: _Decorator = _numba.njit(fastmath=_FAST, error_model="numpy", inline="always")

for _name, _address in openmp().addresses.items():
    importlib.import_module("llvmlite.binding").add_symbol(_name, _address)


def compile_entry(body: Callable[..., None], *, exact: bool = False) -> Any:
    """``body`` as a C function of the address of its packed arguments, as Numba compiles it.

    ``exact`` keeps the order of all operations.
    """
    signature = _types.void(_types.voidptr)
    options = {"fastmath": False if exact else _FAST, "error_model": "numpy"}
    return _numba.cfunc(signature, **options)(body)


def object_code(compiled: Any) -> tuple[str, bytes]:
    """The name of a compiled entry, and the object code with it."""
    return compiled.native_name, compiled._library._get_compiled_object()


@inline
def unpack(arguments: Any) -> Any:
    """The packed arguments as an array of int64; those that are floats by :func:`as_double`."""
    return _numba.carray(arguments, 48, np.int64)


if openmp().found:
    this_part: Any = _types.ExternalFunction("omp_get_thread_num", _types.int32())
    all_parts: Any = _types.ExternalFunction("omp_get_num_threads", _types.int32())
else:

    @inline
    def this_part() -> int:
        """Which of the parts this is, from 0."""
        return 0

    @inline
    def all_parts() -> int:
        """How many parts there are."""
        return 1


@_intrinsic
def _pointer(context: Any, address: Any, dtype: Any) -> Any:
    kind = _types.CPointer(dtype.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(kind))

    return kind(_types.int64, dtype), generate


@inline
def array(address: int, dtype: Any, size: int) -> Any:
    """The ``size`` numbers of type ``dtype`` that lie at an address."""
    return _numba.carray(_pointer(address, dtype), size)


@inline
def matrix(address: int, dtype: Any, rows: int, columns: int) -> Any:
    """Rows of numbers of type ``dtype`` that lie at an address."""
    return _numba.carray(_pointer(address, dtype), (rows, columns))


def _bitcast(source: Any, target: Any, form: Any) -> Any:
    """A function that gives the ``target`` with the bits of a ``source``."""

    @_intrinsic
    def cast(context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], form)

        return target(source), generate

    return cast


#: The float64 whose bits an int64 holds.
as_double = _bitcast(_types.int64, _types.float64, _ir.DoubleType())
_bits = _bitcast(float32, _types.int32, _INT32)
_from_bits = _bitcast(_types.int32, float32, _FLOAT)


def _widen_e4m3(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    code = builder.zext(args[0], _INT32)
    sign = builder.shl(builder.and_(code, _ir.Constant(_INT32, 0x80)), _ir.Constant(_INT32, 24))
    rest = builder.shl(builder.and_(code, _ir.Constant(_INT32, 0x7F)), _ir.Constant(_INT32, 20))
    # The exponent is 120 too small; the product is right for the least numbers too.
    number = builder.bitcast(builder.or_(sign, rest), _FLOAT)
    return builder.fmul(number, _ir.Constant(_FLOAT, 2.0**120))


@_intrinsic
def widen(context: Any, stored: Any) -> Any:
    """A stored number as float32: itself, or of bfloat16 the bits that it is.

    Of e4m3's codes of NaN it makes 480 and -480.
    """
    if stored == _types.float32:
        return float32(stored), lambda context, builder, signature, args: args[0]
    if stored == _types.int8:
        return float32(stored), lambda context, builder, signature, args: builder.sitofp(
            args[0], _FLOAT
        )
    if stored == _types.uint8:
        return float32(stored), _widen_e4m3

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], _INT32), _ir.Constant(_INT32, 16))
        return builder.bitcast(bits, _FLOAT)

    return float32(_types.uint16), generate


@_intrinsic
def narrow(context: Any, x: Any, like: Any) -> Any:
    """A float32 rounded to the type that ``like`` is stored as, to the nearest, ties to even."""
    if like == _types.float32:
        return like(float32, like), lambda context, builder, signature, args: args[0]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _INT32)
        high = builder.lshr(bits, _ir.Constant(_INT32, 16))
        odd = builder.and_(high, _ir.Constant(_INT32, 1))
        rounded = builder.add(builder.add(bits, odd), _ir.Constant(_INT32, 0x7FFF))
        rounded = builder.lshr(rounded, _ir.Constant(_INT32, 16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        kept = builder.select(is_nan, _ir.Constant(_INT32, 0x7FC0), rounded)
        return builder.trunc(kept, _ir.IntType(16))

    return _types.uint16(float32, like), generate


@_intrinsic
def _select(context: Any, condition: Any, yes: Any, no: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(args[0], args[1], args[2])

    return float32(_types.boolean, float32, float32), generate


@inline
def exp(x: Any) -> Any:
    """``e ** x`` in float32 without a call, so that a loop of it becomes vectors.

    ``2 ** (n + r)`` by the Taylor polynomial of degree 6 for ``|r| <= 1/2``. In relative terms it
    is off by at most ``2e-7 + 8e-8 * |x|``, as ``n + r`` is a float32. Beyond the range of normal
    numbers it gives about the least or the largest of them.
    """
    scaled = float32(x * float32(1.4426950408889634))
    bounded = _select(scaled < float32(-126.0), float32(-126.0), scaled)
    bounded = _select(bounded > float32(127.99999), float32(127.99999), bounded)
    # math.floor gives an int64, to which AVX2 converts no vectors.
    whole = np.floor(bounded + float32(0.5))
    r = bounded - whole
    y = float32(1.5403530393381608e-4)
    y = y * r + float32(1.3333558146428443e-3)
    y = y * r + float32(9.618129107628477e-3)
    y = y * r + float32(5.5504108664821576e-2)
    y = y * r + float32(2.402265069591007e-1)
    y = y * r + float32(6.931471805599453e-1)
    y = y * r + float32(1.0)
    # The integer's bits are the last of this sum's.
    exponent = _bits(whole + float32(12582912.0)) << np.int32(23)
    result = _from_bits(_bits(y) + exponent)
    return _select(x == x, result, x)


@inline
def sqrt(x: Any) -> Any:
    """The square root in float32."""
    return float32(math.sqrt(x))


@inline
def scale_of(x: Any, top: Any) -> Any:
    """The scale by which the greatest of some stored numbers becomes ``top``.

    NaN if they are not finite; see :func:`engine_core.kernels.codes.quantized`.
    """
    greatest, nothing = float32(0), float32(0)
    for i in range(len(x)):
        value = widen(x[i])
        greatest = max(greatest, abs(value))
        nothing += value * float32(0)
    return greatest * (float32(1) / top) + float32(LEAST_SCALE) + nothing


@inline
def int8_of(x: Any) -> Any:
    """The nearest integer, ties to even, of a number from -127 to 127."""
    return np.int8(_bits(x + float32(12582912.0)) << np.int32(24) >> np.int32(24))


@inline
def e4m3_of(x: Any) -> Any:
    """The code of the nearest number, ties to even, of one from -448 to 448."""
    bits = _bits(x)
    rest = bits & np.int32(0x7FFFFFFF)
    # The least numbers are multiples of 2 ** -9.
    few = _bits(abs(x) * float32(512) + float32(12582912.0)) & np.int32(0xFF)
    many = (rest + np.int32(0x7FFFF) + (rest >> np.int32(20) & np.int32(1))) >> np.int32(20)
    code = few if rest < np.int32(121 << 23) else many - np.int32(120 << 3)
    return np.uint8(code | (bits >> np.int32(24) & np.int32(0x80)))
