from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, ModelConfig


class TinyConfigBuilder:
    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        return bool(hf_config.get("architectures") == ["TinyForCausalLM"])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        values = hf_config.to_dict()
        values.setdefault("sliding_window", None)
        values.setdefault("attention_bias", False)
        return DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)
