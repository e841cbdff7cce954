"""Config builder of BLOOM checkpoints. Imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, stated_keys
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

# The names that the model reads, and those that published checkpoints have for them.
_ALIASES = {
    "hidden_size": ("n_embed",),
    "num_attention_heads": ("n_head",),
    "num_hidden_layers": ("n_layer",),
}
# The length that all published checkpoints were trained with; few state it.
_TRAINED_LENGTH = 2048


class BloomConfigBuilder:
    """Reads the configs of BLOOM and BLOOMZ.

    ALiBi has no position at which it ends, so that ``seq_length``, which is the trained length, is
    where the model stops unless a user asks for more: ``may_exceed_length`` is true.
    """

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint is a BLOOM, saved with its tied head or without."""
        return hf_config.get("architectures") in (["BloomForCausalLM"], ["BloomModel"])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key is missing or senseless, or two names of one value differ.
        """
        values = stated_keys(hf_config.to_dict())
        for name, others in _ALIASES.items():
            _unify(values, name, others)
        values.setdefault("layer_norm_epsilon", 1e-5)
        values.setdefault("apply_residual_connection_post_layernorm", False)
        values.setdefault("tie_word_embeddings", True)
        _check(values)
        hf_config = HFConfig(values)
        kwargs.setdefault("architecture", "BloomForCausalLM")
        kwargs.setdefault("max_position_embeddings", values.get("seq_length", _TRAINED_LENGTH))
        kwargs.setdefault("may_exceed_length", True)
        return DefaultConfigBuilder.build(hf_config, model_path, **kwargs)


def _unify(values: dict[str, Any], name: str, others: tuple[str, ...]) -> None:
    """Put what stands under ``name`` or one of the ``others`` under ``name``."""
    stated = {key: values.pop(key) for key in (name, *others) if key in values}
    if len(set(map(repr, stated.values()))) > 1:
        both = " and ".join(f"{key} is {value!r}" for key, value in stated.items())
        raise ConfigError(f"config.json: {both}, which are two names of one value; remove one")
    if not stated:
        raise ConfigError(f"config.json has none of {', '.join((name, *others))}")
    values[name] = next(iter(stated.values()))


def _check(values: dict[str, Any]) -> None:
    for key in ("apply_residual_connection_post_layernorm", "tie_word_embeddings"):
        if not isinstance(values[key], bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {values[key]!r}")
    eps = values["layer_norm_epsilon"]
    if type(eps) not in (int, float) or not (math.isfinite(eps) and eps > 0):
        raise ConfigError(f"config.json: layer_norm_epsilon must be a positive number, got {eps!r}")
