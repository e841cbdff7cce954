"""InternLM2 (Cai et al., 2024), as its original code computes it."""

from __future__ import annotations

from engine_core.configs import HFConfig
from engine_core.nn import (
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    RotaryCausalLM,
    SelfAttention,
    Weights,
    load_stacked_weights,
)

# Parts of a checkpoint's names, and those of the layers here.
_NAMES = {
    "model.tok_embeddings.": "model.embed_tokens.",
    "output.": "lm_head.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".feed_forward.": ".mlp.",
}


class InternLM2ForCausalLM(RotaryCausalLM):
    """Llama's layers under names of their own; ``bias`` is that of all attention's linears."""

    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """All layers are alike."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                qkv_bias=config.bias,
                o_bias=config.bias,
            ),
            GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act),
            lambda: RMSNorm(config.hidden_size, config.rms_norm_eps),
        )

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters; ``wqkv`` has for each key-value head its queries, key and value."""
        load_stacked_weights(
            self,
            weights,
            {
                "wqkv": ("qkv_proj", "hgd"),
                "w1": ("gate_up_proj", 0),
                "w3": ("gate_up_proj", 1),
            },
            rename=_renamed,
            ignore=("rotary_emb.inv_freq",),  # Old checkpoints store the table.
        )


def _renamed(name: str) -> str:
    for theirs, ours in _NAMES.items():
        # The head's name begins one; "attention_output." or the like would be another layer's.
        if theirs.startswith(".") or name.startswith(theirs):
            name = name.replace(theirs, ours)
    return name
