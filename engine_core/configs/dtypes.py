"""Element types by name, without torch."""

from __future__ import annotations

from typing import Literal, get_args

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = get_args(DType)

_ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


def dtype_name(value: str) -> DType:
    """``value`` as one of the element types that the engine runs with.

    Raises:
        ValueError: it is not one of them.
    """
    for name in DTYPES:
        if value == name:
            return name
    raise ValueError(f"dtype {value!r} is not one of {', '.join(DTYPES)}")


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype``."""
    return _ITEMSIZE[dtype]
