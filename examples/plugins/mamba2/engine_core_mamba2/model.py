"""Mamba-2 (Dao and Gu, 2024) and Bamba, which attends in some layers, as in transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    CausalLM,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    StateSpaceMixer,
    Weights,
    build_embedding,
    build_lm_head,
    load_stacked_weights,
)
from engine_core.step_context import AttentionMetadata, StepContextManager


class Mamba2Block(nn.Module):
    """``x + mixer(norm(x))``."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = StateSpaceMixer(
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            config.state_size,
            num_groups=config.n_groups,
            conv_kernel=config.conv_kernel,
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
            norm_eps=config.layer_norm_epsilon,
            time_step_limit=tuple(config.time_step_limit),
        )

    def forward(self, x: Tensor, cache: KVCacheLayer, attn_metadata: AttentionMetadata) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``; x may be wider than the parameters are."""
        normed = self.norm(x.to(self.norm.weight.dtype))
        out: Tensor = x + self.mixer(normed, None, cache, attn_metadata)
        return out


class Mamba2Model(nn.Module):
    """Token embedding, layers and final norm."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.embeddings = build_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Mamba2Block(config) for _ in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.residual_in_fp32 = config.residual_in_fp32

    def forward(
        self, x: Tensor, past_key_values: list[KVCacheLayer], attn_metadata: AttentionMetadata
    ) -> Tensor:
        """Embeddings ``[1, T, H]`` to hidden states ``[1, T, H]``."""
        dtype = x.dtype
        if self.residual_in_fp32:
            x = x.float()
        for layer, cache in zip(self.layers, past_key_values, strict=True):
            x = layer(x, cache, attn_metadata)
        out: Tensor = self.norm_f(x.to(dtype))
        return out


class Mamba2ForCausalLM(CausalLM):
    """Mamba-2 with its head. There are no positions: order is in the states."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.backbone = Mamba2Model(config)
        self.lm_head = build_lm_head(
            config.hidden_size,
            config.vocab_size,
            tied_to=self.backbone.embeddings if config.tie_word_embeddings else None,
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """``[1, T]`` to hidden states ``[1, T, H]``."""
        x = self.backbone.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        out: Tensor = self.backbone(x, past_key_values, attn_metadata)
        return out

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in transformers' naming."""
        load_stacked_weights(self, weights, {}, rename=_own_name)


class BambaForCausalLM(RotaryCausalLM):
    """Bamba: a mixer or an attention, and a gated MLP in every layer."""

    def build_layer(self, config: HFConfig, index: int) -> nn.Module:
        """The layers of ``attn_layer_indices`` attend."""
        mixer: nn.Module
        if index in config.attn_layer_indices:
            mixer = SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.attention_bias,
                o_bias=config.attention_bias,
            )
        else:
            mixer = StateSpaceMixer(
                config.hidden_size,
                config.mamba_n_heads,
                config.mamba_d_head,
                config.mamba_d_state,
                num_groups=config.mamba_n_groups,
                conv_kernel=config.mamba_d_conv,
                conv_bias=config.mamba_conv_bias,
                bias=config.mamba_proj_bias,
                norm_eps=config.rms_norm_eps,
                time_step_limit=tuple(config.time_step_limit),
            )
        return DecoderLayer(
            mixer,
            GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def weight_name(self, name: str) -> str:
        """A decoder layer's names, of Bamba's."""
        for theirs, ours in (
            (".final_layernorm.", ".norm."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            (".feed_forward.", ".mlp."),
            (".mamba.", ".mixer."),
        ):
            name = name.replace(theirs, ours)
        return _own_name(name).replace(".mixer.", ".self_attn.")


def _own_name(name: str) -> str:
    """The name of a tensor here. The convolution and the scan are one layer, ``ssm``."""
    name = name.replace("backbone.embedding.", "backbone.embeddings.")
    name = name.replace(".mixer.conv1d.", ".mixer.ssm.conv_")
    for part in ("A_log", "D", "dt_bias"):
        name = name.replace(f".mixer.{part}", f".mixer.ssm.{part}")
    return name
