"""The operations that have a kernel of their own, chosen by the device of the tensors given.

One folder an operation: ``__init__`` holds the public wrapper, ``reference`` the plain PyTorch that
defines it, ``triton`` the GPU kernels and, where the reference is too slow for a CPU, ``cpu`` a
faster path. Nothing here imports triton before a CUDA tensor is given.
"""

from engine_core.kernels.activation import gelu_and_mul, silu_and_mul
from engine_core.kernels.attention import paged_attention
from engine_core.kernels.greedy import choose_greedy
from engine_core.kernels.kv_store import store_kv
from engine_core.kernels.linear import linear
from engine_core.kernels.norm import layer_norm, rms_norm
from engine_core.kernels.rotary import apply_rotary
from engine_core.kernels.rotary_store import rotary_store

__all__ = [
    "apply_rotary",
    "choose_greedy",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "paged_attention",
    "rms_norm",
    "rotary_store",
    "silu_and_mul",
    "store_kv",
]
