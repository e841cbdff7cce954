from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, ModelConfig


class LooksConfigBuilder:
    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        return bool(hf_config.get("architectures") == ["LooksForCausalLM"])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        return DefaultConfigBuilder.build(hf_config, model_path, **kwargs)
