"""The blocks that most decoders are made of; here is where their kernels can be fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from engine_core.kernels import (
    Undivided,
    linear,
    linear_add,
    linear_add_norm,
    linear_rotary_store,
    rotary_store,
    rotary_store_is_fused,
    takes_undivided,
)
from engine_core.nn.activation import SiluAndMul, build_gated_activation
from engine_core.nn.attention import Attention, KVCacheLayer
from engine_core.nn.linear import (
    Linear,
    UnquantizedLinearMethod,
    build_down_linear,
    build_gateup_linear,
    build_o_proj,
    build_qkv_proj,
)
from engine_core.nn.module import Module
from engine_core.nn.norm import RMSNorm
from engine_core.nn.rotary import ApplyRotaryEmb
from engine_core.step_context import AttentionMetadata

CosSin = tuple[Tensor, Tensor]


class SelfAttention(Module):
    """Project to q, k, v; normalise q and k if wanted; rotate; store; attend; project back."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        interleaved_rope: bool = False,
        alibi: bool = False,
        sliding_window: int | None = None,
        scale: float | None = None,
    ) -> None:
        """Head counts are the whole model's; ``qk_norm_eps`` adds an RMSNorm a head of q and k."""
        super().__init__()
        self.qkv_proj = build_qkv_proj(
            hidden_size, num_heads, num_kv_heads, head_dim, bias=qkv_bias
        )
        self.o_proj = build_o_proj(num_heads * head_dim, hidden_size, bias=o_bias)
        self.q_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.rotate = ApplyRotaryEmb(interleaved_rope)
        self.attend = Attention(
            self.qkv_proj.num_q_heads,
            head_dim,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            scale=scale,
            alibi=alibi,
            sliding_window=sliding_window,
        )

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """``x [1, T, H]`` to ``[1, T, H]``; ``cos_sin`` None for no rotation."""
        projected: Tensor = self.o_proj(self.heads(x, cos_sin, cache, attn_metadata))
        return projected

    def heads(
        self,
        x: Tensor | Undivided,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """What is projected back, ``[1, T, heads * head_dim]``."""
        q, k, v = self.qkv_proj.split_qkv(self.qkv_proj(x))
        if cos_sin is None or not rotary_store_is_fused(q):
            return self._one_by_one(q, k, v, cos_sin, cache, attn_metadata)
        self._normalise_rotate_store(q, k, v, cos_sin, cache, attn_metadata)
        return self._attended(q, cache, attn_metadata)

    def fused_heads(
        self,
        x: Tensor | Undivided,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """What :meth:`heads` gives, if ``qkv_proj`` is an unquantised linear of this rank alone.

        One launch may project, rotate and store.
        """
        if cos_sin is None or self.q_norm is not None:
            return self.heads(x, cos_sin, cache, attn_metadata)
        q = linear_rotary_store(
            x,
            self.qkv_proj.weight,
            self.qkv_proj.bias,
            *cos_sin,
            *cache[:2],
            attn_metadata.groups[self.attend.group_id].slot_mapping,
            interleaved=self.rotate.interleaved,
        )
        return self._attended(q, cache, attn_metadata)

    def _attended(self, q: Tensor, cache: KVCacheLayer, attn_metadata: AttentionMetadata) -> Tensor:
        """The heads of rotated queries, whose keys and values are stored."""
        return self.attend.attend(q, *cache[:2], attn_metadata).flatten(1).unsqueeze(0)

    def _one_by_one(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> Tensor:
        """The heads of queries, keys and values by the modules that this one has."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = self.rotate(q, k, *cos_sin)
        out: Tensor = self.attend(q, k, v, *cache[:2], attn_metadata)
        return out.flatten(1).unsqueeze(0)

    def _normalise_rotate_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: CosSin,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> None:
        """In one launch what the norms, ``rotate`` and the first half of ``attend`` do."""
        q_norm, k_norm = self.q_norm, self.k_norm
        rotary_store(
            q,
            k,
            v,
            *cos_sin,
            *cache[:2],
            attn_metadata.groups[self.attend.group_id].slot_mapping,
            q_weight=None if q_norm is None else q_norm.weight,
            k_weight=None if k_norm is None else k_norm.weight,
            eps=0.0 if q_norm is None else q_norm.eps,
            interleaved=self.rotate.interleaved,
        )


class GatedMLP(Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = build_gateup_linear(
            hidden_size, [intermediate_size, intermediate_size], bias=bias
        )
        self.down_proj = build_down_linear(intermediate_size, hidden_size, bias=bias)
        self.act = build_gated_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        out: Tensor = self.down_proj(self.gate_and_up(x))
        return out

    def gate_and_up(self, x: Tensor | Undivided) -> Tensor:
        """What is projected down, ``[1, T, intermediate_size]``."""
        layer = self.gate_up_proj
        fused = isinstance(self.act, SiluAndMul) and type(layer.method) is UnquantizedLinearMethod
        if isinstance(x, Undivided) or (x.is_cuda and fused):
            deterministic = layer.context.deterministic
            return linear(x, layer.weight, layer.bias, gated=True, batch_invariant=deterministic)
        out: Tensor = self.act(layer(x))
        return out


@dataclass(frozen=True, slots=True)
class Normalised:
    """What a :class:`DecoderLayer` gives to the one after it, whose input norm it has applied.

    Attributes:
        values: ``[1, T, H]``.
    """

    values: Tensor


class DecoderLayer(Module):
    """A pre-norm decoder layer: attention, then feed-forward, each added to the residual.

    On a GPU the additions and norms are fused with the linears before them. Where few tokens are
    computed, the norms' divisions are part of the linears after them: see :class:`Undivided`.
    """

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module]) -> None:
        """``norm`` makes each of the two norms; it takes ``(x, residual)`` as RMSNorm does."""
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        # The layer after this one, in a tuple, which keeps it from being a part of this one.
        self._next: tuple[DecoderLayer, ...] = ()

    def forward(
        self,
        x: Tensor | Undivided | Normalised,
        residual: Tensor | None,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> tuple[Tensor | Undivided | Normalised, Tensor]:
        """``(x, residual)`` to the next layer's.

        Their sum is the residual stream; where x comes from a linked layer and the input norm has
        been applied to it, the residual alone is, and it may be overwritten.
        """
        # Below, the residual is what came with such an x, or the sum that the input norm makes; but
        # in the first layer it is the caller's x.
        owned = residual is not None
        normed: Tensor | Undivided
        if isinstance(x, Undivided | Normalised):
            assert residual is not None, "the layer before gives the residual too"
            normed = x.values if isinstance(x, Normalised) else x
        elif residual is None:
            residual, normed = x, self.input_layernorm(x)
        else:
            normed, residual = self.input_layernorm(x, residual)
        parts = self._fused_parts(residual)
        if parts is None:
            x = self.self_attn(normed, cos_sin, cache, attn_metadata)
            x, residual = self.post_attention_layernorm(x, residual)
            return self.mlp(x), residual
        attention, mlp = parts
        heads = attention.fused_heads(normed, cos_sin, cache, attn_metadata)
        normed, residual = _add(
            attention.o_proj,
            heads,
            residual,
            self.post_attention_layernorm,
            undivided=isinstance(mlp.act, SiluAndMul)
            and takes_undivided(
                residual, attention.o_proj.weight, mlp.gate_up_proj.weight, gated=True
            ),
            may_overwrite=owned,
        )
        gated = mlp.gate_and_up(normed)
        for layer in self._next:
            following = layer._fused_parts(residual)
            if following is not None:
                normed, residual = _add(
                    mlp.down_proj,
                    gated,
                    residual,
                    layer.input_layernorm,
                    undivided=takes_undivided(
                        residual, mlp.down_proj.weight, following[0].qkv_proj.weight
                    ),
                    may_overwrite=True,
                )
                given = normed if isinstance(normed, Undivided) else Normalised(normed)
                return given, residual
        return mlp.down_proj(gated), residual

    def _fused_parts(self, x: Tensor) -> tuple[SelfAttention, GatedMLP] | None:
        """Attention and MLP if the layer's norms may be part of other launches than their own."""
        attention, mlp = self.self_attn, self.mlp
        if not x.is_cuda or type(attention) is not SelfAttention or type(mlp) is not GatedMLP:
            return None
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        fits = (
            type(self.input_layernorm) is RMSNorm
            and type(self.post_attention_layernorm) is RMSNorm
            and all(type(layer.method) is UnquantizedLinearMethod for layer in linears)
            and all(layer.context.tp_size == 1 for layer in linears)
            # How they add up depends on the number of rows.
            and not any(layer.context.deterministic for layer in linears)
            # Who watches a module is shown what it says that it takes and gives.
            and not any(
                module._forward_hooks or module._forward_pre_hooks
                for module in (
                    *(self, self.input_layernorm, self.post_attention_layernorm),
                    *(attention, mlp, mlp.act, *linears),
                )
            )
        )
        return (attention, mlp) if fits else None


def link_layers(layers: Sequence[nn.Module]) -> None:
    """Let each :class:`DecoderLayer` know the one after it, whose norm it may fuse.

    To be called where ``(x, residual)`` of one layer goes to the next and nowhere else.
    """
    for layer, following in pairwise(layers):
        if type(layer) is DecoderLayer and type(following) is DecoderLayer:
            layer._next = (following,)


def _add(
    layer: Linear,
    x: Tensor,
    residual: Tensor,
    norm: nn.Module,
    *,
    undivided: bool,
    may_overwrite: bool,
) -> tuple[Tensor | Undivided, Tensor]:
    """The norm of ``residual + layer(x)``, perhaps without its division, and that sum."""
    assert isinstance(norm, RMSNorm), "what the layer's parts are was looked at before"
    given = (x, layer.weight, layer.bias, residual, norm.weight, norm.eps)
    if undivided:
        return linear_add(*given)
    return linear_add_norm(*given, may_overwrite=may_overwrite)
