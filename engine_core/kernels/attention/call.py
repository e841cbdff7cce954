"""A call of attention, as its kernels take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of :func:`~engine_core.kernels.paged_attention`, which has checked them.

    Attributes:
        k_cache: without its scales.
        v_cache: likewise.
        k_scales: ``[num_blocks, Hk, block_size]`` float32, of codes; None of numbers.
        v_scales: likewise.
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
