"""InternLM3: ``--custom-module-map examples/module_maps/internlm3.py``.

A config may stretch its positions with the length of a sequence ("dynamic"). Up to
``max_position_embeddings`` that changes nothing, and longer sequences are refused.
"""

from __future__ import annotations

from typing import Any

from engine_core.configs import HFConfig, RotaryConfigBuilder, check_kinds
from engine_core.nn import DecoderLayer, GatedMLP, RotaryCausalLM, SelfAttention


class InternLM3ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of InternLM3, and those that transformers writes of it."""

    architecture = "InternLM3ForCausalLM"
    rope_types = ("default", "linear", "dynamic", "yarn", "llama3")
    defaults = {
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Bring the biases under one name, and leave out a stretch that is never reached."""
        super().complete(values)
        values.setdefault("qkv_bias", values.get("attention_bias", False))
        values.setdefault("bias", values.get("mlp_bias", False))
        check_kinds(values, {"qkv_bias": False, "bias": False})
        if values["rope_scaling"]["rope_type"] == "dynamic":
            values["rope_scaling"] = {"rope_type": "default"}


class InternLM3ForCausalLM(RotaryCausalLM):
    """A Llama with biases of q, k and v apart from all others."""

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer; all are alike."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.qkv_bias,
                o_bias=config.bias,
            ),
            GatedMLP(
                config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.bias
            ),
            lambda: self.build_norm(config),
        )


MODULE_MAP = {"InternLM3ForCausalLM": "InternLM3ForCausalLM"}
CONFIG_BUILDERS = [InternLM3ConfigBuilder]
