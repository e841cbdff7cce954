"""GLM-4 as transformers has it: ``--custom-module-map examples/module_maps/glm4.py``.

``GlmForCausalLM`` is that of ``glm-4-9b-chat-hf``; ``Glm4ForCausalLM`` is that of GLM-4-0414, which
has norms after its branches too.
"""

from __future__ import annotations

from engine_core.configs import HFConfig, RotaryConfigBuilder
from engine_core.nn import DecoderLayer, GatedMLP, RotaryCausalLM, SelfAttention

# The norms of a layer of GLM-4-0414: the part of the name there, and here.
_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}


class GlmConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of GLM-4."""

    architecture = "GlmForCausalLM"
    defaults = {
        "attention_bias": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": [151329, 151336, 151338],
    }


class Glm4ConfigBuilder(GlmConfigBuilder):
    """Reads the configs of GLM-4-0414."""

    architecture = "Glm4ForCausalLM"


class GlmForCausalLM(RotaryCausalLM):
    """Neighbouring dimensions rotate, in half of a head."""

    sandwich = False

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer; all are alike."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.attention_bias,
                interleaved_rope=True,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act),
            lambda: self.build_norm(config),
            sandwich=self.sandwich,
        )


class Glm4ForCausalLM(GlmForCausalLM):
    """With norms on both sides of a branch."""

    sandwich = True

    def weight_name(self, name: str) -> str:
        """The name of a tensor here."""
        return ".".join(_NORMS.get(part, part) for part in name.split("."))


MODULE_MAP = {"GlmForCausalLM": "GlmForCausalLM", "Glm4ForCausalLM": "Glm4ForCausalLM"}
CONFIG_BUILDERS = [GlmConfigBuilder, Glm4ConfigBuilder]
