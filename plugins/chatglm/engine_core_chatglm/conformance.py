"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.testing import ConformanceCase

if TYPE_CHECKING:
    from torch import nn


def original1(config: Mapping[str, Any]) -> nn.Module:
    """ChatGLM-6B in plain torch: transformers has no class for it."""
    from engine_core_chatglm.reference import ChatGLM1

    return ChatGLM1(config)


def original2(config: Mapping[str, Any]) -> nn.Module:
    """The later versions in plain torch."""
    from engine_core_chatglm.reference import ChatGLM2

    return ChatGLM2(config)


# What belongs at [gMASK] (90), or without one at [MASK] (91), follows <sop> (92).
_PROMPTS1 = [
    [90, 92],
    [17, 28, 39, 40, 51, 90, 92],
    [33, 4, 91, 55, 6, 17, 92, 71],
    [91, 12, 93, 18, 55, 90, 94, 92, 6, 9, 12],
    [(7 * i + 5) % 90 for i in range(40)] + [90, 92],
]
_GLM1 = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "bos_token_id": 92,
    "eos_token_id": 95,
    "mask_token_id": 91,
    "gmask_token_id": 90,
    "hidden_size": 64,
    "inner_hidden_size": 96,
    "max_sequence_length": 64,
    "num_attention_heads": 4,
    "num_layers": 3,
    "vocab_size": 96,
}
_GLM2 = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "_name_or_path": "chatglm3",
    "add_qkv_bias": True,
    "eos_token_id": 2,
    "ffn_hidden_size": 48,
    "hidden_size": 32,
    "kv_channels": 16,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 4,
    "num_layers": 2,
    "padded_vocab_size": 128,
    "rope_ratio": 3.0,
    "seq_length": 64,
}
# From configuration_chatglm.py of the later versions.
_DEFAULTS2 = {
    "layernorm_epsilon": 1e-5,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "multi_query_attention": False,
    "multi_query_group_num": 1,
    "seq_length": 2048,
    "rope_ratio": 1,
}

CASES = [
    ConformanceCase(
        name="chatglm1",
        architecture="ChatGLM1ForConditionalGeneration",
        config=_GLM1,
        reference=original1,
        prompts=_PROMPTS1,
        defaults={"layernorm_epsilon": 1e-5},
        unused_weights=("rotary_emb.inv_freq",),
    ),
    ConformanceCase(
        name="chatglm3",
        architecture="ChatGLM2ForConditionalGeneration",
        config=_GLM2,
        reference=original2,
        defaults=_DEFAULTS2,
        unused_weights=("rotary_pos_emb.inv_freq",),
    ),
    ConformanceCase(
        name="chatglm2-32k",
        architecture="ChatGLM2ForConditionalGeneration",
        config={**_GLM2, "_name_or_path": "chatglm2"},
        reference=original2,
        defaults=_DEFAULTS2,
        unused_weights=("rotary_pos_emb.inv_freq",),
    ),
]
