"""Mixtral (Jiang et al., 2024), whose feed-forward is a choice of experts, as a module map.

The experts are a plain loop: each takes the tokens that chose it. Which those are the host reads,
so that a step can be neither recorded nor captured.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig, rope_keys
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    Weights,
    load_stacked_weights,
)
from engine_core.step_context import StepContextManager, current_build_context


class ExpertLayer(nn.Module):
    """The sum of the ``top_k`` experts that a router finds best for a token, by their weights."""

    def __init__(self, config: HFConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.router = nn.Linear(
            config.hidden_size,
            config.num_local_experts,
            bias=False,
            dtype=current_build_context().dtype,
        )
        self.experts = nn.ModuleList(
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
            for _ in range(config.num_local_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` to ``[1, T, H]``."""
        scores, chosen = self.router(x).float().softmax(-1).topk(self.top_k, dim=-1)
        scores = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            _, tokens, place = (chosen == index).nonzero(as_tuple=True)
            if len(tokens):
                out[:, tokens] += expert(x[:, tokens]) * scores[:, tokens, place, None]
        return out


class MixtralForCausalLM(RotaryCausalLM):
    """Llama with an :class:`ExpertLayer` in place of the feed-forward."""

    support_cuda_graph = False

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        values = config.to_dict()
        head_dim = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        rope = rope_keys(values, ("default",))
        super().__init__(config.replace(head_dim=head_dim, **rope), ctx_mgr, dtype, device)

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """All layers are alike."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                sliding_window=config.sliding_window,
            ),
            ExpertLayer(config),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint in transformers' naming."""
        load_stacked_weights(
            self,
            weights,
            {
                "q_proj": ("qkv_proj", "q"),
                "k_proj": ("qkv_proj", "k"),
                "v_proj": ("qkv_proj", "v"),
                "w1": ("gate_up_proj", 0),
                "w3": ("gate_up_proj", 1),
                "w2": ("down_proj", None),
            },
            rename=lambda name: name.replace("block_sparse_moe.gate", "mlp.router").replace(
                "block_sparse_moe", "mlp"
            ),
        )


MODULE_MAP = {"MixtralForCausalLM": "MixtralForCausalLM"}
