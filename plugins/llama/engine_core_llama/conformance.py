"""Tiny models of this family, for the conformance kit. Imports no torch."""

from engine_core.testing import ConformanceCase

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_MIXTRAL = {
    **_LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}

CASES = [
    ConformanceCase(name="llama", architecture="LlamaForCausalLM", config=_LLAMA),
    ConformanceCase(
        name="llama-tied-biases-llama3-rope",
        architecture="LlamaForCausalLM",
        config={
            **_LLAMA,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    ConformanceCase(
        name="llama-dynamic-rope",
        architecture="LlamaForCausalLM",
        config={
            **_LLAMA,
            "max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
    ),
    ConformanceCase(
        name="mistral-window",
        architecture="MistralForCausalLM",
        config={
            **_LLAMA,
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "head_dim": 32,
            "sliding_window": 12,
        },
    ),
    ConformanceCase(name="mixtral", architecture="MixtralForCausalLM", config=_MIXTRAL),
    ConformanceCase(
        name="mixtral-window-tied-one-expert-a-token",
        architecture="MixtralForCausalLM",
        config={
            **_MIXTRAL,
            "head_dim": 32,
            "sliding_window": 12,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 1,
        },
    ),
]
