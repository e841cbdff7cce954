"""How much cache a budget buys, as pure arithmetic over the layers' cache specs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.configs import CacheConfig, KVCacheSpec
from engine_core.errors import CacheMemoryError, OptionError

# What a row of the persistent batch takes besides its block tables. For each token of the
# vocabulary: whether it is in the prompt, its count in the output and its bias, once a request asks
# for them. And the sampler's numbers, the last token, the lengths and what the scheduler keeps.
_ROW_BYTES_PER_TOKEN = 1 + 4 + 4
_ROW_BYTES = 256
_TABLE_ITEMSIZE = 4
# What a token of a step takes at least: its id, position and row, and its slot in each group; and
# its hidden state twice, as a layer's input and output.
_STEP_NUMBERS = 3
_STEP_ITEMSIZE = 8
_HIDDEN_STATES = 2


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache that a budget buys.

    Attributes:
        cache_config: block size and blocks a group.
        groups: the distinct specs, in order of their first layer.
        layer_groups: for each layer, the index of its group.
        bytes_per_block: bytes that one block takes over all groups and layers.
        max_model_len: longest sequence that fits.
    """

    cache_config: CacheConfig
    groups: tuple[KVCacheSpec, ...]
    layer_groups: tuple[int, ...]
    bytes_per_block: int
    max_model_len: int


def plan_cache(
    specs: Sequence[KVCacheSpec],
    *,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    max_model_len: int,
    shorten: bool,
    enable_prefix_caching: bool,
) -> CachePlan:
    """Divide ``budget`` bytes into blocks.

    Args:
        specs: one a layer.
        block_size: tokens a block.
        budget: bytes for the cache.
        max_num_seqs: sequences at once; more blocks than they can fill are not made.
        max_model_len: longest sequence wanted.
        shorten: whether a smaller ``max_model_len`` may be planned if the budget asks for it.
        enable_prefix_caching: passed on.

    Raises:
        CacheMemoryError: one sequence of ``max_model_len`` does not fit and ``shorten`` is false,
            or not even one block does.
    """
    groups = tuple(dict.fromkeys(specs))
    layer_groups = tuple(groups.index(spec) for spec in specs)
    bytes_per_block = block_size * sum(spec.bytes_per_token for spec in specs)
    blocks_a_sequence = -(-max_model_len // block_size)
    # Block 0 is never handed out: padding is written there.
    usable = budget // bytes_per_block - 1
    if usable < blocks_a_sequence:
        if not shorten or usable < 1:
            shorter = (
                f", or set max_model_len to at most {usable * block_size}" if usable > 0 else ""
            )
            raise CacheMemoryError(
                f"a sequence of {max_model_len} tokens needs "
                f"{(blocks_a_sequence + 1) * bytes_per_block} bytes of KV cache, but "
                f"kv_cache_memory is {budget}: raise it{shorter}"
            )
        max_model_len = usable * block_size
    num_blocks = 1 + min(usable, max_num_seqs * blocks_a_sequence)
    return CachePlan(
        cache_config=CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
        ),
        groups=groups,
        layer_groups=layer_groups,
        bytes_per_block=bytes_per_block,
        max_model_len=max_model_len,
    )


def check_memory(
    plan: CachePlan,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    hidden_bytes: int,
    total: int,
) -> None:
    """Refuse a cache, a batch and a step that the memory could not hold if it were empty.

    Args:
        plan: the cache.
        max_num_seqs: rows of the persistent batch.
        max_num_batched_tokens: prompt tokens of one step.
        vocab_size: columns of the logits.
        hidden_bytes: bytes of one token's hidden state.
        total: bytes of memory.

    Raises:
        OptionError: the cache is larger, or the batch or a step is too large beside it; names the
            setting.
    """
    cache = plan.bytes_per_block * plan.cache_config.num_blocks
    if cache > total:
        raise OptionError(
            f"kv_cache_memory is for a KV cache of {cache} bytes, but there are {total}: set it "
            "lower"
        )
    blocks = -(-plan.max_model_len // plan.cache_config.block_size)
    row = (
        len(plan.groups) * blocks * _TABLE_ITEMSIZE + vocab_size * _ROW_BYTES_PER_TOKEN + _ROW_BYTES
    )
    if max_num_seqs * row > total - cache:
        raise OptionError(
            f"max_num_seqs is {max_num_seqs}, and the batch takes up to {row} bytes a sequence, "
            f"{max_num_seqs * row} in all, but the KV cache leaves {total - cache} of the {total} "
            f"bytes that there are: set it to at most {(total - cache) // row}"
        )
    numbers = (_STEP_NUMBERS + len(plan.groups)) * _STEP_ITEMSIZE
    token = numbers + _HIDDEN_STATES * hidden_bytes
    if max_num_batched_tokens * token > total - cache:
        raise OptionError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, and a step takes at least "
            f"{token} bytes a token, {max_num_batched_tokens * token} in all, but the KV cache "
            f"leaves {total - cache} of the {total} bytes that there are: set it to at most "
            f"{(total - cache) // token}"
        )
