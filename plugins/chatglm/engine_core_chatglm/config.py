"""Config builders of ChatGLM checkpoints. Imports no torch.

All versions call themselves ``ChatGLMModel`` of type ``chatglm``. The architecture names chosen
here are those of this package: ChatGLM1ForConditionalGeneration for ChatGLM-6B, and
ChatGLM2ForConditionalGeneration for ChatGLM2 and ChatGLM3, which compute the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, stated_keys
from engine_core.errors import ConfigError
from engine_core_chatglm.tokenizer import FORMAT_1, FORMAT_2, FORMAT_3

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

_NAMES = (["ChatGLMModel"], ["ChatGLMForConditionalGeneration"])

# Defaults of keys that older checkpoints leave out, from each version's configuration_chatglm.py.
_DEFAULTS_1 = {"layernorm_epsilon": 1e-5, "position_encoding_2d": True}
_DEFAULTS_2 = {
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

_BASE = 10000.0

# Rope scaling keys of other families; the original code reads rope_ratio alone, or nothing.
_ROTATION: dict[str, tuple[Any, ...]] = {
    "rope_theta": (_BASE,),
    "rope_scaling": (),
    "rope_parameters": (),
}

# Keys that change the mathematics in ways that nobody has checked here, and the values that do not.
_ONLY_1: dict[str, tuple[Any, ...]] = {
    "position_encoding_2d": (True,),
    "quantization_bit": (0,),
    "pre_seq_len": (),
    "tie_word_embeddings": (False,),
    **_ROTATION,
}
_ONLY_2: dict[str, tuple[Any, ...]] = {
    "original_rope": (True,),
    "fp32_residual_connection": (False,),
    "quantization_bit": (0,),
    "pre_seq_len": (),
    "vision_config": (),
    "tie_word_embeddings": (False,),
    **_ROTATION,
}

# In the vocabulary that ChatGLM2 and ChatGLM3 share, version 3 ends its turn with <|user|> or
# <|observation|>; version 2 never gives these ids, for which it has no token.
_VOCABULARY_23 = 65024
_ENDS_OF_TURN_3 = (64795, 64797)


class ChatGLM1ConfigBuilder(DefaultConfigBuilder):
    """Reads the config of ChatGLM-6B, final revision (vocabulary 130528)."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether this is a ChatGLM without the later versions' ``padded_vocab_size``."""
        return _is_chatglm(hf_config) and "padded_vocab_size" not in hf_config

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing, senseless or asks for what is not supported.
        """
        values = _filled(hf_config, _DEFAULTS_1, _ONLY_1)
        for key in ("gmask_token_id", "mask_token_id", "bos_token_id"):
            value = values.get(key)
            if type(value) is not int or value < 0:
                raise ConfigError(
                    f"config.json: {key!r} must be a token id, got {value!r}. The first revisions "
                    "of ChatGLM-6B (vocabulary 150528) do not have it and are not supported: take "
                    "the final one"
                )
        _positive(values, "inner_hidden_size")
        values["num_hidden_layers"] = _positive(values, "num_layers")
        values["max_position_embeddings"] = _positive(values, "max_sequence_length")
        kwargs.setdefault("architecture", "ChatGLM1ForConditionalGeneration")
        kwargs = {**cls.conventions(hf_config), **kwargs}
        config = super().build(HFConfig(values), model_path, **kwargs)
        return _with_head_dim(config, "hidden_size / num_attention_heads")

    @classmethod
    def conventions(cls, hf_config: HFConfig) -> dict[str, Any]:
        """The template and the file of the tokenizer."""
        return {"default_chat_template": _chat_template("chatglm1"), "sentencepiece": FORMAT_1}


class ChatGLM2ConfigBuilder:
    """Reads the configs of ChatGLM2-6B and ChatGLM3-6B."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether this is a ChatGLM with ``padded_vocab_size``."""
        return _is_chatglm(hf_config) and "padded_vocab_size" in hf_config

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing, senseless or asks for what is not supported.
        """
        values = _filled(hf_config, _DEFAULTS_2, _ONLY_2)
        _positive(values, "ffn_hidden_size")
        heads = _positive(values, "num_attention_heads")
        groups = _positive(values, "multi_query_group_num")
        values["vocab_size"] = _positive(values, "padded_vocab_size")
        values["num_hidden_layers"] = _positive(values, "num_layers")
        values["num_key_value_heads"] = groups if values["multi_query_attention"] else heads
        values["max_position_embeddings"] = _positive(values, "seq_length")
        if "kv_channels" in values:
            values["head_dim"] = _positive(values, "kv_channels")
        values["rope_theta"], values["rope_scaling"] = _rope(values, model_path)
        kwargs.setdefault("architecture", "ChatGLM2ForConditionalGeneration")
        has_roles = _has_role_tokens(hf_config, model_path)
        version = "chatglm3" if has_roles else "chatglm2"
        kwargs.setdefault("default_chat_template", _chat_template(version))
        kwargs.setdefault("sentencepiece", FORMAT_3 if has_roles else FORMAT_2)
        config = DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)
        if config.vocab_size == _VOCABULARY_23 and "eos_token_ids" not in kwargs:
            ends = tuple(dict.fromkeys((*config.eos_token_ids, *_ENDS_OF_TURN_3)))
            config = config.replace(eos_token_ids=ends)
        return _with_head_dim(config, "kv_channels")


def _is_chatglm(hf_config: HFConfig) -> bool:
    return hf_config.get("model_type") == "chatglm" and (
        hf_config.get("architectures", _NAMES[0]) in _NAMES
    )


def _filled(
    hf_config: HFConfig, defaults: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    given = stated_keys(hf_config.to_dict())
    values = {**defaults, **given}
    for key, known in only.items():
        if key in values and values[key] not in known:
            allowed = " or ".join(map(repr, known))
            raise ConfigError(
                f"config.json: {key} {values[key]!r} is not supported for ChatGLM"
                + (f", only {allowed}: " if known else "; leave it out: ")
                + (
                    "its code never reads it"
                    if key in _ROTATION
                    else "it changes the results in a way that has not been verified"
                )
            )
    for key, default in defaults.items():
        if isinstance(default, bool) and not isinstance(values[key], bool):
            raise ConfigError(f"config.json: {key!r} must be true or false, got {values[key]!r}")
    epsilon = values["layernorm_epsilon"]
    if not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise ConfigError(f"config.json: 'layernorm_epsilon' must be in (0, 1), got {epsilon!r}")
    return values


def _positive(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"config.json: {key!r} must be a positive integer, got {value!r}")
    return value


def _with_head_dim(config: ModelConfig, source: str) -> ModelConfig:
    if config.head_dim % 4:
        # The halves of a head are rotated by other positions, or one is not; each half in pairs.
        raise ConfigError(
            f"config.json: {source} must be divisible by 4 for ChatGLM, got {config.head_dim}"
        )
    return config.replace(hf_config=config.hf_config.replace(head_dim=config.head_dim))


def _rope(
    values: Mapping[str, Any], model_path: Path | None
) -> tuple[float, dict[str, Any] | None]:
    """The rope_theta and rope_scaling that ``rope_ratio`` stands for.

    The two differ: modeling_chatglm.py of ChatGLM2-6B-32K divides the positions by it, that of
    ChatGLM3-6B-32K and all later ones multiplies the base by it. The config does not say which.

    Raises:
        ConfigError: it is no positive number, or nothing tells which of the two it is.
    """
    ratio = values["rope_ratio"]
    if type(ratio) not in (int, float) or not 0 < ratio < float("inf"):
        raise ConfigError(f"config.json: 'rope_ratio' must be a positive number, got {ratio!r}")
    if ratio == 1:
        return _BASE, None
    divides = _divides_positions(values, model_path)
    if divides is None:
        raise ConfigError(
            f"config.json: rope_ratio {ratio!r} divides the positions in ChatGLM2 and multiplies "
            "the base of the rotation in ChatGLM3, and nothing says which of them this is: put the "
            "checkpoint's modeling_chatglm.py beside config.json (it is read, not run), or set "
            "_name_or_path to chatglm2 or chatglm3 in hf_overrides"
        )
    return (_BASE, {"rope_type": "linear", "factor": ratio}) if divides else (_BASE * ratio, None)


def _divides_positions(values: Mapping[str, Any], model_path: Path | None) -> bool | None:
    """By the checkpoint's own code, or else by its version; None if neither is there."""
    if model_path is not None:
        with suppress(OSError):
            code = (model_path / "modeling_chatglm.py").read_text(encoding="utf-8")
            multiplies = re.search(r"base\s*\*\s*self\.rope_ratio", code) is not None
            divides = re.search(r"/\s*self\.rope_ratio", code) is not None
            if multiplies != divides:
                return divides
    if _has_role_tokens(HFConfig(values), model_path):
        return False
    names = (str(values.get("_name_or_path", "")), "" if model_path is None else model_path.name)
    return True if any("chatglm2" in name.lower() for name in names) else None


def _has_role_tokens(hf_config: HFConfig, model_path: Path | None) -> bool:
    """Whether this is version 3: the configs of 2 and 3 have the same keys, not their tokenizers.

    Files are looked at as text; the checkpoint's code is not run.
    """
    names = [str(hf_config.get("_name_or_path", ""))]
    if model_path is not None:
        names.append(model_path.name)
        for file in ("tokenizer_config.json", "tokenization_chatglm.py", "tokenizer.json"):
            with suppress(OSError):
                if b"<|user|>" in (model_path / file).read_bytes():
                    return True
    return any("chatglm3" in name.lower() for name in names)


def _chat_template(name: str) -> str:
    file = Path(__file__).parent / "chat_templates" / f"{name}.jinja"
    return file.read_text(encoding="utf-8")
