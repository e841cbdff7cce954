"""Weights of fewer bits: the contract of a scheme, and the core's.

Int8, int4 and fp8 quantise an ordinary checkpoint once it is loaded. Blocks come quantised from a
GGUF file, and e4m3 codes or integers with scales of groups from checkpoints that tools quantised.
"""

from engine_core.nn.quantization.blocks import BlockLinearMethod, BlockMatrix, GGUFScheme
from engine_core.nn.quantization.cpu import Int4Scheme, Int8Scheme
from engine_core.nn.quantization.fp8 import Fp8LinearMethod, Fp8Scheme
from engine_core.nn.quantization.fp8_checkpoint import CompressedTensorsScheme
from engine_core.nn.quantization.int4 import Int4LinearMethod, Int4Matrix, quantize_int4
from engine_core.nn.quantization.int8 import Int8LinearMethod, Int8Matrix
from engine_core.nn.quantization.packed import AWQScheme, CompressedIntegersScheme, GPTQScheme
from engine_core.nn.quantization.scheme import QuantizationScheme, ScaleKind

__all__ = [
    "AWQScheme",
    "BlockLinearMethod",
    "BlockMatrix",
    "CompressedIntegersScheme",
    "CompressedTensorsScheme",
    "Fp8LinearMethod",
    "Fp8Scheme",
    "GGUFScheme",
    "GPTQScheme",
    "Int4LinearMethod",
    "Int4Matrix",
    "Int4Scheme",
    "Int8LinearMethod",
    "Int8Matrix",
    "Int8Scheme",
    "QuantizationScheme",
    "ScaleKind",
    "quantize_int4",
]
