"""Builders that turn a checkpoint's config into a :class:`ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from engine_core.configs.dtypes import DTYPES
from engine_core.configs.hf_config import HFConfig
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs.model import ModelConfig


@runtime_checkable
class ConfigBuilder(Protocol):
    """Reads one family's configs. Exactly one builder may match a checkpoint."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether this builder is the one for ``hf_config``."""

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; ``hf_config`` is copied, never changed.

        Raises:
            ConfigError: a key is missing or senseless; names it.
        """


def token_ids(value: Any, key: str, file: str = "config.json") -> tuple[int, ...]:
    """``eos_token_id`` as checkpoints write it (absent, one id or a list) as a tuple.

    Raises:
        ConfigError: it is something else; names ``file``, ``key`` and the value.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ConfigError(f"{file}: {key} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def checkpoint_dtype(hf_config: HFConfig) -> str | None:
    """The element type that a config names under ``dtype`` or the older ``torch_dtype``."""
    value = hf_config.get("dtype", hf_config.get("torch_dtype"))
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype {value!r} is not one of {', '.join(DTYPES)}")
    return name


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above zero, and not a boolean."""
    return type(value) in (int, float) and math.isfinite(value) and value > 0


def check_kinds(values: Mapping[str, Any], examples: Mapping[str, Any]) -> None:
    """Refuse config values of another type than the examples under their keys.

    A boolean stands for booleans, a string for strings, an integer for positive integers and a
    float for positive numbers.

    Raises:
        ConfigError: names the first key whose value is missing or does not fit.
    """
    for key, example in examples.items():
        value = values.get(key)
        if isinstance(example, bool | str):
            fits = type(value) is type(example)
            kind = "a string" if isinstance(example, str) else "true or false"
        else:
            fits = is_positive(value) and (isinstance(example, float) or type(value) is int)
            kind = "a positive number" if isinstance(example, float) else "a positive integer"
        if not fits:
            raise ConfigError(f"config.json: {key} must be {kind}, got {value!r}")


def stated_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config that are not null."""
    return {key: value for key, value in values.items() if value is not None}


def object_of(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key of a config; an empty one if it is not there.

    Raises:
        ConfigError: something else stands there.
    """
    value = values.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: {key} must be an object, got {value!r}")
    return value


class DefaultConfigBuilder:
    """Reads configs that use the names most decoder-only families share.

    A family's builder may call :meth:`build` after putting missing keys into a copy of the config.
    """

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Always true: it is asked only when no plugin's builder matches."""
        return True

    @classmethod
    def conventions(cls, hf_config: HFConfig) -> dict[str, Any]:
        """Fields of the model config that are about text, for a family's :meth:`build` to pass.

        They are the family's own: ``new-plugin`` leaves them out of a copy.
        """
        del hf_config
        return {}

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config of ``hf_config``.

        Raises:
            ConfigError: a key is missing or has a value of the wrong kind.
        """
        # Imported here, so that discovering plugins does not wait for pydantic.
        from engine_core.configs.model import ModelConfig

        del model_path
        values: dict[str, Any] = {"hf_config": hf_config, **kwargs}
        if "architecture" not in values:
            names = hf_config.get("architectures", [])
            if not isinstance(names, list) or not names or not isinstance(names[0], str):
                raise ConfigError(
                    "config.json: 'architectures' must be a list that names the model class, got "
                    f"{names!r}"
                )
            values["architecture"] = names[0]
        for key in ("vocab_size", "hidden_size", "num_attention_heads"):
            values.setdefault(key, _integer(hf_config, key))
        values.setdefault("num_layers", _integer(hf_config, "num_hidden_layers"))
        heads = values["num_attention_heads"]
        if "num_key_value_heads" not in values:
            values["num_key_value_heads"] = _integer(hf_config, "num_key_value_heads", heads)
        if "head_dim" not in values:
            if hf_config.get("head_dim") is None and values["hidden_size"] % heads:
                raise ConfigError(
                    f"config.json: hidden_size ({values['hidden_size']}) is not divisible by "
                    f"num_attention_heads ({heads}) and there is no head_dim"
                )
            values["head_dim"] = _integer(hf_config, "head_dim", values["hidden_size"] // heads)
        if heads % values["num_key_value_heads"]:
            raise ConfigError(
                f"config.json: num_attention_heads ({heads}) is not divisible by "
                f"num_key_value_heads ({values['num_key_value_heads']})"
            )
        if "max_position_embeddings" not in values:
            values["max_position_embeddings"] = _integer(hf_config, "max_position_embeddings")
        values.setdefault("dtype", checkpoint_dtype(hf_config))
        bos = token_ids(hf_config.get("bos_token_id"), "bos_token_id")
        values.setdefault("bos_token_id", bos[0] if bos else None)
        values.setdefault("eos_token_ids", token_ids(hf_config.get("eos_token_id"), "eos_token_id"))
        return ModelConfig(**values)


def _integer(hf_config: HFConfig, key: str, default: int | None = None) -> int:
    value = hf_config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: {key!r} must be a positive integer, got {value!r}")
    return value
