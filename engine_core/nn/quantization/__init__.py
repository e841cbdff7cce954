"""Weights of fewer bits, multiplied as they are by torch's CPU kernels.

``int8`` and ``int4`` quantise an ordinary checkpoint while it is loaded; ``gguf`` keeps the 4-bit
blocks of a GGUF file. All are methods of :class:`engine_core.nn.linear.Linear`.
"""

from engine_core.nn.quantization.assign import (
    Quantization,
    assign_methods,
    keep_blocks,
    pack_weights,
    packed_bytes,
)
from engine_core.nn.quantization.blocks import BlockLinearMethod
from engine_core.nn.quantization.int4 import Int4LinearMethod, Int4Matrix, quantize_int4
from engine_core.nn.quantization.int8 import Int8LinearMethod, Int8Matrix

__all__ = [
    "BlockLinearMethod",
    "Int4LinearMethod",
    "Int4Matrix",
    "Int8LinearMethod",
    "Int8Matrix",
    "Quantization",
    "assign_methods",
    "keep_blocks",
    "pack_weights",
    "packed_bytes",
    "quantize_int4",
]
