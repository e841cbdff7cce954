"""Random numbers that depend only on a seed and a position.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a sequence's
draws are the same whatever else is in its batch, however it was chunked, preempted or replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def _mulhilo(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    # The product's 64 bits wrap into int64 unchanged; the mask undoes the arithmetic shift.
    product = x * factor
    return (product >> 32) & _LOW, product & _LOW


def philox4x32(counter: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, as int64 in ``[0, 2**32)``, for each 64-bit counter and key.

    Args:
        counter: int64 of any shape; the low two words of the 128-bit counter.
        key: int64 of the same shape.
    """
    c0, c1 = counter & _LOW, (counter >> 32) & _LOW
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _mulhilo(c0, _M0)
        high1, low1 = _mulhilo(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """A float64 in ``[0, 1)`` with 53 random bits for each seed and position (both int64)."""
    high, low, _, _ = philox4x32(positions, seeds)
    bits = (high << 21) | (low >> 11)
    return bits.double() * 2.0**-53
