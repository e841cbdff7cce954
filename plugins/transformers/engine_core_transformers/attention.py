"""Transformers' attention interface over the paged cache, and what a model asks of it.

While a model is built it runs once on the meta device under the name ``TRACED``: each call of the
interface is noted with its heads, scale and mask, and :class:`Attention` layers are made of that.
Later runs go under ``PAGED``, for which transformers makes no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine_core.kernels import apply_rotary, rotary_store
from engine_core.nn import Attention
from engine_core.step_context import AttentionMetadata

PAGED, TRACED = "engine_core_paged", "engine_core_traced"
_LAYER = "_engine_core_attention"
# What models hand on to the interface that changes no result here.
_HARMLESS = frozenset({
    "dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "past_key_values",
    "cache", "position_embeddings", "layer_idx", "output_hidden_states", "return_dict",
    "cache_position", "output_router_logits", "training", "deterministic", "batch_size",
})  # fmt: skip


class UnsupportedError(Exception):
    """A model asks for what the cache or the kernels cannot do; the message says what."""


@dataclass(slots=True)
class Step:
    """The caches and lengths of the step that runs now; the layers of a model share it."""

    metadata: AttentionMetadata | None = None
    alone: bool = False
    """Whether each token sees itself only, to find out whether others reach it elsewhere."""
    angles: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """By identity a model's cosines, which are kept, and cosines and sines as our kernel takes."""
    normed: tuple[object, Tensor, Tensor] | None = None
    """A norm, what it is expected to be asked of next, and the result."""

    def begin(self) -> None:
        """Forget what was kept for a step."""
        self.angles.clear()
        self.normed = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A rotation of queries and keys ``[1, heads, T, D]`` where they lie."""

    query: Tensor
    key: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool

    def now(self) -> None:
        """Do it."""
        both = rows(self.query), rows(self.key)
        apply_rotary(*both, self.cos, self.sin, interleaved=self.interleaved)


class PagedAttention(Attention):
    """The attention of one of the model's own modules.

    Attributes:
        turn: a rotation that was left to this layer.
        offered: the queries and keys of the last call in which tokens saw themselves only.
    """

    step: Step
    cache: tuple[Tensor, Tensor] | None = None
    turn: Turn | None = None
    offered: tuple[Tensor | None, Tensor | None] = (None, None)

    def forward_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[1, heads, T, D]`` and the like to ``[1, T, heads, Dv]``."""
        turn, self.turn = self.turn, None
        own = turn is not None and turn.query is query and turn.key is key
        if turn is not None and (self.step.alone or not own):
            turn.now()
        if self.step.alone:
            self.offered = (query, key)
            group = query.shape[1] // value.shape[1]
            return value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous()
        assert self.cache is not None, "the model's forward sets it"
        assert self.step.metadata is not None, "the model's forward sets it"
        metadata, cache = self.step.metadata, self.cache
        q, k, v = (_heads_together(rows(x)) for x in (query, key, value))
        if turn is None or not own:
            out: Tensor = self(q, k, v, *cache, metadata)
            return out[None]
        slots = metadata.groups[self.group_id].slot_mapping
        given = (q, k, v, turn.cos, turn.sin, *cache, slots)
        rotary_store(*given, interleaved=turn.interleaved, kv_scales=self.kv_scales)
        return self.attend(q, *cache, metadata)[None]


def rows(x: Tensor) -> Tensor:
    """``[1, heads, T, D]`` to ``[T, heads, D]``."""
    return x[0].transpose(0, 1)


def _heads_together(x: Tensor) -> Tensor:
    """``[T, heads, D]``, each token's heads one after another, as in a part of a fused qkv."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@dataclass(frozen=True, slots=True)
class _Call:
    """Attention as a module asked the interface for it, on this rank."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(slots=True)
class Trace:
    """Questions that a model on meta put to the interface.

    Attributes:
        calls: by the modules that called it, in order.
        masks: each with its window, or with why no layer may attend with it: some go to no layer.
    """

    calls: dict[nn.Module, _Call] = field(default_factory=dict)
    masks: list[tuple[Tensor, int | UnsupportedError | None]] = field(default_factory=list)


_TRACE: ContextVar[Trace | None] = ContextVar("engine_core_transformers_trace", default=None)


@contextmanager
def tracing() -> Iterator[Trace]:
    """Note what models that run under ``TRACED`` in the ``with`` block ask for."""
    trace = Trace()
    token = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(token)


