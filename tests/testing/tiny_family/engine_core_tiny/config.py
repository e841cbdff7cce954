from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, ModelConfig
from engine_core.errors import ConfigError

# Keys that the model does not read, with the only value that it was written for.
_ONLY = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}


class TinyConfigBuilder:
    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        return bool(hf_config.get("architectures") == ["TinyForCausalLM"])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        values = hf_config.to_dict()
        for key, only in _ONLY.items():
            if values.get(key, only) != only:
                raise ConfigError(
                    f"config.json: {key} is {values[key]!r}, only {only!r} can be run"
                )
        rope = values.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"config.json: rope_type is {rope['rope_type']!r}, not 'default'")
        values["rope_theta"] = rope.get("rope_theta", values.get("rope_theta", 10000.0))
        mistral = values.get("model_type") == "mistral"
        if mistral:
            values.setdefault("sliding_window", 4096)
        else:  # Llama has none.
            values["sliding_window"] = None
        values.setdefault("attention_bias", False)
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        return DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)
