"""The plan of a cache within a budget: pure arithmetic over the layers' cache specs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.configs import CacheConfig, CacheGroup, CacheSpec, EngineConfig
from engine_core.errors import CacheMemoryError, OptionError

if TYPE_CHECKING:
    from engine_core.inputs import MediaLimit

# What a row of the persistent batch takes besides its block tables. For each token of the
# vocabulary: whether it was seen, its count in the output, its bias, and a place in the list of
# those that were seen, once a request asks for them. And the sampler's numbers, the last token, the
# lengths and what the scheduler keeps.
_ROW_BYTES_PER_TOKEN = 1 + 4 + 4 + 4
_ROW_BYTES = 256
_TABLE_ITEMSIZE = 4
# What a token of a step takes at least: its id, position and row, and its slot in each group; and
# its hidden state twice, as a layer's input and output.
_STEP_NUMBERS = 3
_STEP_ITEMSIZE = 8
_HIDDEN_STATES = 2


# Inside a block every tensor begins at a multiple of so many bytes, as vector loads and TMA ask.
ALIGNMENT = 16
# Padding's share of the bytes that any kind of layer keeps, at most, where that can be had.
_PADDING = 0.1
# A kind of layer that keeps fewer bytes per token has blocks of at most so many times the tokens;
# beside states, which are large, up to four times as many where less is lost so.
_MOST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The cache that fits into a budget.

    All groups draw from one pool, so that a block has the same bytes in each of them. A block lies
    in one or more planes, each of which holds its part of all blocks, one after the other.

    Attributes:
        cache_config: groups of layers, and the number of blocks.
        layer_groups: for each layer, the index of its group.
        planes: bytes of a block in each plane. If there are several, they are those of the tensors
            of the group with the most, in order; those of any other group take the first of them.
            In a single plane a group's tensors follow one another, each aligned to 16 bytes.
        max_model_len: longest sequence that fits.
        full_sequences: sequences of ``max_model_len`` that fit at once.
        max_tokens: tokens that fit in all, in sequences of about ``max_model_len``.
    """

    cache_config: CacheConfig
    layer_groups: tuple[int, ...]
    planes: tuple[int, ...]
    max_model_len: int
    full_sequences: int = 0
    max_tokens: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers of any one group."""
        return sum(self.planes)


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """Memory that pictures, videos and sounds take beside weights and KV cache, in bytes.

    Attributes:
        cache: embeddings that are kept.
        activations: what the encoder takes, at most, while it computes as many.
    """

    cache: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.cache + self.activations


_NO_MEDIA = MediaPlan()


def plan_media(
    limits: Mapping[str, MediaLimit | None], num_embeddings: int, hidden_size: int, itemsize: int
) -> MediaPlan:
    """The memory for an encoder cache; none for a model that takes text alone.

    Args:
        limits: of each kind that the model takes; None where the family states none.
        num_embeddings: ``encoder_cache_tokens``. A step computes no more than it keeps.
        hidden_size: numbers of an embedding.
        itemsize: bytes of a number.
    """
    if not limits:
        return _NO_MEDIA
    each = max(limit.activations if limit else 0 for limit in limits.values())
    return MediaPlan(num_embeddings * hidden_size * itemsize, num_embeddings * each * itemsize)


def plan_cache(
    specs: Sequence[CacheSpec],
    config: EngineConfig,
    *,
    block_size: int,
    budget: int,
    max_model_len: int,
) -> CachePlan:
    """Divide ``budget`` bytes into blocks.

    Args:
        specs: one for each layer.
        config: rows, tokens of a step, prefix caching; a length that may not be shortened.
        block_size: tokens of a block; layers that keep less of a token may get larger ones.
        budget: bytes for the cache. No more blocks are made than ``max_num_seqs`` sequences fill.
        max_model_len: longest sequence wanted.

    Without specs, as of an encoder, there is nothing to divide.

    Raises:
        CacheMemoryError: one sequence of ``max_model_len`` does not fit and the user asked for that
            length, or not even one block does.
    """
    if not specs:
        nothing = CacheConfig(groups=(), num_blocks=2, enable_prefix_caching=False)
        return CachePlan(nothing, (), (), max_model_len, config.max_num_seqs)
    members, layer_groups = _group_layers(
        specs, block_size, 0 if config.enable_prefix_caching else max_model_len
    )
    planes = _planes(members)
    page = sum(planes)

    def planned(num_blocks: int) -> CacheConfig:
        return CacheConfig(
            groups=tuple(group for group, _ in members),
            num_blocks=max(2, num_blocks),
            enable_prefix_caching=config.enable_prefix_caching,
        )

    max_chunk = config.max_num_batched_tokens

    def needed(num_tokens: int, chunk: int = max_chunk) -> int:
        return sizes.max_blocks(num_tokens, chunk)

    # Block 0 is never handed out: padding is written there.
    usable = budget // page - 1
    sizes = planned(usable + 1)
    whole = sizes.block_size
    most = needed(max_model_len)
    if usable < most:
        lengths = range(whole, max_model_len + whole, whole)
        shortened = whole * bisect_right(lengths, usable, key=needed)
        if config.max_model_len is not None or shortened == 0:
            shorter = f", or set max_model_len to at most {shortened}" if shortened > 0 else ""
            raise CacheMemoryError(
                f"a sequence of {max_model_len} tokens needs {(most + 1) * page} bytes of KV "
                f"cache, but kv_cache_memory is {budget}: raise it{shorter}"
            )
        max_model_len = shortened
    most = needed(max_model_len)
    # Between their chunks sequences hold less; one budget of tokens at once is for all of them.
    held = needed(max_model_len, 1)
    return CachePlan(
        cache_config=planned(1 + min(usable, config.max_num_seqs * most)),
        layer_groups=layer_groups,
        planes=planes,
        max_model_len=max_model_len,
        full_sequences=1 + (usable - most) // held,
        max_tokens=usable * (-(-max_model_len // whole) * whole) // held,
    )


def _group_layers(
    specs: Sequence[CacheSpec], block_size: int, longest: int = 0
) -> tuple[list[tuple[CacheGroup, int]], tuple[int, ...]]:
    """Divide layers into groups whose blocks are about as large.

    Layers of one kind need not be in one group: a block then holds a few layers, of any kind. The
    more layers it holds the fewer block tables there are, but the more is lost where a kind's
    layers do not fill its last group. Of a kind whose blocks keep a state, however many tokens they
    have, one block has all of ``longest`` tokens: where no prefix is kept, none of its own is
    needed.

    Returns:
        each group with its number of layers, and the group of each layer.
    """
    kinds = list(dict.fromkeys(specs))
    counts = [specs.count(kind) for kind in kinds]
    largest = max(kind.bytes_per_block(block_size) for kind in kinds)

    def padding(width: int, weights: Sequence[int]) -> float:
        """The worst kind's share of lost bytes in blocks of ``width`` layers of the largest."""
        shares = []
        for count, weight in zip(counts, weights, strict=True):
            needed = -(-count // min(count, width * largest // weight))
            shares.append(needed * width * largest / (count * weight) - 1)
        return max(shares)

    # A few layers' keys of many tokens are less than a state.
    over_states = any(kind.keeps_state and kind.bytes_per_block(1) == largest for kind in kinds)
    layouts = []
    for factor in (1, 2, 4) if over_states else (1,):
        sizes = []
        for kind in kinds:
            size, most = block_size, factor * _MOST_TOKENS * block_size
            while size < most and kind.bytes_per_block(2 * size) <= largest:
                size *= 2
            while size < longest and kind.keeps_state:
                size *= 2
            sizes.append(size)
        weights = [kind.bytes_per_block(size) for kind, size in zip(kinds, sizes, strict=True)]
        widths = range(max(counts), 0, -1)
        lost = {width: padding(width, weights) for width in widths}
        enough = (width for width in widths if lost[width] <= _PADDING)
        width = next(enough, None) or min(lost, key=lost.__getitem__)
        layouts.append((max(lost[width], _PADDING), width, sizes, weights))
    _, width, sizes, weights = min(layouts, key=lambda layout: layout[0])
    members: list[tuple[CacheGroup, int]] = []
    layer_groups = [0] * len(specs)
    for kind, count, size, weight in zip(kinds, counts, sizes, weights, strict=True):
        layers = [index for index, spec in enumerate(specs) if spec == kind]
        most = min(count, width * largest // weight)
        for first in range(0, count, most):
            for layer in layers[first : first + most]:
                layer_groups[layer] = len(members)
            members.append((CacheGroup(spec=kind, block_size=size), len(layers[first:][:most])))
    return members, tuple(layer_groups)


def pages(
    specs: Sequence[CacheSpec], block_size: int, counts: Sequence[int]
) -> tuple[int, list[int]]:
    """Bytes of a block over all layers, and over each run of so many of them."""
    members, layer_groups = _group_layers(specs, block_size)
    groups, each, begin = [group for group, _ in members], [], 0
    for count in counts:
        each.append(sum(planes_of(groups, layer_groups[begin : begin + count])))
        begin += count
    return sum(_planes(members)), each


def planes_of(groups: Sequence[CacheGroup], layer_groups: Sequence[int]) -> tuple[int, ...]:
    """Bytes of a block in each plane, for layers of which each is in one of the groups."""
    counts = Counter(layer_groups)
    return _planes([(group, counts[index]) for index, group in enumerate(groups)])


def _planes(members: Sequence[tuple[CacheGroup, int]]) -> tuple[int, ...]:
    """Bytes of a block in each plane; see :class:`CachePlan`.

    A plane for each tensor, as kernels like best, if the tensors of all groups are of equal bytes.
    """
    tensors = [
        [tensor.nbytes for tensor in group.spec.tensors(group.block_size)] * num_layers
        for group, num_layers in members
    ]
    longest = max(tensors, key=len)
    if all(sizes == longest[: len(sizes)] for sizes in tensors):
        return tuple(longest)
    return (max(sum(-(-size // ALIGNMENT) for size in sizes) * ALIGNMENT for sizes in tensors),)


def check_memory(
    plan: CachePlan,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    hidden_bytes: int,
    total: int,
    media: MediaPlan = _NO_MEDIA,
) -> None:
    """Refuse a cache, a batch and a step that the memory could not hold if it were empty.

    Args:
        plan: the cache.
        max_num_seqs: rows of the persistent batch.
        max_num_batched_tokens: prompt tokens of one step.
        vocab_size: columns of the logits.
        hidden_bytes: bytes of one token's hidden state.
        total: bytes of memory.
        media: of the encoder.

    Raises:
        OptionError: the cache or the encoder's memory is larger, or the batch or a step is too
            large beside it; names the setting.
    """
    cache = plan.bytes_per_block * plan.cache_config.num_blocks
    if cache > total:
        raise OptionError(
            f"kv_cache_memory makes a KV cache of {cache} bytes, but the memory has {total}: set "
            "kv_cache_memory lower"
        )
    if media.total > total - cache:
        raise OptionError(
            f"encoder_cache_tokens makes the encoder take {media.total} bytes, {media.cache} of "
            f"them to keep embeddings, but the KV cache leaves {total - cache} of the {total} "
            "bytes of memory: set encoder_cache_tokens lower"
        )
    groups = plan.cache_config.groups
    blocks = sum(-(-plan.max_model_len // group.block_size) for group in groups)
    row = blocks * _TABLE_ITEMSIZE + vocab_size * _ROW_BYTES_PER_TOKEN + _ROW_BYTES
    if max_num_seqs * row > total - cache:
        raise OptionError(
            f"max_num_seqs is {max_num_seqs}, and the batch takes up to {row} bytes per sequence, "
            f"{max_num_seqs * row} in all, but the KV cache leaves {total - cache} of the {total} "
            f"bytes of memory: set max_num_seqs to at most {(total - cache) // row}"
        )
    numbers = (_STEP_NUMBERS + len(groups)) * _STEP_ITEMSIZE
    token = numbers + _HIDDEN_STATES * hidden_bytes
    if max_num_batched_tokens * token > total - cache:
        raise OptionError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, and a step takes at least "
            f"{token} bytes per token, {max_num_batched_tokens * token} in all, but the KV cache "
            f"leaves {total - cache} of the {total} bytes of memory: set max_num_batched_tokens to "
            f"at most {(total - cache) // token}"
        )
