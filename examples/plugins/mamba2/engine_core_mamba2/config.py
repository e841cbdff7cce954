"""Config builders of Mamba-2 and Bamba checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import (
    DefaultConfigBuilder,
    HFConfig,
    RotaryConfigBuilder,
    check_kinds,
    stated_keys,
)
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

# What transformers' config class has for keys that a config leaves out.
_DEFAULTS = {
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
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
        _complete(values, "num_heads", "head_dim", "n_groups", "conv_kernel", "expand")
        values["num_attention_heads"] = values["num_heads"]
        values.setdefault("max_position_embeddings", _TRIED_LENGTH)
        return DefaultConfigBuilder.build(
            hf_config.replace(**values), model_path, may_exceed_length=True, **kwargs
        )


class BambaConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of Bamba, in which some layers attend."""

    architecture: ClassVar[str] = "BambaForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "mamba_d_conv": 4,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_proj_bias": False,
        "max_position_embeddings": 262144,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        # transformers takes no other.
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128000,
    }
    # Null is no to transformers.
    nullable: ClassVar[Mapping[str, tuple[Any, Any]]] = {"mamba_conv_bias": (True, True)}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Also the sizes of the mixer, and which layers attend."""
        super().complete(values)
        values["partial_rotary_factor"] = 0.5
        heads, head_dim = values["mamba_n_heads"], values.get("mamba_d_head", "auto")
        if head_dim == "auto":
            values["mamba_d_head"] = values["mamba_expand"] * values["hidden_size"] // heads
        check_kinds(values, {"mamba_d_head": 1})
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_conv", "mamba_expand")
        _complete(values, *names)
        layers = values.setdefault("attn_layer_indices", [])
        if not isinstance(layers, list) or not all(type(index) is int for index in layers):
            raise ConfigError(
                f"config.json: attn_layer_indices must be a list of layers, got {layers!r}"
            )


def _complete(
    values: dict[str, Any], heads: str, head_dim: str, groups: str, kernel: str, expand: str
) -> None:
    """Check what the mixer reads under these names, and bring its limits into one form."""
    if values["hidden_act"] not in ("silu", "swish"):
        raise ConfigError(
            f"config.json: hidden_act is {values['hidden_act']!r}; engine-core-mamba2 knows "
            "only 'silu'"
        )
    inner = values["hidden_size"] * values[expand]
    if values[heads] * values[head_dim] != inner:
        raise ConfigError(
            f"config.json: {heads} ({values[heads]}) times {head_dim} ({values[head_dim]}) must be "
            f"hidden_size times {expand} ({inner})"
        )
    if values[heads] % values[groups]:
        raise ConfigError(
            f"config.json: {heads} ({values[heads]}) is not divisible by {groups} "
            f"({values[groups]})"
        )
    if values[kernel] < 2:
        raise ConfigError(f"config.json: {kernel} must be at least 2, got {values[kernel]}")
    values["time_step_limit"] = _limits(values.get("time_step_limit", (0.0, "Infinity")))


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
