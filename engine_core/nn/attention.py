"""Attention over the paged cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import CacheSpec, KVCacheSpec
from engine_core.configs.cache import KVCodes
from engine_core.configs.dtypes import dtype_name
from engine_core.errors import PluginLoadError
from engine_core.kernels import paged_attention, store_kv
from engine_core.nn.loading import copy_checked, set_weight_loader
from engine_core.nn.module import Module
from engine_core.step_context import AttentionMetadata, current_build_context

KVCacheLayer = tuple[Tensor, Tensor]
_CODES: dict[str, KVCodes] = {"fp8": "float8_e4m3fn", "int8": "int8"}


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes of ALiBi (Press et al., 2021), ``[num_heads]`` float32 on the CPU.

    For a count that is no power of two: the slopes of the next lower power, then every other slope
    of its double.
    """

    def powers(count: int, step: int, first: int) -> list[float]:
        start = 2.0 ** (-8.0 / count)
        return [start ** (first + step * i) for i in range(count // step)]

    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = powers(lower, 1, 1)
    if lower < num_heads:
        slopes += powers(2 * lower, 2, 1)[: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def _load_scale(param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
    assert shard_id is None, "a scale has no parts"
    copy_checked(param, tensor.reshape(1))


class CachedLayer(Module):
    """A layer that keeps something of each sequence in the paged cache.

    The engine gives every such layer its tensors, as its spec names them, in the model's
    ``past_key_values``, in the order of ``model.modules()``.

    Attributes:
        group_id: index of its cache group in ``AttentionMetadata.groups``; set by the runner.
        block_size: tokens of a block of that group; set by the runner too. It may be a multiple of
            ``EngineConfig.block_size``.
    """

    group_id: int = 0
    block_size: int = 0

    def cache_spec(self) -> CacheSpec:
        """The cache spec of this layer, on this rank."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it keeps")


def cached_layers(model: nn.Module) -> list[CachedLayer]:
    """The layers of a model that keep something in the cache, in its order."""
    return [module for module in model.modules() if isinstance(module, CachedLayer)]


def cache_specs(model: nn.Module) -> tuple[CacheSpec, ...]:
    """The cache specs of :func:`cached_layers`, in their order; none of a model that only encodes.

    Raises:
        PluginLoadError: there is none, or one fails or contradicts itself; names the layer.
    """
    specs = []
    for name, layer in model.named_modules():
        if not isinstance(layer, CachedLayer):
            continue
        try:
            spec = layer.cache_spec()
            fault = _fault(spec)
        except Exception as error:  # Of a package; nothing is known of what it may raise.
            fault = f"fails: {type(error).__name__}: {error}"
        if fault is not None:
            raise PluginLoadError(f"{name} ({type(layer).__name__}): its cache spec {fault}")
        specs.append(spec)
    if not specs and not getattr(model, "encoder_only", False):
        raise PluginLoadError(
            f"{type(model).__name__} has no layer that keeps anything in the cache; derive one "
            "from CachedLayer, or set encoder_only if it attends in both directions"
        )
    return tuple(specs)


def _fault(spec: Any) -> str | None:
    if not isinstance(spec, CacheSpec):
        return f"is {spec!r}; return a CacheSpec"
    if min((tensor.nbytes for tensor in spec.tensors(16)), default=0) <= 0:
        return "names no tensor, or one without elements"
    positions = (0, 1, 15, 16, 17, 1000, 100_000)
    first = [spec.first_needed(position) for position in positions]
    if first != sorted(first) or any(a < 0 or a > b for a, b in zip(first, positions, strict=True)):
        return (
            f"says that tokens at {list(positions)} need positions from {first} on; these must "
            "neither fall nor be negative, nor lie behind the token"
        )
    return None


class Attention(CachedLayer):
    """Stores this step's keys and values and attends over all of them, as they are stored.

    So a token sees the same numbers however its prompt is chunked, also in a cache of 8 bits.

    Attributes:
        codes: element type of such a cache; None if it keeps numbers as they are.
        kv_scales: of all keys and of all values, where a checkpoint has them; None to take the
            greatest number of each token and head.
    """

    slopes: Tensor | None
    kv_scales: tuple[float, float] | None = None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        scale: float | None = None,
        alibi: bool = False,
        sliding_window: int | None = None,
        logit_softcapping: float | None = None,
    ) -> None:
        """``num_heads`` and ``num_kv_heads`` are those of this rank.

        Args:
            num_heads: query heads.
            head_dim: size of a query and key head.
            num_kv_heads: key and value heads; as many as ``num_heads`` if None.
            v_head_dim: size of a value head; ``head_dim`` if None.
            scale: of the scores; ``head_dim ** -0.5`` if None.
            alibi: add ALiBi's linear bias.
            sliding_window: how many keys a query sees, itself included; None for all.
            logit_softcapping: scores pass ``cap * tanh(score / cap)``; None for no cap.
        """
        super().__init__()
        context = current_build_context()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim or head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        # No sequence is as long, and kernels take integers of 64 bits.
        self.window = None if (sliding_window or 0) >= 2**31 else sliding_window
        self.softcap = logit_softcapping
        self.dtype = context.dtype or torch.get_default_dtype()
        self.deterministic = context.deterministic
        self.codes = _CODES.get(context.kv_cache_dtype)
        slopes = None
        if alibi:
            every = alibi_slopes(num_heads * context.tp_size)
            slopes = every[context.tp_rank * num_heads :][:num_heads].clone()
        self.register_buffer("slopes", slopes, persistent=False)

    def expect_scales(self) -> None:
        """Add parameters ``k_scale [1]`` and ``v_scale [1]`` on meta, for a checkpoint's."""
        for name in ("k_scale", "v_scale"):
            empty = torch.empty(1, dtype=torch.float32, device="meta")
            param = nn.Parameter(empty, requires_grad=False)
            set_weight_loader(param, _load_scale)
            self.register_parameter(name, param)

    def cache_spec(self) -> KVCacheSpec:
        """The cache spec of this layer."""
        return KVCacheSpec(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.codes or dtype_name(str(self.dtype).removeprefix("torch.")),
            window=self.window,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """``q [T, heads, D]``, ``k [T, kv, D]``, ``v [T, kv, Dv]`` to ``[T, heads, Dv]``."""
        slots = attn_metadata.groups[self.group_id].slot_mapping
        store_kv(k, v, k_cache, v_cache, slots, self.kv_scales)
        return self.attend(q, k_cache, v_cache, attn_metadata)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: AttentionMetadata,
        *,
        chained: int = 0,
    ) -> Tensor:
        """``q [T, heads, D]`` to ``[T, heads, Dv]``; this step's keys and values are stored.

        ``chained`` has the bits of the codes of a chain of linears that follows, for which the
        kernel may make room; 0 if none does.
        """
        return paged_attention(
            q,
            k_cache,
            v_cache,
            block_tables=attn_metadata.groups[self.group_id].block_tables,
            query_start=attn_metadata.query_start,
            kv_lens=attn_metadata.kv_lens,
            max_query_len=attn_metadata.max_query_len,
            max_kv_len=attn_metadata.max_kv_len,
            num_decode_rows=attn_metadata.num_decode_rows,
            scale=self.scale,
            alibi_slopes=self.slopes,
            window=self.window,
            softcap=self.softcap,
            prefix_lens=attn_metadata.prefix_lens,
            memo=attn_metadata.memos.setdefault(self.group_id, {}),
            deterministic=self.deterministic,
            chained=chained,
        )
