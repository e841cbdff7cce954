"""Products with blocks, by kernels compiled for a CPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine_core.kernels.block_linear.forms import BLOCK, FORMS, PANEL
from engine_core.kernels.compiled import Kernel, cpu_features, threads

# What multiplies bytes: vectors of 64 or 32 bytes, or whatever LLVM makes of widened numbers.
VNNI_512, VNNI_256, AVX2, PORTABLE = range(4)
# Of activations: bytes of a block's scale, of its codes' sum times the scale, and of the sums of
# each half of its codes.
META = 16
# Rows of activations that a tile multiplies at once.
TILE = {VNNI_512: 8, VNNI_256: 4, AVX2: 4, PORTABLE: 2}
# With so many rows the tile reads the panel's blocks as they are.
FEW = 4
# Bytes of quantised activations that stay in a core's cache while all panels pass.
_CHUNK = 2**17
# Products of two numbers, and numbers to quantise, for each thread at least.
_LEAST, _LEAST_NUMBERS = 2**16, 2**14
NAMES = tuple(FORMS)


@cache
def instructions() -> int:
    """The instructions that multiply bytes on the CPU for which kernels are compiled."""
    features = cpu_features()
    if {"+avx512vnni", "+avx512bw", "+avx512vl"} <= features:
        return VNNI_512
    if {"+avxvnni", "+fma", "+f16c"} <= features:
        return VNNI_256
    return AVX2 if {"+avx2", "+fma", "+f16c"} <= features else PORTABLE


def _code(type_name: str, kind: int, rows: int = 1, *, unpacked: bool = False) -> int:
    """A tile's constants as one number: Numba hands intrinsics numbers, and keeps code by them."""
    return ((NAMES.index(type_name) * 4 + kind) * 16 + rows) * 2 + unpacked


def block_linear(
    x: Tensor, panels: Tensor, type_name: str, bias: Tensor | None, out: Tensor
) -> None:
    """See the wrapper; x and out are of the same type, x is contiguous, out's rows are."""
    form, kind = FORMS[type_name], instructions()
    (m, k), n = x.shape, out.shape[1]
    count, panel_bytes = k // BLOCK, form.panel_bytes(k)
    given = (out.data_ptr(), 0 if bias is None else bias.data_ptr())
    parts = threads(m * n * k, _LEAST)
    if m <= FEW:
        rows = m if m <= 2 else FEW
        each = rows * (count * (BLOCK + META) + PANEL * 4)
        scratch = torch.empty(parts * each, dtype=torch.uint8)
        _FEW_ROWS.run(
            (_code(type_name, kind, rows), x.dtype),
            parts,
            *(panels.data_ptr(), panel_bytes, x.data_ptr(), *given, scratch.data_ptr()),
            *(m, n, out.stride(0), count),
        )
        return
    rows = TILE[kind]
    padded = -(-m // rows) * rows
    quantized = torch.empty(padded * count * (BLOCK + META), dtype=torch.uint8)
    codes, meta = quantized.data_ptr(), quantized.data_ptr() + padded * k
    _QUANTIZE.run(
        (x.dtype,),
        threads(padded * k, _LEAST_NUMBERS),
        *(x.data_ptr(), codes, meta, m, padded, count),
    )
    each = count * form.unpacked_bytes + rows * PANEL * 4
    scratch = torch.empty(parts * each, dtype=torch.uint8)
    _MANY_ROWS.run(
        (_code(type_name, kind, rows, unpacked=True), _code(type_name, kind), x.dtype),
        parts,
        *(panels.data_ptr(), panel_bytes, codes, meta, *given, scratch.data_ptr()),
        *(m, n, out.stride(0), count, form.unpacked_bytes, max(_CHUNK // k // rows, 1) * rows),
    )


def take_rows(ids: Tensor, panels: Tensor, type_name: str, out: Tensor) -> None:
    """See the wrapper; ids are int64 and contiguous."""
    form, (m, k) = FORMS[type_name], out.shape
    count = k // BLOCK
    parts = threads(m * k, _LEAST_NUMBERS)
    scratch = torch.empty(parts * count * form.unpacked_bytes, dtype=torch.uint8)
    _TAKE.run(
        (_code(type_name, instructions()), out.dtype),
        parts,
        *(panels.data_ptr(), form.panel_bytes(k), ids.data_ptr(), out.data_ptr()),
        *(scratch.data_ptr(), m, count),
    )


_FEW_ROWS = Kernel("engine_core.kernels.block_linear.numba:make_few", "10q", exact=True)
_QUANTIZE = Kernel("engine_core.kernels.block_linear.numba:make_quantize", "6q", exact=True)
_MANY_ROWS = Kernel("engine_core.kernels.block_linear.numba:make_many", "13q", exact=True)
_TAKE = Kernel("engine_core.kernels.block_linear.numba:make_take", "7q", exact=True)
