"""Products of float32 with bfloat16 or float16, by kernels compiled for a CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine_core.kernels.compiled import Kernel, cpu_features, threads

LANES = 8
PANEL = 2 * LANES
# Panels that a tile of so many rows multiplies at once. AVX2 has 16 registers: each row and panel
# takes two, the panel's numbers two and the activation one; and fewer than eight sums would wait
# for each other.
PANELS = {1: 4, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
MOST = 6
# From so many rows on panels are expanded first. 64 and 128 rows take 12 and 6% less as they are,
# 512 the same and 2048 a tenth more.
_MANY = 192
# How a panel's numbers are stored.
FLOAT16, BFLOAT16, EXPANDED = range(3)
# Rows of activations, a multiple of MOST, and their bytes, that stay near a core while all panels
# pass. A tile writes to as many pages as it has rows, and 2048 rows by 3072 x 576, with a page for
# each row and more for the activations, had more pages than a Zen 3 core remembers (2048): it took
# 0.45 us a tile to look them up, a quarter of the time. 192 to 576 rows do not differ.
_ROWS = 48 * MOST
_CHUNK = 2**22
# Bytes of expanded panels that pass together, for each tile of activations.
_GROUP = 3 * 2**16
# Products for each thread at least.
_LEAST = 2**16


@cache
def panel_width() -> int:
    """Rows of a panel, or 0 if the CPU for which kernels are compiled lacks the instructions."""
    return PANEL if {"+avx2", "+fma", "+f16c"} <= cpu_features() else 0


def half_linear(x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See the wrapper; x is contiguous."""
    (m, k), n = x.shape, out.shape[1]
    kind = BFLOAT16 if panels.dtype is torch.bfloat16 else FLOAT16
    parts = threads(m * n * k, _LEAST)
    given = (
        panels.data_ptr(),
        x.data_ptr(),
        out.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
    if m >= _MANY:
        group = max(_GROUP // (4 * PANEL * k), 1)
        scratch = x.new_empty(parts * (1 + MOST + group * k) * PANEL)
        chunk = min(max(_CHUNK // (4 * k) // MOST, 1) * MOST, _ROWS)
        sizes = (m, n, k, out.stride(0), chunk, group)
        _MANY_ROWS.run((kind,), parts, *given, scratch.data_ptr(), *sizes)
        return
    # Tiles of nearly equal heights: 16 rows are 6, 5 and 5.
    rows = -(-m // -(-m // MOST))
    scratch = x.new_empty(parts * (1 + rows) * PANELS[rows] * PANEL)
    _FEW_ROWS.run((rows, kind), parts, *given, scratch.data_ptr(), m, n, k, out.stride(0))


_FEW_ROWS = Kernel("engine_core.kernels.half_linear.numba:make", "9q", exact=True)
_MANY_ROWS = Kernel("engine_core.kernels.half_linear.numba:make_many", "11q", exact=True)
