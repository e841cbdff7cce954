"""Published ChatGLM configs as model configs, and the ones refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_core.configs import HFConfig, ModelConfig
from engine_core.errors import ConfigError
from engine_core.registry import build_registry

CHATGLM_6B = {
    "_name_or_path": "THUDM/chatglm-6b",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "bos_token_id": 130004,
    "eos_token_id": 130005,
    "mask_token_id": 130000,
    "gmask_token_id": 130001,
    "pad_token_id": 3,
    "hidden_size": 4096,
    "inner_hidden_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_sequence_length": 2048,
    "model_type": "chatglm",
    "num_attention_heads": 32,
    "num_layers": 28,
    "position_encoding_2d": True,
    "torch_dtype": "float16",
    "transformers_version": "4.23.1",
    "use_cache": True,
    "vocab_size": 130528,
}
CHATGLM2_6B = {
    "_name_or_path": "THUDM/chatglm2-6b",
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "ffn_hidden_size": 13696,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "original_rope": True,
    "padded_vocab_size": 65024,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 32768,
    "use_cache": True,
    "torch_dtype": "float16",
    "transformers_version": "4.27.1",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHATGLM3_6B = {
    **CHATGLM2_6B,
    "_name_or_path": "THUDM/chatglm3-6b",
    "classifier_dropout": None,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
    "seq_length": 8192,
    "transformers_version": "4.30.2",
}


def build(config: dict[str, Any], folder: Path | None = None, **changes: Any) -> ModelConfig:
    values = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return build_registry().model_config(HFConfig(values), folder)


def test_chatglm_6b() -> None:
    config = build(CHATGLM_6B)
    assert config.architecture == "ChatGLM1ForConditionalGeneration"
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (130528, 4096, 28)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        32,
        32,
        128,
    )
    assert config.max_position_embeddings == 2048
    assert config.dtype == "float16"
    assert (config.bos_token_id, config.eos_token_ids) == (130004, (130005,))


@pytest.mark.parametrize(("published", "length"), [(CHATGLM2_6B, 32768), (CHATGLM3_6B, 8192)])
def test_chatglm2_6b_and_chatglm3_6b(published: dict[str, Any], length: int) -> None:
    config = build(published)
    assert config.architecture == "ChatGLM2ForConditionalGeneration"
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (65024, 4096, 28)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 2, 128)
    assert config.max_position_embeddings == length
    # <|user|> and <|observation|> end a turn of version 3; version 2 never gives them.
    assert config.eos_token_ids == (2, 64795, 64797)


def test_what_version_2_leaves_out_is_filled_in() -> None:
    given = (
        "architectures",
        "model_type",
        "ffn_hidden_size",
        "hidden_size",
        "num_attention_heads",
        "num_layers",
        "padded_vocab_size",
    )
    config = build({key: CHATGLM2_6B[key] for key in given})
    # As ChatGLMConfig of configuration_chatglm.py has them.
    assert config.max_position_embeddings == 2048
    assert config.num_key_value_heads == 32
    hf_config = config.hf_config
    assert hf_config.layernorm_epsilon == 1e-5
    assert (hf_config.rmsnorm, hf_config.post_layer_norm) == (True, True)
    assert (hf_config.add_bias_linear, hf_config.add_qkv_bias) == (False, False)


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (CHATGLM_6B, {"position_encoding_2d": False}, "position_encoding_2d False"),
        (CHATGLM_6B, {"quantization_bit": 4}, "quantization_bit 4"),
        (CHATGLM_6B, {"tie_word_embeddings": True}, "tie_word_embeddings True .*, only False"),
        (CHATGLM2_6B, {"tie_word_embeddings": True}, "tie_word_embeddings True .*, only False"),
        (
            CHATGLM_6B,
            {"pre_seq_len": 128},
            "pre_seq_len 128 is not supported for ChatGLM; leave it out: it changes the results",
        ),
        (
            CHATGLM_6B,
            {"rope_theta": 5e5},
            r"rope_theta 500000\.0 is not .*, only 10000\.0: its code",
        ),
        (CHATGLM2_6B, {"rope_theta": 5e5}, r"rope_theta 500000\.0 .* its code never reads it"),
        (CHATGLM2_6B, {"rope_scaling": {"type": "linear"}}, "rope_scaling .* never reads it"),
        (CHATGLM2_6B, {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters .*; leave it out"),
        (CHATGLM_6B, {"gmask_token_id": ...}, "'gmask_token_id' must be a token id.*150528"),
        (CHATGLM_6B, {"bos_token_id": "4"}, "'bos_token_id' must be a token id"),
        (CHATGLM_6B, {"num_layers": ...}, "'num_layers' must be a positive integer, got None"),
        (CHATGLM_6B, {"max_sequence_length": 0}, "'max_sequence_length' must be a positive"),
        (CHATGLM_6B, {"inner_hidden_size": 1.5}, "'inner_hidden_size' must be a positive"),
        (CHATGLM_6B, {"layernorm_epsilon": "x"}, "'layernorm_epsilon'"),
        (CHATGLM_6B, {"num_attention_heads": 2048}, "divisible by 4 for ChatGLM, got 2"),
        (CHATGLM2_6B, {"rope_ratio": 0}, "'rope_ratio' must be a positive number, got 0"),
        (CHATGLM2_6B, {"rope_ratio": True}, "'rope_ratio' must be a positive number, got True"),
        (CHATGLM2_6B, {"original_rope": False}, "original_rope False"),
        (CHATGLM2_6B, {"fp32_residual_connection": True}, "fp32_residual_connection True"),
        (CHATGLM3_6B, {"quantization_bit": 8}, "quantization_bit 8"),
        (CHATGLM3_6B, {"pre_seq_len": 64}, "pre_seq_len 64"),
        (CHATGLM3_6B, {"vision_config": {"depth": 63}}, "vision_config"),
        (CHATGLM2_6B, {"rmsnorm": 1}, "'rmsnorm' must be true or false, got 1"),
        (CHATGLM2_6B, {"ffn_hidden_size": ...}, "'ffn_hidden_size' must be a positive"),
        (CHATGLM2_6B, {"multi_query_group_num": 3}, "not divisible by"),
        (CHATGLM2_6B, {"kv_channels": 6}, "kv_channels must be divisible by 4"),
        (CHATGLM2_6B, {"seq_length": -1}, "'seq_length' must be a positive"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    published: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(published, **changes)


def template_name(config: ModelConfig) -> str:
    template = config.default_chat_template
    assert template is not None
    return template.split("-6B", 1)[0].removeprefix("{#- ")


def test_a_version_has_its_own_chat_template() -> None:
    assert template_name(build(CHATGLM_6B)) == "ChatGLM"
    assert template_name(build(CHATGLM2_6B)) == "ChatGLM2"
    assert template_name(build(CHATGLM3_6B)) == "ChatGLM3"


def test_a_tuned_version_3_is_known_by_its_tokenizer(tmp_path: Path) -> None:
    tuned = {**CHATGLM3_6B, "_name_or_path": "output/checkpoint-300"}
    assert template_name(build(tuned, tmp_path)) == "ChatGLM2"
    (tmp_path / "tokenization_chatglm.py").write_text('special_tokens = ["[MASK]", "<|user|>"]')
    assert template_name(build(tuned, tmp_path)) == "ChatGLM3"


# The line that differs in modeling_chatglm.py, with what is around it.
DIVIDES = "        seq_idx = torch.arange(seq_len, dtype=dtype, device=device) / self.rope_ratio\n"
MULTIPLIES = "        base = base * self.rope_ratio\n        theta = 1.0 / (base ** x)\n"
LONG_2: tuple[float, object] = (10000.0, {"rope_type": "linear", "factor": 50})
LONG_3: tuple[float, object] = (500000.0, None)


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("THUDM/chatglm2-6b-32k", None, LONG_2),
        ("THUDM/chatglm3-6b-32k", None, LONG_3),
        ("output/checkpoint-300", DIVIDES, LONG_2),
        ("output/checkpoint-300", MULTIPLIES, LONG_3),
        # The code, not the name, says what the weights were trained with.
        ("my-chatglm2-to-chatglm3", DIVIDES, LONG_2),
        ("longer-than-chatglm2", MULTIPLIES, LONG_3),
    ],
)
def test_a_long_version_is_told_by_its_code_or_its_name(
    name: str, code: str | None, expected: tuple[float, object], tmp_path: Path
) -> None:
    if code is not None:
        (tmp_path / "modeling_chatglm.py").write_text(f"raise SystemExit\n{code}")
    long = {**CHATGLM2_6B, "rope_ratio": 50, "_name_or_path": name}
    hf_config = build(long, tmp_path).hf_config
    assert (hf_config.rope_theta, hf_config.rope_scaling) == expected
    assert build({**CHATGLM2_6B, "rope_ratio": 1}).hf_config.rope_theta == 10000.0


@pytest.mark.parametrize("code", [None, "nothing of it", DIVIDES + MULTIPLIES])
def test_a_long_version_that_nothing_tells_is_refused(code: str | None, tmp_path: Path) -> None:
    if code is not None:
        (tmp_path / "modeling_chatglm.py").write_text(code)
    long = {**CHATGLM2_6B, "rope_ratio": 50, "_name_or_path": "output/checkpoint-300"}
    with pytest.raises(ConfigError, match=r"rope_ratio 50 divides the positions in ChatGLM2 and"):
        build(long, tmp_path)
