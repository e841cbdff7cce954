"""The config builders against transformers' own config classes, for configs as published."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from engine_core.configs import HFConfig, ModelConfig
from engine_core.errors import ConfigError
from engine_core.registry import build_registry

QWEN25_7B_INSTRUCT = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN2_05B = {
    **QWEN25_7B_INSTRUCT,
    "eos_token_id": 151643,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
QWEN15_MOE_A27B = {
    **QWEN25_7B_INSTRUCT,
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
CONFIG_CLASSES: dict[str, Any] = {
    "qwen2": Qwen2Config,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
PUBLISHED = {
    "qwen2.5-7b-instruct": QWEN25_7B_INSTRUCT,
    "qwen2.5-7b-instruct-yarn": {**QWEN25_7B_INSTRUCT, "rope_scaling": YARN},
    "qwen2-0.5b": QWEN2_05B,
    "window-from-layer-20": {
        **QWEN25_7B_INSTRUCT,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 20,
    },
    "window-on-all": {**QWEN25_7B_INSTRUCT, "use_sliding_window": True, "max_window_layers": 0},
    "window-used-but-null": {
        **QWEN25_7B_INSTRUCT,
        "use_sliding_window": True,
        "sliding_window": None,
    },
    "layer-types": {
        **QWEN25_7B_INSTRUCT,
        "use_sliding_window": True,
        "sliding_window": 1024,
        "layer_types": ["full_attention", "sliding_attention"] * 14,
    },
    "sparse": {
        key: QWEN25_7B_INSTRUCT[key]
        for key in (
            "architectures",
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
    },
    "qwen3-8b": QWEN3_8B,
    "qwen3-8b-yarn": {**QWEN3_8B, "rope_scaling": {**YARN, "rope_type": "yarn"}},
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-written-by-transformers-5": {
        **{key: value for key, value in QWEN3_8B.items() if not key.startswith("rope_")},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "layer_types": ["full_attention"] * 36,
        "dtype": "bfloat16",
    },
    "qwen1.5-moe-a2.7b": QWEN15_MOE_A27B,
    "qwen2-moe-with-a-window-and-dense-layers": {
        **QWEN15_MOE_A27B,
        "use_sliding_window": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "qwen2-moe-of-defaults": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}
EXPERT_KEYS = (
    "decoder_sparse_step",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
)


def build(values: dict[str, Any]) -> ModelConfig:
    return build_registry(plugin_errors="strict").model_config(HFConfig(values))


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_published_config_means_what_transformers_reads(values: dict[str, Any]) -> None:
    kind = values["model_type"]
    theirs = CONFIG_CLASSES[kind](**values)
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
        *(EXPERT_KEYS if kind.endswith("moe") else ()),
        *(("shared_expert_intermediate_size", "qkv_bias") if kind == "qwen2_moe" else ()),
        *(("layer_types",) if kind != "qwen3_moe" else ()),
    ):
        assert getattr(ours, key) == getattr(theirs, key), key
    # A window that no layer has is 0 or None, as the class has it.
    assert ours.sliding_window == (theirs.sliding_window or None)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == config.head_dim == head_dim
    if kind.startswith("qwen3"):
        assert ours.attention_bias == theirs.attention_bias
    rope = {key: value for key, value in theirs.rope_parameters.items() if key != "type"}
    assert {**ours.rope_scaling, "rope_theta": ours.rope_theta} == rope


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_what_transformers_writes_means_the_same(values: dict[str, Any]) -> None:
    written = CONFIG_CLASSES[values["model_type"]](**copy.deepcopy(values)).to_dict()
    ours = build(values).hf_config.to_dict()
    again = build({**written, "architectures": values["architectures"]}).hf_config.to_dict()
    left_out = {"rope_parameters", "torch_dtype", "dtype", "transformers_version"}
    shared = (set(ours) & set(again)) - left_out
    assert {key: again[key] for key in shared} == {key: ours[key] for key in shared}


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("qwen2.5-7b-instruct", 32768),
        ("qwen2.5-7b-instruct-yarn", 131072),
        ("qwen2-0.5b", 131072),
        ("qwen3-8b", 40960),
        ("qwen3-8b-yarn", 131072),
    ],
)
def test_the_longest_sequence_has_the_stretch_of_yarn(name: str, longest: int) -> None:
    config = build(PUBLISHED[name])
    assert config.max_position_embeddings == longest
    assert not config.may_exceed_length


def test_a_missing_number_of_key_heads_means_one_a_query_head() -> None:
    values = {key: value for key, value in QWEN3_8B.items() if key != "num_key_value_heads"}
    assert build(values).num_key_value_heads == 32


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"intermediate_size": 18944.0}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"use_sliding_window": 1}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": -1}, "sliding_window"),
        ({"max_window_layers": -1}, "max_window_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["linear_attention"] * 28}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 28}, "use_sliding_window"),
    ],
)
def test_a_broken_config_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build({**QWEN25_7B_INSTRUCT, **changes})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": "60"}, "num_experts"),
        ({"num_experts_per_tok": 61}, "num_experts_per_tok"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({"qkv_bias": 1}, "qkv_bias"),
    ],
)
def test_a_broken_mixture_is_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build({**QWEN15_MOE_A27B, **changes})


def test_layers_that_have_experts() -> None:
    config = build(PUBLISHED["qwen2-moe-with-a-window-and-dense-layers"]).hf_config
    sparse = [layer for layer, has in enumerate(config.sparse_layers) if has]
    assert sparse == [1, *range(5, 24, 2)]
