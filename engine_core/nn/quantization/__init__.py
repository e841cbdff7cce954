"""Weights of fewer bits, multiplied as they are by torch's CPU kernels.

Int8 and int4 quantise an ordinary checkpoint once it is loaded; blocks come quantised from a GGUF
file. All are methods of :class:`engine_core.nn.linear.Linear`.
"""

from engine_core.nn.quantization.blocks import BlockLinearMethod
from engine_core.nn.quantization.int4 import Int4LinearMethod, Int4Matrix, quantize_int4
from engine_core.nn.quantization.int8 import Int8LinearMethod, Int8Matrix

__all__ = [
    "BlockLinearMethod",
    "Int4LinearMethod",
    "Int4Matrix",
    "Int8LinearMethod",
    "Int8Matrix",
    "quantize_int4",
]
