"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.testing import ConformanceCase

if TYPE_CHECKING:
    from torch import nn


def reference(config: Mapping[str, Any]) -> nn.Module:
    """transformers' class, which is none of its causal models."""
    import transformers

    theirs: Any = getattr(transformers, config["architectures"][0])
    values = {key: value for key, value in config.items() if key != "model_type"}
    model: nn.Module = theirs._from_config(
        theirs.config_class(**values), attn_implementation="eager"
    )
    return model


# Text alone: neither these nor the answers to them have the tokens of pictures, 3 and 4.
_draw = random.Random(0)
_PROMPTS = [[_draw.randrange(2, 160) for _ in range(length)] for length in (1, 6, 21, 45)]

_TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "image_token_id": 3,
    "video_token_id": 4,
}

CASES = [
    ConformanceCase(
        name="qwen2-vl",
        architecture="Qwen2VLForConditionalGeneration",
        config={
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **_TEXT,
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "patch_size": 4,
            },
        },
        reference=reference,
        prompts=_PROMPTS,
    ),
    ConformanceCase(
        name="qwen2.5-vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        config={
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            **_TEXT,
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_heads": 2,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        reference=reference,
        prompts=_PROMPTS,
    ),
]
