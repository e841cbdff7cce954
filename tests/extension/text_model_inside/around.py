"""A model around a text model of any family, as a module map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine_core.configs import HFConfig, ModelConfig
from engine_core.nn import AroundTextModel, Weights, build_replicated_linear, stacked_loader
from engine_core.registry import text_model_config
from engine_core.step_context import StepContextManager


class AroundBuilder:
    """Reads a config whose ``llm`` is that of the text model."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the config is of this file."""
        return bool(hf_config.get("architectures") == ["Around"])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The text model's config under this model's name."""
        packages = {"NobodysForCausalLM": "engine-core-nobodys"}
        text = text_model_config(HFConfig(hf_config.llm), model_path, packages)
        values = {"llm": text.hf_config.to_dict(), "width": hf_config.width}
        return text.replace(
            architecture="Around", hf_config=HFConfig(values), text_model=text, **kwargs
        )


class Around(AroundTextModel):
    """The text model, and a linear beside it."""

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(HFConfig(config.llm), ctx_mgr, dtype, device)
        self.eye = build_replicated_linear(config.width, config.width)

    def load_weights(self, weights: Weights) -> None:
        """The text model's are under ``llm.``."""
        self.load_text_weights(weights, "llm.", stacked_loader(self, {}))


MODULE_MAP = {"Around": "Around"}
CONFIG_BUILDERS = [AroundBuilder]
