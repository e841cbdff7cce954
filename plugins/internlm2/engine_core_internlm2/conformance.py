"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.testing import ConformanceCase

if TYPE_CHECKING:
    from torch import Tensor, nn


def reference(config: Mapping[str, Any]) -> nn.Module:
    """transformers' Llama under InternLM2's names: its own class is not in transformers."""
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    values = {key: value for key, value in config.items() if key != "architectures"}
    model_class: Any = LlamaForCausalLM
    theirs = model_class._from_config(
        LlamaConfig(**{**values, "attention_bias": config["bias"]}), attn_implementation="eager"
    )

    class InternLM2(nn.Module):
        """Llama's model, whose state dict is renamed and joined."""

        def __init__(self) -> None:
            super().__init__()
            self.llama = theirs
            self.config = theirs.config

        def forward(self, input_ids: Tensor) -> Tensor:
            logits: Tensor = self.llama(input_ids).logits
            return logits

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            import torch

            joined: dict[str, Any] = {}
            parts: dict[str, dict[str, Any]] = {}
            for name, tensor in self.llama.state_dict(*args, **kwargs).items():
                *path, layer, leaf = name.split(".")
                if layer in ("q_proj", "k_proj", "v_proj"):
                    key = ".".join([*path[:-1], "attention.wqkv", leaf])
                    parts.setdefault(key, {})[layer[0]] = tensor
                    continue
                for ours, original in _NAMES.items():
                    name = name.replace(ours, original)
                joined[name] = tensor
            for name, part in parts.items():
                grouped = [
                    part["q"].unflatten(0, (kv_heads, heads // kv_heads, -1)),
                    part["k"].unflatten(0, (kv_heads, 1, -1)),
                    part["v"].unflatten(0, (kv_heads, 1, -1)),
                ]
                joined[name] = torch.cat(grouped, dim=1).flatten(0, 2)
            return joined

    return InternLM2()


_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "lm_head.": "output.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
}

_CONFIG = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bias": False,
    "tie_word_embeddings": False,
}

# From configuration_internlm2.py.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 2048,
    "bias": True,
    "tie_word_embeddings": False,
}

CASES = [
    ConformanceCase(
        name="internlm2",
        architecture="InternLM2ForCausalLM",
        config=_CONFIG,
        reference=reference,
        defaults=_DEFAULTS,
    ),
    ConformanceCase(
        name="internlm2-dynamic-rope",
        architecture="InternLM2ForCausalLM",
        config={
            **_CONFIG,
            "max_position_embeddings": 32,
            "rope_theta": 5000.0,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
        reference=reference,
        defaults=_DEFAULTS,
    ),
    ConformanceCase(
        name="internlm2-biases",
        architecture="InternLM2ForCausalLM",
        config={**_CONFIG, "bias": True, "num_attention_heads": 8},
        reference=reference,
    ),
]
