"""The KV cache's contents and size."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine_core.configs.base import FrozenConfig
from engine_core.configs.dtypes import DType, itemsize


class KVCacheSpec(FrozenConfig):
    """One attention layer's cache per token; layers with equal specs form a group.

    Attributes:
        num_kv_heads: key and value heads on this rank.
        head_dim: size of a key head.
        v_head_dim: size of a value head.
        dtype: element type of keys and values.
        window: number of keys a query sees, itself included, or None for all.
        kind: what the tensors mean to the attention kernel.
    """

    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)
    dtype: DType
    window: int | None = Field(default=None, gt=0)
    kind: Literal["attention"] = "attention"

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one layer keeps of one token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * itemsize(self.dtype)

    def max_blocks(self, num_tokens: int, *, block_size: int, max_chunk: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` holds at once when it runs alone.

        With a window, blocks that no query sees any more are given back, so that only the window
        and the ``max_chunk`` tokens computed at once count, and the two blocks they begin and end
        in.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-(self.window + max_chunk) // block_size) + 1)


class CacheConfig(FrozenConfig):
    """The size of the paged cache, for every group alike.

    Attributes:
        block_size: tokens a block.
        num_blocks: blocks a group, the null block 0 included.
        enable_prefix_caching: whether full blocks are kept and shared by their hash.
    """

    block_size: int = Field(gt=0)
    num_blocks: int = Field(gt=1)
    enable_prefix_caching: bool = True
