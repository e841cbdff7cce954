"""Reads configs of InternLM2 checkpoints. Imports no torch."""

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

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

_ROPE_TYPES = ("default", "linear", "dynamic")
_SENTENCEPIECE = SentencePieceFormat(
    prefix=("<s>",),
    named_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
)


class InternLM2ConfigBuilder:
    """Reads the configs of InternLM2 and InternLM2.5."""

    # Defaults of keys that checkpoints leave out, from the original config class.
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "bias": True,
        "tie_word_embeddings": False,
    }

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == ["InternLM2ForCausalLM"])

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
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        check_kinds(values, {"intermediate_size": 1, **cls.defaults})
        kwargs.setdefault(
            "max_position_embeddings",
            longest_sequence(values["max_position_embeddings"], values["rope_scaling"]),
        )
        kwargs.setdefault("may_exceed_length", values["rope_scaling"]["rope_type"] == "dynamic")
        kwargs.setdefault("reads_rope_scaling", True)
        kwargs.setdefault("sentencepiece", _SENTENCEPIECE)
        config = DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)
        return config.replace(hf_config=HFConfig(values, head_dim=config.head_dim))
