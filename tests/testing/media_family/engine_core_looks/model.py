from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    KVCacheLayer,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    build_embedding,
    build_replicated_linear,
)
from engine_core.step_context import StepContext, StepContextManager


class Eye(nn.Module):
    """An embedding a pixel, which also sees the mean of its picture."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.own = build_replicated_linear(3, hidden_size, bias=True)
        self.mean = build_replicated_linear(3, hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        pixels = pixels.to(self.own.dtype)
        return self.own(pixels) + self.mean(pixels.mean(0, keepdim=True))


class LooksForCausalLM(RotaryCausalLM):
    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config, ctx_mgr, dtype, device)
        self.eye = Eye(config.hidden_size)
        self.rows = build_embedding(8, config.hidden_size)
        self.counts = build_embedding(4, config.hidden_size)

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def embed_media(self, kind: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return [self.eye(item["pixels"]) for item in items]

    def prepare_inputs_for_generation(
        self,
        past_key_values: list[KVCacheLayer],
        inputs_embeds: Tensor | None = None,
        context: StepContext | None = None,
    ) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(past_key_values, inputs_embeds, context)
        rows, position, state = context.row_ids, context.position_ids[0], context.row_state
        place, row = context.token_state["places"]
        # Tokens after the prompt have no token state: they go on from the last position.
        prompted = position < state["prompt_len"][rows]
        places = torch.where(prompted, place, position + state["later"][rows])
        inputs["position_ids"] = places[None]
        embeds = inputs_embeds
        if embeds is None:
            embeds = self.get_input_embeddings()(context.input_ids)
        row = torch.where(prompted, row, 0)
        inputs["inputs_embeds"] = embeds + self.rows(row) + self.counts(state["pictures"][rows])
        return inputs
