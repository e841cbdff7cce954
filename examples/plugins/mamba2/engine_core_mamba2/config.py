"""Config builder of Mamba-2 checkpoints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, check_kinds, stated_keys
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

# What transformers' config class has for keys that a config leaves out.
_DEFAULTS = {
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-5,
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "residual_in_fp32": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 32768,
}
# A state has no end. So long were the prompts on which Codestral Mamba was tried by its makers.
_TRIED_LENGTH = 2**18


class Mamba2ConfigBuilder:
    """Reads the configs of Mamba-2 in transformers' form."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself a Mamba-2."""
        return bool(hf_config.get("architectures") == ["Mamba2ForCausalLM"])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        Raises:
            ConfigError: a key has a value of the wrong kind, or asks for a variant that the model
                does not support.
        """
        values: dict[str, Any] = {**_DEFAULTS, **stated_keys(hf_config.to_dict())}
        check_kinds(values, _DEFAULTS)
        if values.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ConfigError(
                f"config.json: hidden_act is {values['hidden_act']!r}; engine-core-mamba2 knows "
                "only 'silu'"
            )
        heads, head_dim, groups = values["num_heads"], values["head_dim"], values["n_groups"]
        inner = values["hidden_size"] * values["expand"]
        if heads * head_dim != inner:
            raise ConfigError(
                f"config.json: num_heads ({heads}) times head_dim ({head_dim}) must be hidden_size "
                f"times expand ({inner})"
            )
        if heads % groups:
            raise ConfigError(
                f"config.json: num_heads ({heads}) is not divisible by n_groups ({groups})"
            )
        if values["conv_kernel"] < 2:
            raise ConfigError(
                f"config.json: conv_kernel must be at least 2, got {values['conv_kernel']}"
            )
        values["time_step_limit"] = _limits(values.get("time_step_limit", (0.0, "Infinity")))
        values["num_attention_heads"] = heads
        values.setdefault("max_position_embeddings", _TRIED_LENGTH)
        return DefaultConfigBuilder.build(
            hf_config.replace(**values), model_path, may_exceed_length=True, **kwargs
        )


def _limits(value: Any) -> tuple[float, float]:
    """The least and greatest time step. JSON has no infinity; transformers writes an object."""
    items = list(value) if isinstance(value, list | tuple) else []
    items = [item.get("__float__") if isinstance(item, dict) else item for item in items]
    numbers = [float(item) for item in items if type(item) in (int, float) or item == "Infinity"]
    if not len(numbers) == len(items) == 2 or not 0 <= numbers[0] <= numbers[1]:
        raise ConfigError(
            f"config.json: time_step_limit must be the least and the greatest step, got {value!r}"
        )
    return numbers[0], numbers[1]
