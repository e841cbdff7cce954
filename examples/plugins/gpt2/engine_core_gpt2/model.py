"""GPT-2 (Radford et al., 2019), as transformers computes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    CausalLM,
    KVCacheLayer,
    LayerNorm,
    SelfAttention,
    Weights,
    build_colwise_linear,
    build_embedding,
    build_lm_head,
    build_rowwise_linear,
    load_stacked_weights,
)
from engine_core.step_context import AttentionMetadata, StepContextManager

# Conv1D is transformers' linear layer whose weight is stored [in, out].
_CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class GPT2MLP(nn.Module):
    """``c_proj(gelu(c_fc(x)))``."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.c_fc = build_colwise_linear(hidden_size, intermediate_size, bias=True)
        self.c_proj = build_rowwise_linear(intermediate_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class GPT2Block(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        hidden_size, heads = config.hidden_size, config.num_attention_heads
        self.ln_1 = LayerNorm(hidden_size, config.layer_norm_epsilon)
        self.attn = SelfAttention(
            hidden_size, heads, heads, hidden_size // heads, qkv_bias=True, o_bias=True
        )
        self.ln_2 = LayerNorm(hidden_size, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, cache: KVCacheLayer, attn_metadata: AttentionMetadata) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        x = x + self.attn(self.ln_1(x), None, cache, attn_metadata)
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2LMHeadModel(CausalLM):
    """GPT-2 with its head, which usually is the token embedding. Positions are learned, too."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.wte = build_embedding(config.vocab_size, config.hidden_size)
        self.wpe = build_embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Block(config) for _ in range(config.num_hidden_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.lm_head = build_lm_head(
            config.hidden_size,
            config.vocab_size,
            tied_to=self.wte if config.tie_word_embeddings else None,
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
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self.wpe(position_ids)
        for block, cache in zip(self.h, past_key_values, strict=True):
            x = block(x, cache, attn_metadata)
        out: Tensor = self.ln_f(x)
        return out

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters; names may begin with ``transformer.`` or not."""
        load_stacked_weights(
            self,
            ((name, t.t() if name.endswith(_CONV1D) else t) for name, t in weights),
            {"c_attn": ("qkv_proj", None)},  # None: all queries, then all keys, then all values
            rename=lambda name: name.removeprefix("transformer.").replace(
                "attn.c_proj", "attn.o_proj"
            ),
            ignore=(".attn.bias", ".attn.masked_bias"),  # Old checkpoints store the causal mask.
        )
