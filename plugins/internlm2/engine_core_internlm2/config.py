"""Reads configs of InternLM2 checkpoints. Imports no torch."""

from __future__ import annotations

from typing import Any, ClassVar

from engine_core.configs import (
    HFConfig,
    RotaryConfigBuilder,
    SentencePieceFormat,
)

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
    def conventions(cls, hf_config: HFConfig) -> dict[str, Any]:
        """Tokens that SentencePiece files lack."""
        return {"sentencepiece": _SENTENCEPIECE}
