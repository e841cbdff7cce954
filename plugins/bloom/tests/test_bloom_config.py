"""The config builder against transformers' own config class, for configs as published."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BloomConfig

from engine_core.configs import HFConfig, ModelConfig
from engine_core.errors import ConfigError
from engine_core.registry import build_registry

BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "architectures": ["BloomForCausalLM"],
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "unk_token_id": 0,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pretraining_tp": 1,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "transformers_version": "4.20.0",
    "use_cache": True,
    "vocab_size": 250880,
}
BLOOM_7B1 = {
    **{key: value for key, value in BLOOM_560M.items() if key not in ("n_embed", "n_layer")},
    "hidden_size": 4096,
    "n_layer": 30,
    "n_head": 32,
    "seq_length": 2048,
    "torch_dtype": "float16",
}
del BLOOM_7B1["num_attention_heads"]
PUBLISHED = {
    "bloom-560m": BLOOM_560M,
    "bloom-7b1": BLOOM_7B1,
    "saved-without-head": {**BLOOM_560M, "architectures": ["BloomModel"]},
    "residual-after-norm": {**BLOOM_560M, "apply_residual_connection_post_layernorm": True},
    "untied": {**BLOOM_7B1, "tie_word_embeddings": False},
    "both-names": {**BLOOM_7B1, "n_embed": 4096, "num_attention_heads": 32},
    "sparse": {
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 250880,
        "hidden_size": 1024,
        "n_layer": 24,
        "n_head": 16,
    },
}


def build(values: dict[str, Any]) -> ModelConfig:
    return build_registry(plugin_errors="strict").model_config(HFConfig(values))


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_published_config_means_what_transformers_reads(values: dict[str, Any]) -> None:
    theirs = BloomConfig(**values)
    config = build(values)
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "layer_norm_epsilon",
        "apply_residual_connection_post_layernorm",
        "tie_word_embeddings",
    ):
        assert getattr(config.hf_config, key) == getattr(theirs, key), key
    assert config.architecture == "BloomForCausalLM"
    assert config.num_layers == theirs.n_layer
    assert config.num_key_value_heads == theirs.n_head
    assert config.head_dim == theirs.hidden_size // theirs.n_head
    assert config.bos_token_id == theirs.bos_token_id or "bos_token_id" not in values


@pytest.mark.parametrize(
    ("changes", "longest"), [({}, 2048), ({"seq_length": 4096}, 4096), ({"seq_length": None}, 2048)]
)
def test_the_trained_length_is_no_limit(changes: dict[str, Any], longest: int) -> None:
    config = build({**BLOOM_560M, **changes})
    assert config.max_position_embeddings == longest
    assert config.may_exceed_length


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"n_embed": None}, "none of hidden_size, n_embed"),
        ({"num_attention_heads": None}, "none of num_attention_heads, n_head"),
        ({"n_layer": None}, "none of num_hidden_layers, n_layer"),
        ({"n_head": 8}, "num_attention_heads is 16 and n_head is 8"),
        ({"n_embed": 1000}, "hidden_size"),
        ({"n_embed": "1024"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon"),
        ({"apply_residual_connection_post_layernorm": 1}, "apply_residual_connection"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"seq_length": -1}, "max_position_embeddings"),
    ],
)
def test_a_broken_config_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build({**BLOOM_560M, **changes})
