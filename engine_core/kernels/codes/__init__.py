"""Keys or values of a cache with fewer bits: codes, and a scale for each token and head.

The greatest number of a head becomes 127 in int8 and 448 in e4m3. A code times its scale is the
number that attention sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "CODE_TOPS",
    "E4M3_TOP",
    "INT8_TOP",
    "LEAST_SCALE",
    "SCALE_BYTES",
    "cache_parts",
    "dequantized",
    "quantized",
]

# The greatest code of each type.
INT8_TOP, E4M3_TOP = 127.0, 448.0
CODE_TOPS = {torch.int8: INT8_TOP, torch.float8_e4m3fn: E4M3_TOP}
# Of a scale in float32, which a head of a token has beside its codes.
SCALE_BYTES = 4
# Added to a scale, so that zeros have one by which they can be divided.
LEAST_SCALE = 1e-18


def cache_parts(cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys or values of a cache, and their scales; views.

    Args:
        cache: ``[num_blocks, block_size, Hk, D]`` of numbers; of codes ``[..., D + 4]``: each block
            has all codes ``[block_size, Hk, D]``, then the scales ``[Hk, block_size]`` in float32.

    Returns:
        ``[num_blocks, block_size, Hk, D]``, and ``[num_blocks, Hk, block_size]`` or, of numbers,
        None.

    Raises:
        ValueError: the scales of a block do not begin at a multiple of their size.
    """
    if cache.dtype not in CODE_TOPS:
        return cache, None
    num_blocks, block_size, heads, width = cache.shape
    head_dim = width - SCALE_BYTES
    codes = cache.as_strided(
        (num_blocks, block_size, heads, head_dim),
        (cache.stride(0), heads * head_dim, head_dim, 1),
        cache.storage_offset(),
    )
    first = block_size * heads * head_dim
    if any(at % SCALE_BYTES for at in (first, cache.stride(0), cache.storage_offset())):
        raise ValueError(
            f"a cache {tuple(cache.shape)} of {cache.dtype} has its scales at byte {first} of "
            f"{cache.stride(0)}, no multiples of {SCALE_BYTES}; take a block size that is one"
        )
    scales = cache.as_strided(
        (num_blocks, SCALE_BYTES * heads * block_size),
        (cache.stride(0), 1),
        cache.storage_offset() + first,
    )
    return codes, scales.view(torch.float32).view(num_blocks, heads, block_size)


def quantized(x: Tensor, dtype: torch.dtype, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Codes of ``x [..., D]``, and their scales ``[...]`` float32, NaN where x is not finite.

    With a ``scale`` that is given all heads have it, and what it does not reach becomes the
    greatest code.
    """
    x = x.float()
    top = CODE_TOPS[dtype]
    most = x.abs().amax(dim=-1)
    scales = most * (1 / top) + LEAST_SCALE if scale is None else torch.full_like(most, scale)
    scales = torch.where(most.isfinite(), scales, torch.nan)
    x = x * scales.reciprocal().unsqueeze(-1)
    x = x if scale is None else x.clamp(-top, top)
    return (x.round() if dtype == torch.int8 else x).to(dtype), scales


def dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``codes [..., D]`` times ``scales [...]``."""
    return (codes.float() * scales.unsqueeze(-1)).to(dtype)
