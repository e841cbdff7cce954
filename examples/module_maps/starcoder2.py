"""StarCoder2: ``--custom-module-map examples/module_maps/starcoder2.py``."""

from __future__ import annotations

from engine_core.configs import HFConfig, RotaryConfigBuilder
from engine_core.nn import MLP, DecoderLayer, LayerNorm, RotaryCausalLM, SelfAttention

# What an MLP's layers are called there, and here.
_NAMES = {".mlp.c_fc.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj."}


class Starcoder2ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of StarCoder2."""

    architecture = "Starcoder2ForCausalLM"
    nullable = {"sliding_window": (1, None)}
    defaults = {
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_bias": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }


class Starcoder2ForCausalLM(RotaryCausalLM):
    """Layer norms, and an MLP without a gate."""

    stacked_weights = {
        name: target
        for name, target in RotaryCausalLM.stacked_weights.items()
        if target[0] == "qkv_proj"
    }

    def build_norm(self, config: HFConfig) -> LayerNorm:
        """With a bias, whatever ``use_bias`` says."""
        return LayerNorm(config.hidden_size, config.norm_epsilon)

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """A layer; all have the same window."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.use_bias,
                o_bias=config.use_bias,
                sliding_window=config.sliding_window,
            ),
            MLP(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                bias=config.use_bias,
            ),
            lambda: self.build_norm(config),
        )

    def weight_name(self, name: str) -> str:
        """The name of a tensor here."""
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        return name


MODULE_MAP = {"Starcoder2ForCausalLM": "Starcoder2ForCausalLM"}
CONFIG_BUILDERS = [Starcoder2ConfigBuilder]
