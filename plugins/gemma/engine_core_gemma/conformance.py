"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.testing import ConformanceCase

if TYPE_CHECKING:
    from torch import nn

_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 160,
    "hidden_size": 48,  # whose root is no whole number
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
    "rope_theta": 500.0,
    "eos_token_id": 1,
}
_GEMMA3 = {
    **_GEMMA2,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 3,
    "rope_theta": 3000.0,
    "rope_local_base_freq": 200.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}


def _text_of_the_whole(config: Mapping[str, Any]) -> nn.Module:
    """The text model, with its tensors named as beside a vision tower."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    def rename(_module: Any, tensors: dict[str, Any], *_: Any) -> None:
        del tensors["lm_head.weight"]
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**config["text_config"]))
    model.register_state_dict_post_hook(rename)
    made: nn.Module = model
    return made


CASES = [
    ConformanceCase(name="gemma2", architecture="Gemma2ForCausalLM", config=_GEMMA2),
    ConformanceCase(
        name="gemma2-no-caps-biases-own-head",
        architecture="Gemma2ForCausalLM",
        config={
            **_GEMMA2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    ConformanceCase(name="gemma3", architecture="Gemma3ForCausalLM", config=_GEMMA3),
    ConformanceCase(
        name="gemma3-capped-logits-newer-ropes",
        architecture="Gemma3ForCausalLM",
        config={
            **{key: value for key, value in _GEMMA3.items() if "rope" not in key},
            "final_logit_softcapping": 5.0,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            },
        },
    ),
    ConformanceCase(
        name="gemma3-text-of-a-model-that-sees",
        architecture="Gemma3ForConditionalGeneration",
        config={
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {key: _GEMMA3[key] for key in _GEMMA3 if key != "architectures"},
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        reference=_text_of_the_whole,
    ),
]
