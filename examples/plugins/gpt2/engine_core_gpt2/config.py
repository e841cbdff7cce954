"""Config builder of GPT-2 checkpoints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, check_kinds
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

# The names that the core reads, and those that GPT-2's config has for them.
_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
# Variants that exist in transformers and not in this package's model. Better a message than a
# wrong answer.
_ONLY = {
    "activation_function": "gelu_new",
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}


class GPT2ConfigBuilder:
    """Reads the configs of GPT-2 and of models published under its architecture."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself a GPT-2."""
        return bool(hf_config.get("architectures") == ["GPT2LMHeadModel"])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing, or asks for a variant that the model does not support.
        """
        for key, value in _ONLY.items():
            if hf_config.get(key, value) != value:
                raise ConfigError(
                    f"config.json: {key} is {hf_config.get(key)!r}; "
                    f"engine-core-gpt2 knows only {value!r}"
                )
        names = {ours: hf_config.get(theirs) for ours, theirs in _NAMES.items()}
        hf_config = hf_config.replace(
            **{name: value for name, value in names.items() if value is not None},
            layer_norm_epsilon=hf_config.get("layer_norm_epsilon", 1e-5),
            tie_word_embeddings=hf_config.get("tie_word_embeddings", True),
        )
        check_kinds(hf_config.to_dict(), {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True})
        config = DefaultConfigBuilder.build(hf_config, model_path, **kwargs)
        inner = hf_config.get("n_inner", 4 * config.hidden_size)
        return config.replace(hf_config=hf_config.replace(intermediate_size=inner))
