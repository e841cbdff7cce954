"""Tiny models of this family, for the conformance kit. Imports no torch."""

from engine_core.testing import ConformanceCase

_BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "vocab_size": 160,
    "hidden_size": 96,
    "n_layer": 2,
    "n_head": 6,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 64,
}

CASES = [
    ConformanceCase(name="bloom-6-heads", architecture="BloomForCausalLM", config=_BLOOM),
    ConformanceCase(
        name="bloom-residual-after-norm",
        architecture="BloomForCausalLM",
        config={**_BLOOM, "n_head": 4, "apply_residual_connection_post_layernorm": True},
    ),
]
