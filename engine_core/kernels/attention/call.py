"""A call of attention, as its kernels take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of :func:`~engine_core.kernels.paged_attention`, which has checked them.

    Attributes:
        k_cache: without its scales.
        v_cache: likewise.
        k_scales: ``[num_blocks, Hk, block_size]`` float32, of codes; None of numbers.
        v_scales: likewise.
        chained: bits of the codes of a chain of linears that follows; 0: none does.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    block_tables: Tensor
    query_start: Tensor
    kv_lens: Tensor
    max_query_len: int
    max_kv_len: int
    num_decode_rows: int
    scale: float
    alibi_slopes: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    prefix_lens: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict)
    deterministic: bool = False
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    chained: int = 0


def check_rows(
    operation: str,
    block_tables: Tensor,
    query_start: Tensor,
    kv_lens: Tensor,
    num_decode_rows: int,
) -> None:
    """Check how a step's rows are described to an attention over a paged cache.

    Raises:
        ValueError: a shape, dtype or number does not fit; names ``operation``.
    """
    num_rows = kv_lens.shape[0]
    if block_tables.shape[0] != num_rows or query_start.shape[0] != num_rows + 1:
        raise ValueError(
            f"{operation}: kv_lens has {num_rows} rows, block_tables "
            f"{tuple(block_tables.shape)} and query_start {tuple(query_start.shape)}; expected "
            f"[{num_rows}, max_blocks] and [{num_rows + 1}]"
        )
    if block_tables.dtype != torch.int32 or kv_lens.dtype != torch.int32:
        raise ValueError(
            f"{operation}: block_tables are {block_tables.dtype} and kv_lens {kv_lens.dtype}; "
            "both must be int32"
        )
    if not 0 <= num_decode_rows <= num_rows:
        raise ValueError(f"{operation}: {num_decode_rows} decode rows of {num_rows} rows")
