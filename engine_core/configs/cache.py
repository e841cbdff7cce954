"""Cache specs, the contents of a layer's cache per sequence, and the cache's size."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Literal, get_args

from pydantic import Field, model_validator

from engine_core.configs.base import FrozenConfig
from engine_core.configs.dtypes import DType, itemsize

CacheDType = Literal[
    "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "int8", "uint8"
]
KVCodes = Literal["float8_e4m3fn", "int8"]


class CacheTensor(FrozenConfig):
    """One tensor of a layer's cache.

    Attributes:
        name: its author's name for it; for messages.
        shape: of one block.
        dtype: element type.
        zeroed: whether a block is filled with zeros before a sequence writes to it first. Otherwise
            it holds the data of its last owner, which may be any number, NaN included.
    """

    name: str
    shape: tuple[int, ...]
    dtype: CacheDType
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return prod(self.shape) * itemsize(self.dtype)


class CacheSpec(FrozenConfig):
    """One layer's cache for a sequence. Layers with equal specs share block tables.

    A layer's author derives from it and says with :meth:`tensors` what a block holds. A layer that
    does not look at all earlier tokens overrides :meth:`first_needed` too; how many blocks a
    sequence holds and what a hit of the prefix cache needs follow from it.
    """

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        """The layer's tensors, in the order in which the layer is given them.

        Args:
            block_size: tokens of a block.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its tensors are")

    def first_needed(self, position: int) -> int:
        """The first position whose contents a token at ``position`` or later needs.

        It never falls as ``position`` grows. Blocks before it are given back, and a cached prefix
        that ends at ``position`` needs no blocks before it.
        """
        return 0

    def max_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` holds at once when it runs alone.

        Args:
            num_tokens: length of the sequence.
            block_size: tokens of a block.
            max_chunk: tokens that one step computes.
        """
        held = num_tokens - self.first_needed(max(0, num_tokens - max_chunk))
        # What is held may begin and end inside a block.
        return min(-(-num_tokens // block_size), -(-held // block_size) + 1)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes that one layer keeps in a block."""
        return sum(tensor.nbytes for tensor in self.tensors(block_size))

    @cached_property
    def keeps_state(self) -> bool:
        """Whether a block has equal bytes, whatever its number of tokens."""
        return self.bytes_per_block(1) == self.bytes_per_block(2)


class KVCacheSpec(CacheSpec):
    """The keys and values of an attention layer.

    Attributes:
        num_kv_heads: key and value heads on this rank.
        head_dim: size of a key head.
        v_head_dim: size of a value head.
        dtype: element type of keys and values. Those of 8 bits have a scale for each token and
            head beside them, in the same block.
        window: number of keys a query sees, itself included, or None for all.
    """

    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)
    dtype: DType | KVCodes
    window: int | None = Field(default=None, gt=0)

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        """Keys and values, ``[block_size, num_kv_heads, head_dim or v_head_dim]``.

        Of codes the last size counts the 4 bytes of the scale too; a block has all codes before
        all scales, see :func:`engine_core.kernels.codes.cache_parts`.
        """
        shape = (block_size, self.num_kv_heads)
        scale = 4 if self.quantized else 0
        return (
            CacheTensor(name="keys", shape=(*shape, self.head_dim + scale), dtype=self.dtype),
            CacheTensor(name="values", shape=(*shape, self.v_head_dim + scale), dtype=self.dtype),
        )

    @property
    def quantized(self) -> bool:
        """Whether keys and values are codes, with scales."""
        return self.dtype in get_args(KVCodes)

    def first_needed(self, position: int) -> int:
        """The first key that a query at ``position`` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


class LatentCacheSpec(CacheSpec):
    """The latent vectors of an attention layer (MLA): all that its heads' keys and values need.

    Attributes:
        latent_dim: size of the vector that keys and values are projected from.
        rope_dim: size of the rotated part of a key, which all heads share.
        dtype: element type of both.
    """

    latent_dim: int = Field(gt=0)
    rope_dim: int = Field(gt=0)
    dtype: DType

    def tensors(self, block_size: int) -> tuple[CacheTensor, ...]:
        """``[block_size, latent_dim + rope_dim]``: the latent vector first."""
        shape = (block_size, self.latent_dim + self.rope_dim)
        return (CacheTensor(name="latents", shape=shape, dtype=self.dtype),)


class CacheGroup(FrozenConfig):
    """Layers that share block tables.

    Attributes:
        spec: the cache of each of them.
        block_size: tokens of a block.
    """

    spec: CacheSpec
    block_size: int = Field(gt=0)


class CacheConfig(FrozenConfig):
    """The paged cache: groups of layers that draw blocks of equal bytes from one pool.

    Attributes:
        groups: the cache groups of the model; none if its layers keep nothing. Each block size is a
            multiple of the smallest.
        num_blocks: blocks of the pool, the null block 0 included.
        enable_prefix_caching: whether full blocks are kept and shared by their hash.
    """

    groups: tuple[CacheGroup, ...]
    num_blocks: int = Field(gt=1)
    enable_prefix_caching: bool = True

    @model_validator(mode="after")
    def _check(self) -> CacheConfig:
        sizes = [group.block_size for group in self.groups]
        largest = max(sizes, default=0)
        if any(largest % size or size % min(sizes) for size in sizes):
            raise ValueError(f"block sizes must divide one another, got {sizes}")
        return self

    @cached_property
    def block_size(self) -> int:
        """Tokens of the smallest block."""
        return min((group.block_size for group in self.groups), default=1)

    def max_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """The most blocks of all groups together that a sequence holds when it runs alone.

        Args:
            num_tokens: length of the sequence.
            max_chunk: tokens that one step computes.
        """
        return sum(
            group.spec.max_blocks(num_tokens, group.block_size, max_chunk) for group in self.groups
        )
