"""Looking tokens up on a GPU: a program for each token, or for a part of its row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine_core.kernels.launch.triton import launch_dependents, pdl_options, wait

# Columns of a program at most: 16 bytes or more for each thread.
_BLOCK = 1024


# Debugging is what has the assertion compiled.
@triton.jit(debug=True, do_not_specialize=["first", "num_rows"])
def _embed_kernel(
    out_ptr,
    ids_ptr,
    weight_ptr,
    first,
    num_rows,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PART: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64)
    wait(PDL)
    row = tl.load(ids_ptr + token).to(tl.int64) - first
    has_row = (row >= 0) & (row < num_rows)
    if not IS_PART:
        tl.device_assert(has_row, "a token's id is not in the embedding")
    # Nothing is read elsewhere, whether the assertion has ended the program by now or not.
    there = cols < tl.where(has_row, H, 0)
    values = tl.load(weight_ptr + row * H + cols, mask=there, other=0.0)
    tl.store(out_ptr + token * H + cols, values, mask=cols < H)


def embed(ids: Tensor, weight: Tensor, first: int | None) -> Tensor:
    """Arguments and result as of the public wrapper."""
    num_rows, hidden_size = weight.shape
    out = weight.new_empty(*ids.shape, hidden_size)
    if out.numel() == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(hidden_size))
    _embed_kernel[(ids.numel(), triton.cdiv(hidden_size, block))](
        out,
        ids.contiguous(),
        weight,
        first or 0,
        num_rows,
        H=hidden_size,
        BLOCK=block,
        IS_PART=first is not None,
        num_warps=4,
        sanitize_overflow=False,
        **pdl_options(weight.device),
    )
    return out
