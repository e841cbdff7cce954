"""Tiny models for the conformance kit. Imports no torch."""

from engine_core.testing import ConformanceCase

_COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
_V2 = {**_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
_V3 = {**_COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

CASES = [
    ConformanceCase(
        name="deepseek-v2",
        architecture="DeepseekV2ForCausalLM",
        config={
            **_V2,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.6,
        },
    ),
    # Groups that the method does not know.
    ConformanceCase(
        name="deepseek-v2-greedy",
        architecture="DeepseekV2ForCausalLM",
        config={
            **_V2,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "topk_method": "greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    ConformanceCase(
        name="deepseek-v3",
        architecture="DeepseekV3ForCausalLM",
        config={
            **_V3,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": _YARN,
        },
    ),
]
