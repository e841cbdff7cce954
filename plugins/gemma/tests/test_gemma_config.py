"""The config builders against transformers' own config classes, for configs as published."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)

from engine_core import LLM, SamplingParams
from engine_core.configs import HFConfig, ModelConfig
from engine_core.configs.rope import override_rope
from engine_core.errors import ConfigError, RequestError
from engine_core.registry import build_registry

GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
}
NEWER = {
    **{key: value for key, value in GEMMA3_1B.items() if "rope" not in key},
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    },
    "layer_types": ["full_attention"] * 13 + ["sliding_attention"] * 13,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2-9b": GEMMA2_9B,
    "gemma-2-sparse": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "gemma-2-without-caps": {
        **GEMMA2_9B,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "gemma-3-1b": GEMMA3_1B,
    "gemma-3-sparse": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
    "gemma-3-written-by-transformers-5": NEWER,
    "gemma-3-27b": GEMMA3_27B,
}


def build(values: dict[str, Any]) -> ModelConfig:
    return build_registry(plugin_errors="strict").model_config(HFConfig(values))


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_a_published_config_means_what_transformers_reads(values: dict[str, Any]) -> None:
    theirs: Any
    if values["model_type"] == "gemma3":
        theirs = Gemma3Config(**values).text_config
        theirs.eos_token_id = values["eos_token_id"]
    else:
        theirs = {"gemma2": Gemma2Config, "gemma3_text": Gemma3TextConfig}[values["model_type"]](
            **values
        )
    config = build(values)
    ours = config.hf_config
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_activation",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "query_pre_attn_scalar",
        "layer_types",
        "sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "bos_token_id",
        "eos_token_id",
    ):
        assert getattr(ours, key) == getattr(theirs, key), key
    eos = theirs.eos_token_id
    assert config.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])
    for kind, found in ours.rope_parameters.items():
        wanted = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert found == {key: value for key, value in wanted.items() if key != "type"}, kind


@pytest.mark.parametrize(
    ("name", "longest"),
    [("gemma-2-9b", 8192), ("gemma-2-without-caps", 16384), ("gemma-3-27b", 131072)],
)
def test_the_longest_sequence(name: str, longest: int) -> None:
    assert build(PUBLISHED[name]).max_position_embeddings == longest


@pytest.mark.parametrize(
    ("override", "full", "sliding"),
    [
        ({"rope_scaling": {"factor": 2.0}}, (2.0, 5e5), 3e4),
        ({"rope_parameters": {"full_attention": {"rope_theta": 9e5}}}, (8.0, 9e5), 3e4),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 7e3}}}, (8.0, 5e5), 7e3),
    ],
)
def test_overrides_of_the_bases_of_each_kind_of_layer(
    override: dict[str, Any], full: tuple[float, float], sliding: float
) -> None:
    config = build({**NEWER, **override_rope(NEWER, override)})
    ropes = config.hf_config.rope_parameters
    found = ropes["full_attention"]
    assert found == {"rope_type": "linear", "factor": full[0], "rope_theta": full[1]}
    assert ropes["sliding_attention"] == {"rope_type": "default", "rope_theta": sliding}


@pytest.mark.parametrize(
    ("base", "changes", "names"),
    [
        (GEMMA2_9B, {"hidden_size": 3584.0}, "hidden_size must be a positive integer"),
        (GEMMA2_9B, {"head_dim": 0}, "head_dim"),
        (GEMMA2_9B, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive"),
        (GEMMA2_9B, {"final_logit_softcapping": "30"}, "final_logit_softcapping"),
        (GEMMA2_9B, {"query_pre_attn_scalar": True}, "query_pre_attn_scalar"),
        (GEMMA2_9B, {"sliding_window": None}, "sliding_attention layers need a sliding_window"),
        (GEMMA2_9B, {"sliding_window": 4096.0}, "sliding_window must be a positive integer"),
        (GEMMA2_9B, {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (GEMMA2_9B, {"layer_types": ["linear_attention"] * 42}, "layer_types must be a list of"),
        (GEMMA2_9B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA2_9B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not one"),
        (GEMMA2_9B, {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of rope_scaling"),
        (GEMMA2_9B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (GEMMA2_9B, {"rope_theta": 0}, "rope_theta must be a positive number"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "Gemma 3 caps no scores"),
        (GEMMA3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (GEMMA3_1B, {"rope_scaling": {"type": "linear"}, "rope_local_base_freq": 0}, "rope_theta"),
        (GEMMA3_1B, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor of rope_scaling"),
        (GEMMA3_1B, {"rope_parameters": [1]}, "rope_parameters must be an object"),
        (
            NEWER,
            {"rope_theta": 1e6},
            "rope_theta is 1000000.0, but rope_parameters",
        ),
        (GEMMA3_27B, {"text_config": None}, "text_config must be an object"),
        (
            GEMMA3_27B,
            {"text_config": {**GEMMA3_27B["text_config"], "final_logit_softcapping": 30.0}},
            "Gemma3ForConditionalGeneration caps no logits",
        ),
        (
            {key: value for key, value in GEMMA2_9B.items() if key != "rope_theta"},
            {"rope_parameters": NEWER["rope_parameters"]},
            "an object for 'full_attention', but all layers",
        ),
    ],
)
def test_a_broken_config_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        build({**base, **changes})


def test_the_text_of_a_checkpoint_that_sees(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers saves it, and with the names of newer files; a picture is refused."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 80,
        "hidden_size": 32,
        "intermediate_size": 48,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    model: Any = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    model.save_pretrained(tmp_path / "saved")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "config.json").write_bytes((tmp_path / "saved" / "config.json").read_bytes())
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    torch.save(tensors, newer / "pytorch_model.bin")
    ids = list(range(3, 23))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=80)
    for folder in (tmp_path / "saved", newer):
        with (
            caplog.at_level(logging.WARNING),
            LLM(str(folder), dtype="float32", skip_tokenizer_init=True) as llm,
        ):
            (output,) = llm.generate(ids, params)
            shown = {
                "prompt_token_ids": ids,
                "multi_modal_data": {"image": np.zeros((4, 4, 3), np.uint8)},
            }
            with pytest.raises(RequestError, match="takes text alone"):
                llm.generate(shown, params)
        assert output.prompt_logprobs is not None
        for row, entry in zip(expected, output.prompt_logprobs[1:], strict=False):
            for token, value in entry.items():
                assert abs(value.logprob - float(row[token])) < 1e-4
    assert "served for text alone" in caplog.text
    assert json.loads((newer / "config.json").read_text())["architectures"] == [
        "Gemma3ForConditionalGeneration"
    ]
