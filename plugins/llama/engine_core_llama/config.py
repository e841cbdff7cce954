"""Config builders of Llama and Mistral checkpoints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import (
    DefaultConfigBuilder,
    HFConfig,
    SentencePieceFormat,
    check_kinds,
    longest_sequence,
    refuse_partial_rotary,
    rope_keys,
)
from engine_core.configs.builder import token_ids
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
# <|eom_id|>, the end of a message that waits for a tool's answer.
_EOM = 128008

_SENTENCEPIECE = SentencePieceFormat(
    prefix=("<s>",),
    named_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
)


class LlamaConfigBuilder:
    """Reads the configs of Llama 1 to 3.x and of models published under its architecture."""

    architecture: ClassVar[str] = "LlamaForCausalLM"
    # Defaults of keys that older checkpoints leave out, from transformers' config class.
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing or senseless.
        """
        stated = {key: value for key, value in hf_config.to_dict().items() if value is not None}
        values = {**cls.defaults, **stated}
        values.update(rope_keys(values, _ROPE_TYPES))
        values.pop("rope_parameters", None)
        refuse_partial_rotary(values)
        values["sliding_window"] = cls.sliding_window(hf_config)
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        check_kinds(values, {"intermediate_size": 1, **cls.defaults})
        hf_config = HFConfig(values)
        kwargs.setdefault(
            "max_position_embeddings",
            longest_sequence(values["max_position_embeddings"], values["rope_scaling"]),
        )
        kwargs.setdefault("may_exceed_length", values["rope_scaling"]["rope_type"] == "dynamic")
        kwargs.setdefault("reads_rope_scaling", True)
        kwargs.setdefault("sentencepiece", _SENTENCEPIECE)
        kwargs.setdefault("tool_parser", _tool_parser(hf_config))
        config = DefaultConfigBuilder.build(hf_config, model_path, **kwargs)
        return config.replace(hf_config=hf_config.replace(head_dim=config.head_dim))

    @classmethod
    def sliding_window(cls, hf_config: HFConfig) -> int | None:
        """How many keys a query sees, itself included; None for all, as in every Llama."""
        del hf_config
        return None


class MistralConfigBuilder(LlamaConfigBuilder):
    """Reads the configs of Mistral 7B and of models published under its architecture."""

    architecture: ClassVar[str] = "MistralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **LlamaConfigBuilder.defaults,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    }

    @classmethod
    def sliding_window(cls, hf_config: HFConfig) -> int | None:
        """``sliding_window``, whose null means no window; a config without the key means 4096.

        Raises:
            ConfigError: it is no positive integer.
        """
        window = hf_config.to_dict().get("sliding_window", 4096)
        if window is None or (type(window) is int and window > 0):
            return window
        raise ConfigError(
            f"config.json: sliding_window must be a positive integer or null, got {window!r}"
        )


def _tool_parser(hf_config: HFConfig) -> str | None:
    """Instruction-tuned Llama 3.1 and later end a message with a call by a token of their own.

    Other models share the architecture and even the vocabulary, but not the format of tool calls.
    """
    return (
        "llama3_json" if _EOM in token_ids(hf_config.get("eos_token_id"), "eos_token_id") else None
    )
