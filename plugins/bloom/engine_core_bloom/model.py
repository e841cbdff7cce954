"""BLOOM (Le Scao et al., 2022), as transformers computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    MLP,
    CausalLM,
    DecoderLayer,
    KVCacheLayer,
    LayerNorm,
    SelfAttention,
    Weights,
    build_embedding,
    build_lm_head,
    link_layers,
    load_stacked_weights,
)
from engine_core.step_context import AttentionMetadata, StepContextManager


def _layer(config: HFConfig) -> DecoderLayer:
    """A decoder layer; its residuals branch off before the norms, or after them."""
    hidden_size, heads = config.hidden_size, config.num_attention_heads
    return DecoderLayer(
        SelfAttention(
            hidden_size, heads, heads, hidden_size // heads, qkv_bias=True, o_bias=True, alibi=True
        ),
        MLP(hidden_size, 4 * hidden_size, "gelu_pytorch_tanh", bias=True),
        lambda: LayerNorm(hidden_size, config.layer_norm_epsilon),
        residual_after_norm=config.apply_residual_connection_post_layernorm,
    )


class BloomForCausalLM(CausalLM):
    """BLOOM with its language-model head. ALiBi tells positions apart; there is no embedding."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.word_embeddings = build_embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.h = nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers))
        link_layers(self.h)
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.lm_head = build_lm_head(
            config.hidden_size,
            config.vocab_size,
            tied_to=self.word_embeddings if config.tie_word_embeddings else None,
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
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        x, residual = self.word_embeddings_layernorm(x), None
        for block, cache in zip(self.h, past_key_values, strict=True):
            x, residual = block(x, residual, None, cache, attn_metadata)
        out: Tensor = self.ln_f(x, residual)[0]
        return out

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters; names may begin with ``transformer.`` or not."""
        load_stacked_weights(
            self,
            weights,
            # For each head its query, key and value rows stand together.
            {
                "query_key_value": ("qkv_proj", "hgd"),
                "dense": ("o_proj", None),
                "dense_h_to_4h": ("up_proj", None),
                "dense_4h_to_h": ("down_proj", None),
            },
            rename=lambda name: name.removeprefix("transformer.").replace(
                ".self_attention.", ".self_attn."
            ),
        )
