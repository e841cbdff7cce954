"""Reads configs of InternLM2 checkpoints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import (
    HFConfig,
    RotaryConfigBuilder,
    SentencePieceFormat,
)

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

_SENTENCEPIECE = SentencePieceFormat(
    prefix=("<s>",),
    named_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
)


class InternLM2ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of InternLM2 and InternLM2.5."""

    architecture: ClassVar[str] = "InternLM2ForCausalLM"
    rope_types = ("default", "linear", "dynamic")
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
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing or senseless.
        """
        kwargs.setdefault("sentencepiece", _SENTENCEPIECE)
        return super().build(hf_config, model_path, **kwargs)
