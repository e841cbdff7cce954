"""Config builders of Llama, Mistral and Mixtral checkpoints. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from engine_core.configs import (
    HFConfig,
    RotaryConfigBuilder,
    SentencePieceFormat,
)
from engine_core.configs.builder import token_ids
from engine_core.errors import ConfigError

# <|eom_id|>, the end of a message that waits for a tool's answer.
_EOM = 128008

_SENTENCEPIECE = SentencePieceFormat(
    prefix=("<s>",),
    named_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
)


class LlamaConfigBuilder(RotaryConfigBuilder):
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

    rope_types = (*RotaryConfigBuilder.rope_types, "dynamic")

    @classmethod
    def conventions(cls, hf_config: HFConfig) -> dict[str, Any]:
        """Tokens that SentencePiece files lack, and the format of tool calls."""
        return {"sentencepiece": _SENTENCEPIECE, "tool_parser": _tool_parser(hf_config)}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """No Llama has a window, whatever its config says."""
        super().complete(values)
        if "sliding_window" not in cls.nullable:
            values["sliding_window"] = None


class MistralConfigBuilder(LlamaConfigBuilder):
    """Reads the configs of Mistral 7B and of models published under its architecture."""

    architecture: ClassVar[str] = "MistralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **LlamaConfigBuilder.defaults,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    }
    # Null means no window.
    nullable: ClassVar[dict[str, tuple[Any, Any]]] = {"sliding_window": (1, 4096)}


class MixtralConfigBuilder(LlamaConfigBuilder):
    """Reads the configs of Mixtral 8x7B and 8x22B."""

    architecture: ClassVar[str] = "MixtralForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **LlamaConfigBuilder.defaults,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    # Null means no window.
    nullable: ClassVar[dict[str, tuple[Any, Any]]] = {"sliding_window": (1, None)}
    aliases: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """No linear of a Mixtral has a bias, whatever its config says."""
        super().complete(values)
        chosen, experts = values["num_experts_per_tok"], values["num_local_experts"]
        if chosen > experts:
            raise ConfigError(
                f"config.json: num_experts_per_tok {chosen} is more than num_local_experts "
                f"{experts}"
            )
        values["attention_bias"] = values["mlp_bias"] = False


def _tool_parser(hf_config: HFConfig) -> str | None:
    """Instruction-tuned Llama 3.1 and later end a message with a call by a token of their own.

    Other models share the architecture and even the vocabulary, but not the format of tool calls.
    """
    return (
        "llama3_json" if _EOM in token_ids(hf_config.get("eos_token_id"), "eos_token_id") else None
    )