def make_layers(trace: Trace, step: Step) -> list[PagedAttention]:
    """The attention layers that the traced modules asked for, hung into these modules."""
    layers = []
    for module, call in trace.calls.items():
        layer = PagedAttention(
            call.heads,
            call.head_dim,
            num_kv_heads=call.kv_heads,
            v_head_dim=call.v_head_dim,
            scale=call.scale,
            sliding_window=call.window,
            logit_softcapping=call.softcap,
        )
        layer.step = step
        module.add_module(_LAYER, layer)
        layers.append(layer)
    return layers


def attention_of(module: nn.Module) -> PagedAttention:
    """The layer of ours in a module that attends."""
    layer: Any = module._modules[_LAYER]
    return layer  # type: ignore[no-any-return]


def has_layer(module: nn.Module) -> bool:
    """Whether the module is one that attends, with a layer of ours in it."""
    return _LAYER in module._modules


def _paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    layer: PagedAttention = module._modules[_LAYER]  # type: ignore[assignment]
    return layer.forward_heads(query, key, value), None


def _traced(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    trace = _TRACE.get()
    assert trace is not None, "only run inside of tracing()"
    who = type(module).__name__
    if module in trace.calls:
        raise UnsupportedError(f"{who} attends twice in a step, which needs two caches")
    scale, softcap = kwargs.pop("scaling", None), kwargs.pop("softcap", None)
    window = kwargs.pop("sliding_window", None)
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedError(f"{who} sees later tokens (is_causal is false)")
    unknown = [k for k, v in kwargs.items() if v is not None and k not in _HARMLESS]
    if unknown:
        raise UnsupportedError(f"{who} gives attention {unknown[0]!r}, which it cannot take here")
    masked = [found for made, found in trace.masks if _is_whole(attention_mask, made)]
    if not masked:
        raise UnsupportedError(f"{who} attends without a mask that transformers' makers made")
    allowed = masked[0]
    if isinstance(allowed, UnsupportedError):
        raise allowed
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedError(f"{who} attends over other tokens than those of the step")
    if query.shape[-1] != key.shape[-1]:
        raise UnsupportedError(f"{who} has queries and keys of different sizes")
    if window is not None and allowed != window:
        raise UnsupportedError(f"{who} has a window of {window} and a mask of {allowed}")
    trace.calls[module] = _Call(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        v_head_dim=value.shape[-1],
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=allowed,
        softcap=softcap,
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _is_whole(mask: Any, made: Tensor) -> bool:
    """Whether a mask is ``made``, or the slice of it that leaves nothing out."""
    if mask is made:
        return True
    return isinstance(mask, Tensor) and mask._base is made and mask.shape == made.shape


def _traced_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: Any = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """A mask that is never used, noted with the window that its function describes."""
    trace = _TRACE.get()
    assert trace is not None, "only run inside of tracing()"
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    try:
        trace.masks.append((mask, _window(mask_function, local_size)))
    except UnsupportedError as error:
        trace.masks.append((mask, error))
    return mask


def _window(visible: Callable[..., Any], size: int | None) -> int | None:
    """The window of a causal mask, None for none, found by asking it about pairs of positions.

    Raises:
        UnsupportedError: it is another mask.
    """
    last = 4 * (size or 16) + 8
    keys = torch.arange(last, device="cpu")
    near = {0, 1, last // 3, last - 1}
    if size is not None:
        near |= {size - 2, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size}
    for query in sorted(place for place in near if 0 <= place < last):
        zero = torch.zeros((), dtype=torch.long, device="cpu")
        try:
            seen = visible(zero, zero, torch.tensor(query, device="cpu"), keys)
        except Exception as error:  # It looks at what is on the meta device, such as the prompt.
            raise UnsupportedError("its mask depends on more than positions") from error
        wanted = keys <= query
        if size is not None:
            wanted &= keys > query - size
        if not torch.equal(seen.expand_as(wanted), wanted):
            raise UnsupportedError(
                "its mask is neither causal nor that of a sliding window (bidirectional, by "
                "chunks, or by parts of the prompt)"
            )
    return size


ALL_ATTENTION_FUNCTIONS.register(PAGED, _paged)
ALL_ATTENTION_FUNCTIONS.register(TRACED, _traced)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRACED, _traced_mask)
