"""Tiny models of this family, for the conformance kit. Imports no torch."""

from engine_core.testing import ConformanceCase

_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_QWEN3 = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "head_dim": 32,
}

_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_QWEN3_MOE = {
    **_QWEN3,
    **_EXPERTS,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
}

CASES = [
    ConformanceCase(
        name="qwen2-window-from-layer-1",
        architecture="Qwen2ForCausalLM",
        config={
            **_QWEN2,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
        },
    ),
    ConformanceCase(
        name="qwen2-tied-yarn",
        architecture="Qwen2ForCausalLM",
        config={
            **_QWEN2,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    ConformanceCase(name="qwen3", architecture="Qwen3ForCausalLM", config=_QWEN3),
    ConformanceCase(
        name="qwen2-moe",
        architecture="Qwen2MoeForCausalLM",
        config={
            **_QWEN2,
            **_EXPERTS,
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": 96,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
    ),
    ConformanceCase(
        name="qwen3-moe-dense-layers",
        architecture="Qwen3MoeForCausalLM",
        config={
            **_QWEN3_MOE,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    ConformanceCase(
        name="qwen3-moe-window-tied",
        architecture="Qwen3MoeForCausalLM",
        config={
            **_QWEN3_MOE,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 12,
        },
    ),
]
