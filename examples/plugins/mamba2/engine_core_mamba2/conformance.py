"""The tiny models for the conformance kit. Imports no torch."""

from engine_core.testing import ConformanceCase

_MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": 101,
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 16,
    "num_hidden_layers": 2,
    "chunk_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CASES = [
    ConformanceCase(
        name="groups",
        architecture="Mamba2ForCausalLM",
        config={
            **_MAMBA2,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
            "residual_in_fp32": False,
            "time_step_limit": [0.01, 0.2],
        },
    ),
    # Layers with states beside one that attends, and a single group, which both ranks need.
    ConformanceCase(
        name="hybrid",
        architecture="BambaForCausalLM",
        config={
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
            "time_step_limit": [0.01, 0.2],
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
]
