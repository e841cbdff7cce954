"""Contexts of a forward pass and of a model's construction.

Forward metadata are arguments, so that a layer can be run alone. Construction has a context,
because the ``build_*`` functions of :mod:`engine_core.nn` take no rank: the loader enters
:func:`building` around the model's constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine_core.configs.engine import KVCacheDType


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Settings that the layers of a model are built for.

    Attributes:
        dtype: element type of parameters, or None for torch's default.
        device: where parameters are made, or None for torch's default.
        tp_rank: this process's rank among those that share the model.
        tp_size: how many processes share it.
        process_group: their ``torch.distributed`` group; None if ``tp_size`` is 1.
        rank_memory: their :class:`~engine_core.kernels.RankMemory`; None if they have none.
        deterministic: whether the layers give a token the same values, bit for bit, whatever else
            is computed beside it.
        kv_cache_dtype: element type of keys and values in the cache, as of
            :class:`~engine_core.configs.EngineConfig`.
        expert_parallel: whether ranks have whole experts each, not a part of every expert.
        model_class: finds the class of an architecture, for a model that holds another family's;
            None if no registry is at hand.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    tp_rank: int = 0
    tp_size: int = 1
    process_group: Any = None
    rank_memory: Any = None
    deterministic: bool = False
    kv_cache_dtype: KVCacheDType = "auto"
    expert_parallel: bool = False
    model_class: Callable[[str], type] | None = None


_DEFAULT = BuildContext()
_CURRENT: ContextVar[BuildContext] = ContextVar("engine_core_build_context", default=_DEFAULT)


def current_build_context() -> BuildContext:
    """The context entered by :func:`building`; outside of it one rank and torch's defaults."""
    return _CURRENT.get()


@contextmanager
def building(context: BuildContext) -> Iterator[BuildContext]:
    """Build layers for ``context`` inside the ``with`` block."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """Where one cache group keeps the tokens of this step. R rows, T tokens.

    Attributes:
        block_tables: ``[R, max_blocks]`` int32, the blocks of each row.
        slot_mapping: ``[T]`` int64, ``block * block_size + offset`` where each token is stored;
            negative for padding.
    """

    block_tables: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention's inputs that are common to all layers of a step. R rows, T tokens.

    Attributes:
        query_start: ``[R + 1]`` int32, where each row's tokens begin among the T.
        kv_lens: ``[R]`` int32, tokens of each row in the cache after this step's are stored.
        max_query_len: the largest number of tokens of a row.
        max_kv_len: an upper bound of ``kv_lens``.
        num_decode_rows: the first so many rows have exactly one token.
        groups: one entry per cache group; each layer knows its own.
        prefix_lens: ``[R]`` int32, tokens at the beginning of a row that every token of it sees
            (a bidirectional context); None if there is none.
        memos: for each cache group what attention keeps from one layer to the next; see
            :func:`engine_core.kernels.paged_attention`.
    """

    query_start: Tensor
    kv_lens: Tensor
    max_query_len: int
    max_kv_len: int
    num_decode_rows: int
    groups: tuple[GroupMetadata, ...]
    prefix_lens: Tensor | None = None
    memos: dict[int, dict[Any, Any]] = field(default_factory=dict, init=False, compare=False)


@dataclass(frozen=True, slots=True)
class StepContext:
    """One forward pass. Written by the runner. R rows, T tokens.

    Attributes:
        input_ids: ``[1, T]`` int64.
        position_ids: ``[1, T]`` int64, linear positions.
        row_ids: ``[T]`` int64, the row (0 to R - 1) of each token.
        attn_metadata: see :class:`AttentionMetadata`.
        row_state: named tensors ``[R, ...]``: ``prompt_len`` and what the family's input
            processor gave.
        token_state: named tensors ``[k, T]`` from the input processor. A position beyond the
            prompt holds zeros: there the model derives what it needs from ``row_state``.
        inputs_embeds: ``[1, T, H]`` if a prompt brought embeddings, else None.
    """

    input_ids: Tensor
    position_ids: Tensor
    row_ids: Tensor
    attn_metadata: AttentionMetadata
    row_state: Mapping[str, Tensor] = field(default_factory=dict)
    token_state: Mapping[str, Tensor] = field(default_factory=dict)
    inputs_embeds: Tensor | None = None

    def model_inputs(self, past_key_values: Any) -> dict[str, Any]:
        """The keyword arguments of a model's ``forward`` that every family takes."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "past_key_values": past_key_values,
            "attn_metadata": self.attn_metadata,
            "inputs_embeds": self.inputs_embeds,
        }


class StepContextManager:
    """Build context kept by a model.

    Attributes:
        build_ctx: the context that the model was built in.
    """

    def __init__(self, build_ctx: BuildContext | None = None) -> None:
        self.build_ctx = build_ctx or current_build_context()
