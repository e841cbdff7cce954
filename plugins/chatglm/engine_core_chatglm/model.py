"""ChatGLM-6B, and ChatGLM2-6B and ChatGLM3-6B, as each version's modeling_chatglm.py computes them.

The first is GLM (Du et al., 2022): a context that sees all of itself, then an answer. The later
ones are causal decoders with multi-query attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    MLP,
    CausalLM,
    CosSin,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
    Weights,
    build_embedding,
    build_lm_head,
    build_rotary_embedding,
    link_layers,
    load_stacked_weights,
)
from engine_core.step_context import AttentionMetadata, StepContext, StepContextManager

# Both versions' names of modules that engine_core.nn names otherwise, and of merged layers with
# shard ids.
_MODULES = {"attention": "self_attn", "self_attention": "self_attn"}
_LAYERS = {
    "dense": ("o_proj", None),
    "dense_4h_to_h": ("down_proj", None),
    "output_layer": ("lm_head", None),
}


class _ChatGLM(CausalLM):
    """Embedding, layers, final norm and head. Parameters are named without their containers."""

    def __init__(
        self,
        config: HFConfig,
        layers: Sequence[nn.Module],
        norm: nn.Module | None,
        rotary_emb: RotaryEmbedding,
        *,
        loading: Mapping[str, tuple[str, str | None]],
    ) -> None:
        """``loading`` says where a version's merged layers go; ``norm`` None leaves it out."""
        super().__init__()
        self.word_embeddings = build_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        link_layers(layers)
        self.final_layernorm = norm
        self.rotary_emb = rotary_emb
        self.lm_head = build_lm_head(config.hidden_size, config.vocab_size)
        self.loading = {**_LAYERS, **loading}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """``input_ids [1, T]`` to hidden states ``[1, T, H]``.

        ``position_ids`` are ``[1, T]``, or ``[2, T]`` if two kinds of position rotate two parts of
        a head.
        """
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        cos_sin = self.rotary_emb(position_ids)
        residual = None
        for layer, cache in zip(self.layers, past_key_values, strict=True):
            x, residual = layer(x, residual, cos_sin, cache, attn_metadata)
        if self.final_layernorm is None:
            return x if residual is None else x + residual
        out: Tensor = (
            self.final_layernorm(x) if residual is None else self.final_layernorm(x, residual)[0]
        )
        return out

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in the original naming of either version."""

        def rename(name: str) -> str:
            name = re.sub(r"^transformer\.(embedding\.|encoder\.)?", "", name)
            return ".".join(_MODULES.get(part, part) for part in name.split("."))

        load_stacked_weights(
            self,
            weights,
            self.loading,
            rename=rename,
            ignore=("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq"),
        )


class NormedResidualLayer(nn.Module):
    """A layer whose residual is the norm's output times ``alpha``, not the norm's input."""

    def __init__(
        self,
        self_attn: nn.Module,
        mlp: nn.Module,
        norm: Callable[[], nn.Module],
        alpha: float = 1.0,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.alpha = alpha

    def forward(
        self,
        x: Tensor,
        residual: None,
        cos_sin: CosSin,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> tuple[Tensor, None]:
        """As :class:`DecoderLayer`, but the residual stream is never apart from ``x [1, T, H]``."""
        del residual
        x = self.input_layernorm(x)
        x = x * self.alpha + self.self_attn(x, cos_sin, cache, attn_metadata)
        x = self.post_attention_layernorm(x)
        return x * self.alpha + self.mlp(x), None


class ChatGLM1ForConditionalGeneration(_ChatGLM):
    """ChatGLM-6B, with its language-model head."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        def norm() -> nn.Module:
            return LayerNorm(config.hidden_size, config.layernorm_epsilon)

        def layer() -> nn.Module:
            heads = config.num_attention_heads
            attention = SelfAttention(
                config.hidden_size, heads, heads, config.head_dim, qkv_bias=True, o_bias=True
            )
            mlp = MLP(config.hidden_size, config.inner_hidden_size, "gelu_pytorch_tanh", bias=True)
            # The original's blocks assume 28 layers, whatever the config says.
            return NormedResidualLayer(attention, mlp, norm, alpha=(2 * 28) ** 0.5)

        # The original keeps the frequencies in float16, whatever it computes in.
        rotary_emb = build_rotary_embedding(config.head_dim // 2)
        rotary_emb.inv_freq = rotary_emb.inv_freq.half().float()
        super().__init__(
            config,
            [layer() for _ in range(config.num_hidden_layers)],
            norm(),
            rotary_emb,
            loading={"query_key_value": ("qkv_proj", "hgd"), "dense_h_to_4h": ("up_proj", None)},
        )

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``forward`` for one step.

        A token of the context is at (its index, 0); one of the answer at (the mask's index, how
        many tokens of the answer there are with it).
        """
        inputs = super().prepare_inputs_for_generation(past_key_values, inputs_embeds, context)
        assert context is not None, "the runner passes the step's context"
        context_lens = context.row_state["context_len"]
        context_len = context_lens[context.row_ids]
        position = context.position_ids[0]
        in_context = position < context_len
        inputs["position_ids"] = torch.stack(
            [
                torch.where(in_context, position, context.row_state["mask_pos"][context.row_ids]),
                torch.where(in_context, 0, position - context_len + 1),
            ]
        )
        inputs["attn_metadata"] = replace(
            context.attn_metadata, prefix_lens=context_lens.to(torch.int32)
        )
        return inputs


class ChatGLM2ForConditionalGeneration(_ChatGLM):
    """ChatGLM2-6B or ChatGLM3-6B, with its language-model head."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        def norm() -> nn.Module:
            kind = RMSNorm if config.rmsnorm else LayerNorm
            return kind(config.hidden_size, config.layernorm_epsilon)

        def layer() -> nn.Module:
            attention = SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.add_qkv_bias or config.add_bias_linear,
                o_bias=config.add_bias_linear,
                interleaved_rope=True,
            )
            mlp = GatedMLP(config.hidden_size, config.ffn_hidden_size, bias=config.add_bias_linear)
            if config.apply_residual_connection_post_layernorm:
                return NormedResidualLayer(attention, mlp, norm)
            return DecoderLayer(attention, mlp, norm)

        super().__init__(
            config,
            [layer() for _ in range(config.num_hidden_layers)],
            norm() if config.post_layer_norm else None,
            # The other half of a head stays as it is.
            build_rotary_embedding(
                config.head_dim // 2, base=config.rope_theta, scaling=config.rope_scaling
            ),
            loading={
                "query_key_value": ("qkv_proj", None if config.multi_query_attention else "hgd"),
                "dense_h_to_4h": ("gate_up_proj", None),
            },
        )
