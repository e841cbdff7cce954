"""Config builders of Qwen2 and Qwen3 checkpoints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import (
    DefaultConfigBuilder,
    HFConfig,
    check_kinds,
    longest_sequence,
    refuse_partial_rotary,
    rope_keys,
)
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

# Dynamic scaling is not among them: cached blocks would need salts, and no checkpoint has it.
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Qwen2ConfigBuilder:
    """Reads the configs of Qwen2, of Qwen2.5 and of models published under their architecture.

    Which layers have a sliding window, and how wide it is, stands in the keys ``layer_types`` and
    ``sliding_window`` of the built config, however the checkpoint says it.
    """

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    # Defaults of keys that older checkpoints leave out, from transformers' config class.
    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    reasoning_parser: ClassVar[str | None] = None

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

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
        kwargs.setdefault("reads_rope_scaling", True)
        # The parser does nothing to a text without its tags, so that older models are not harmed.
        kwargs.setdefault("tool_parser", "hermes")
        kwargs.setdefault("reasoning_parser", cls.reasoning_parser)
        config = DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)
        values["sliding_window"] = _sliding_window(hf_config, values["use_sliding_window"])
        values["layer_types"] = _layer_types(values, config.num_layers)
        values["head_dim"] = config.head_dim
        return config.replace(hf_config=HFConfig(values))


class Qwen3ConfigBuilder(Qwen2ConfigBuilder):
    """Reads the configs of dense Qwen3, whose head size does not follow from the hidden size."""

    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **Qwen2ConfigBuilder.defaults,
        "head_dim": 128,
        "attention_bias": False,
    }
    reasoning_parser: ClassVar[str | None] = "think"


def _sliding_window(hf_config: HFConfig, used: bool) -> int | None:
    """The window, or None: the key is there in most checkpoints, but only counts if ``used``."""
    window = hf_config.to_dict().get("sliding_window", 4096) if used else None
    if window is None or (type(window) is int and window > 0):
        return window
    raise ConfigError(
        f"config.json: sliding_window must be a positive integer or null, got {window!r}"
    )


def _layer_types(values: dict[str, Any], num_layers: int) -> list[str]:
    """``layer_types`` of newer configs; older ones slide from layer ``max_window_layers`` on."""
    window = values["sliding_window"]
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ConfigError(
                f"config.json: max_window_layers must be an integer from 0 on, got {first!r}"
            )
        full = num_layers if window is None else min(first, num_layers)
        return [_FULL] * full + [_SLIDING] * (num_layers - full)
    if not isinstance(types, list) or not all(kind in (_FULL, _SLIDING) for kind in types):
        raise ConfigError(
            f"config.json: layer_types must be a list of {_FULL!r} and {_SLIDING!r}, got {types!r}"
        )
    if len(types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types has {len(types)} entries, num_hidden_layers is {num_layers}"
        )
    if window is None and _SLIDING in types:
        raise ConfigError(
            f"config.json: layer_types has {_SLIDING!r}, which needs a sliding_window and "
            f"use_sliding_window true, got {values['use_sliding_window']!r}"
        )
    return types
