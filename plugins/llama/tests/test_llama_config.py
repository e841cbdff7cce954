"""The config builders against transformers' own config classes, for configs as published."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, MixtralConfig

from engine_core.configs import HFConfig, ModelConfig
from engine_core.errors import ConfigError
from engine_core.registry import build_registry

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "initializer_range": 0.02,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "float16",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_7B_01 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MIXTRAL_8X7B = {
    **MISTRAL_7B_01,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
CONFIG_CLASSES: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
}
PUBLISHED = {
    "llama-7b": LLAMA_7B,
    "llama-3.1-8b": LLAMA_31_8B,
    "mistral-7b-v0.1": MISTRAL_7B_01,
    "mistral-7b-v0.3": {
        **MISTRAL_7B_01,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    },
    "mistral-nemo": {
        **MISTRAL_7B_01,
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 1024000,
        "num_hidden_layers": 40,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "mistral-sparse": {
        key: MISTRAL_7B_01[key]
        for key in (
            "architectures",
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
    },
    "mixtral-8x7b": MIXTRAL_8X7B,
    "mixtral-of-defaults": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}


def build(values: dict[str, Any]) -> ModelConfig:
    return build_registry(plugin_errors="strict").model_config(HFConfig(values))


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_published_config_means_what_transformers_reads(values: dict[str, Any]) -> None:
    theirs = CONFIG_CLASSES[values["model_type"]](**values)
    config = build(values)
    ours = config.hf_config
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert getattr(ours, key) == getattr(theirs, key), key
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    if values["model_type"] == "mixtral":
        assert ours.num_local_experts == theirs.num_local_experts
        assert ours.num_experts_per_tok == theirs.num_experts_per_tok
    # Transformers' Mistral has no such keys and its Llama no window: there the others hold.
    assert ours.attention_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert {**ours.rope_scaling, "rope_theta": ours.rope_theta} == theirs.rope_parameters
    assert config.max_position_embeddings == theirs.max_position_embeddings


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_what_transformers_writes_means_the_same(values: dict[str, Any]) -> None:
    written = CONFIG_CLASSES[values["model_type"]](**copy.deepcopy(values)).to_dict()
    ours = build(values).hf_config.to_dict()
    again = build({**written, "architectures": values["architectures"]}).hf_config.to_dict()
    left_out = {"rope_parameters", "torch_dtype", "dtype", "transformers_version"}
    shared = (set(ours) & set(again)) - left_out
    assert {key: again[key] for key in shared} == {key: ours[key] for key in shared}


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "rope_theta": 7e5,
            "rope_scaling": None,
        },
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rope_theta": 7e5},
    ],
)
def test_of_two_names_that_disagree_the_one_that_transformers_reads_counts(
    rope: dict[str, Any],
) -> None:
    ours = build({**LLAMA_7B, **rope}).hf_config
    theirs = {**LlamaConfig(**{**LLAMA_7B, **copy.deepcopy(rope)}).rope_parameters}
    theirs.pop("type", None)
    assert {**ours.rope_scaling, "rope_theta": ours.rope_theta} == theirs


def test_a_window_in_a_llama_config_is_not_one() -> None:
    assert build({**LLAMA_7B, "sliding_window": 4096}).hf_config.sliding_window is None


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not one of default, linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5, but heads of this family rotate whole",
        ),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "4096"}, "sliding_window"),
    ],
)
def test_a_broken_config_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build({**MISTRAL_7B_01, **changes})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        ({"num_experts_per_tok": 2.0}, "num_experts_per_tok"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_a_broken_mixture_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build({**MIXTRAL_8X7B, **changes})
