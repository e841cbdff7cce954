from engine_core.testing import ConformanceCase

_LLAMA = {
    "architectures": ["TinyForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": True,
}
_MISTRAL = {
    **{key: value for key, value in _LLAMA.items() if key != "attention_bias"},
    "model_type": "mistral",
    "sliding_window": 12,
}

CASES = [
    ConformanceCase(name="biases", architecture="TinyForCausalLM", config=_LLAMA),
    ConformanceCase(name="window", architecture="TinyForCausalLM", config=_MISTRAL),
]
