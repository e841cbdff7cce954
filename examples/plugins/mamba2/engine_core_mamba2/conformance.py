"""The tiny models for the conformance kit. Imports no torch."""

from engine_core.testing import ConformanceCase

_TINY = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": 101,
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 1,
    "num_hidden_layers": 2,
    "chunk_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CASES = [
    ConformanceCase(name="one-group", architecture="Mamba2ForCausalLM", config=_TINY),
    ConformanceCase(
        name="groups",
        architecture="Mamba2ForCausalLM",
        config={
            **_TINY,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
            "residual_in_fp32": False,
            "time_step_limit": [0.01, 0.2],
        },
    ),
]
