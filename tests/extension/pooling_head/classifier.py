"""A classifier of whole prompts, as a module map: Llama's layers, a mean over all tokens, a head.

The mean over a row's tokens is attention with queries of zero: all of a row's values weigh alike.
So it is right for prompts in chunks and for prefixes out of the cache, and the pooled states need
no place of their own. A label is a token: the head fills the first ``num_labels`` columns, and the
others can never be chosen. A request asks for one token, and for log-probabilities of all labels.

The pooled vector itself cannot be had: a row's result (``RowResult``) holds tokens and their
log-probabilities, the sampler takes ``vocab_size`` columns, and ``get_logits`` is asked for each
row's last token only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig, rope_keys
from engine_core.nn import (
    Attention,
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
)
from engine_core.step_context import (
    AttentionMetadata,
    StepContextManager,
    current_build_context,
)


class MeanPool(nn.Module):
    """The mean of a row's states so far."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attend = Attention(num_heads, hidden_size // num_heads)

    def forward(self, x: Tensor, cache: KVCacheLayer, attn_metadata: AttentionMetadata) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        states = x.reshape(x.shape[1], self.num_heads, -1)
        nothing = torch.zeros_like(states)
        out: Tensor = self.attend(nothing, nothing, states, *cache, attn_metadata)
        return out.reshape(x.shape)


class LlamaMeanClassifier(RotaryCausalLM):
    """Llama whose logits are those of labels, of the mean of the prompt's last hidden states."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        config = config.replace(**rope_keys(config.to_dict(), ("default",)))
        super().__init__(config, ctx_mgr, dtype, device)
        del self.lm_head
        self.vocab_size = config.vocab_size
        self.pool = MeanPool(config.hidden_size, config.num_attention_heads)
        self.score = nn.Linear(
            config.hidden_size,
            config.num_labels,
            bias=False,
            dtype=current_build_context().dtype,
        )

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """All layers are alike."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.hidden_size // config.num_attention_heads,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        **inputs: Any,
    ) -> Tensor:
        """``[1, T]`` to the pooled states ``[1, T, H]``."""
        *caches, pooled = past_key_values
        x = super().forward(input_ids, position_ids, caches, attn_metadata, **inputs)
        return self.pool(x, pooled, attn_metadata)

    def get_logits(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., vocab]``; what is no label has no chance."""
        labels = self.score(hidden_states)
        rest = self.vocab_size - labels.shape[-1]
        return nn.functional.pad(labels, (0, rest), value=-torch.inf)


MODULE_MAP = {"LlamaMeanClassifier": "LlamaMeanClassifier"}
