"""Writes the golden fixtures of Mixtral, Qwen2-MoE and Qwen3-MoE, by transformers' own code.

    pip install torch==2.13.0 transformers==5.23.0 safetensors
    python tests/references/make_experts.py

They are made as those of ``make_gemma.py``. Experts' tensors are separate, as in published
checkpoints; those of Qwen3-MoE are stacked, as transformers 5 keeps them. Its first layer is dense
by ``decoder_sparse_step``, Qwen2-MoE's second by ``mlp_only_layers``.
"""

from __future__ import annotations

import torch
from make_gemma import write
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 96,
}
MIXTRAL = {
    **COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN2 = {
    **COMMON,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "decoder_sparse_step": 1,
    "intermediate_size": 48,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 32,
    "norm_topk_prob": False,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 64,
    "sliding_window": 256,
    "use_sliding_window": False,
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "use_sliding_window": False,
}


def main() -> None:
    for name, values, config, model, published in (
        ("mixtral-tiny", MIXTRAL, MixtralConfig, MixtralForCausalLM, True),
        ("qwen2moe-shared", QWEN2, Qwen2MoeConfig, Qwen2MoeForCausalLM, True),
        ("qwen3moe-stacked", QWEN3, Qwen3MoeConfig, Qwen3MoeForCausalLM, False),
    ):
        torch.manual_seed(0)
        whole = model(config(**values, attn_implementation="eager")).eval()
        write(name, values, whole, "make_experts.py", published=published)


if __name__ == "__main__":
    main()
