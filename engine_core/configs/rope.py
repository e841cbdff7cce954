"""How checkpoints write their rotary embedding, for the config builders of families."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs.builder import DefaultConfigBuilder, check_kinds, is_positive, stated_keys
from engine_core.configs.hf_config import HFConfig
from engine_core.errors import ConfigError, OptionError

if TYPE_CHECKING:
    from engine_core.configs.model import ModelConfig

# Two names of one object. Where a config has both, transformers reads the first.
_NAMES = ("rope_scaling", "rope_parameters")

# Scalings whose factor says how far beyond max_position_embeddings a sequence may go.
_STRETCHING = ("linear", "dynamic", "yarn")


def rope_keys(values: Mapping[str, Any], rope_types: Collection[str]) -> dict[str, Any]:
    """The keys ``rope_theta`` and ``rope_scaling``, however a config.json writes them.

    Args:
        values: the config's keys. ``rope_parameters`` is the newer name of ``rope_scaling``, which
            counts if both are there; a base in the object counts before one beside it;
            ``rope_type`` is the newer name of ``type``.
        rope_types: what the family supports.

    Returns:
        both keys; ``rope_scaling`` is an object that always has ``rope_type``.

    Raises:
        ConfigError: the scaling is no object, of a type that is not supported, or has one for each
            kind of layer.
    """
    rope: Any = next((values[name] for name in _NAMES if values.get(name)), {})
    if not isinstance(rope, Mapping):
        raise ConfigError(f"config.json: rope_scaling must be an object or null, got {rope!r}")
    older = rope.get("type", "default")
    rope = {key: value for key, value in rope.items() if key != "type"}
    rope.setdefault("rope_type", older)
    if rope["rope_type"] not in rope_types:
        raise ConfigError(
            f"config.json: rope_scaling of type {rope['rope_type']!r} is not one of "
            f"{', '.join(rope_types)}"
        )
    kind = next((key for key, value in rope.items() if isinstance(value, Mapping)), None)
    if kind is not None:
        raise ConfigError(
            f"config.json: rope_scaling has an object for {kind!r}, but all layers of this family "
            "have one rotary embedding; put its keys into rope_scaling itself"
        )
    theta = rope.pop("rope_theta", values.get("rope_theta"))
    return {"rope_theta": theta, "rope_scaling": rope}


def override_rope(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Apply ``overrides`` to a config's rope keys, under every name that it has for them.

    An override takes effect whichever of the names it uses and wherever the config holds the base.

    Args:
        values: the config's keys.
        overrides: keys to replace, of which ``rope_scaling`` (or ``rope_parameters``) is merged
            key by key; null takes the scaling away and leaves the base.

    Returns:
        the keys that change, without ``rope_theta`` itself.

    Raises:
        OptionError: both names of the scaling are among ``overrides``.
    """
    given = [name for name in _NAMES if name in overrides]
    if len(given) > 1:
        raise OptionError(
            f"hf_overrides: {' and '.join(given)} are two names of one object; give one"
        )
    held = {name: values[name] for name in _NAMES if values.get(name)}
    if not held or not (given or "rope_theta" in overrides):
        return {}
    rope: Any = next(iter(held.values()))
    if given:
        rope = _overridden(rope, overrides[given[0]])
    if isinstance(rope, Mapping) and "rope_theta" in rope and "rope_theta" in overrides:
        stated = overrides[given[0]] if given else None
        if not (isinstance(stated, Mapping) and "rope_theta" in stated):
            rope = {**rope, "rope_theta": overrides["rope_theta"]}
    return dict.fromkeys((*given, *held), rope)


def _overridden(rope: Any, override: Any) -> Any:
    if not isinstance(rope, Mapping):
        return override
    if override is None:
        return {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else None
    if not isinstance(override, Mapping):
        return override
    # A base of its own for each kind of layer is an object in the object.
    inner = {key: _overridden(rope.get(key), value) for key, value in override.items()}
    merged = {**rope, **inner}
    if "type" in override and "rope_type" not in override:
        merged.pop("rope_type", None)  # It would count before the older name.
    return merged


def refuse_partial_rotary(values: Mapping[str, Any]) -> None:
    """For families whose heads rotate whole: refuse ``partial_rotary_factor`` other than 1.

    Their classes in transformers ignore it without a scaling, and fail with one.

    Args:
        values: the config's keys, with ``rope_scaling`` as :func:`rope_keys` returns it.

    Raises:
        ConfigError: it is there, in the config or in its scaling.
    """
    for where in (values["rope_scaling"], values):
        factor = where.get("partial_rotary_factor")
        if factor is not None and factor != 1:
            raise ConfigError(
                f"config.json: partial_rotary_factor {factor!r}, but heads of this family rotate "
                "whole; if this model's do too, set it to 1.0, where it stands, with hf_overrides"
            )


def check_partial_rotary(values: Mapping[str, Any]) -> None:
    """For families whose heads may rotate in part: check ``partial_rotary_factor``.

    Args:
        values: the config's keys, with ``rope_scaling`` as :func:`rope_keys` returns it.

    Raises:
        ConfigError: it is no part of a head, in the config or in its scaling.
    """
    for where in (values["rope_scaling"], values):
        factor = where.get("partial_rotary_factor")
        if factor is not None and not (is_positive(factor) and factor <= 1):
            raise ConfigError(
                "config.json: partial_rotary_factor must be a number above 0, and 1 at most, got "
                f"{factor!r}"
            )


def longest_sequence(max_position_embeddings: int, rope_scaling: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that a model is made for, with the stretch of its scaling.

    Linear, dynamic and YaRN scaling stretch ``original_max_position_embeddings``, or else
    ``max_position_embeddings``, by ``factor``; for the others the length states it already.

    Args:
        max_position_embeddings: as the config states it.
        rope_scaling: as :func:`rope_keys` returns it.

    Raises:
        ConfigError: the length or the factor is no positive number.
    """
    length, factor = max_position_embeddings, 1.0
    if rope_scaling["rope_type"] in _STRETCHING:
        length = rope_scaling.get("original_max_position_embeddings", length)
        factor = rope_scaling.get("factor", factor)
    for key, value in (
        ("max_position_embeddings", max_position_embeddings),
        ("original_max_position_embeddings of rope_scaling", length),
        ("factor of rope_scaling", factor),
    ):
        if not is_positive(value):
            raise ConfigError(f"config.json: {key} must be a positive number, got {value!r}")
    return max(int(length * factor), int(max_position_embeddings))


class RotaryConfigBuilder:
    """Reads the configs of a family with rotary positions; subclasses say what they may hold.

    The built ``hf_config`` has every key that is named here, and ``head_dim``.

    Attributes:
        architecture: the one that a checkpoint of the family calls itself.
        defaults: values of keys that checkpoints leave out or set to null, usually those of
            transformers' config class. Values must be of their kinds, see :func:`check_kinds`.
        nullable: an example and a default for each key whose null has a meaning.
        aliases: for other names of keys, such as ``rotary_pct``, the names that the model reads:
            ``{"rotary_pct": "partial_rotary_factor"}``.
        rope_types: supported types of ``rope_scaling``. With "dynamic" a family needs salts.
    """

    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}
    nullable: ClassVar[Mapping[str, tuple[Any, Any]]] = {}
    aliases: ClassVar[Mapping[str, str]] = {}
    rope_types: ClassVar[Collection[str]] = ("default", "linear", "yarn", "llama3")

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
            ConfigError: a key is missing or senseless, or asks for what the model does not do.
        """
        given = hf_config.to_dict()
        for alias, key in cls.aliases.items():
            value = given.pop(alias, None)
            if value is not None and given.setdefault(key, value) != value:
                raise ConfigError(
                    f"config.json: {alias} {value!r} and {key} {given[key]!r} mean the same; leave "
                    "one out"
                )
        stated = stated_keys(given)
        values = {**cls.defaults, **stated}
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        kinds = {key: value for key, value in cls.defaults.items() if not key.endswith("token_id")}
        check_kinds(values, {"intermediate_size": 1, **kinds})
        for key, (example, default) in cls.nullable.items():
            values[key] = given.get(key, default)
            if values[key] is not None:
                check_kinds(values, {key: example})
        cls.complete(values)
        kwargs = {**cls.conventions(hf_config), **kwargs}
        kwargs.setdefault("max_position_embeddings", cls.longest(values))
        kwargs.setdefault("reads_rope_scaling", True)
        dynamic = values.get("rope_scaling", {}).get("rope_type") == "dynamic"
        kwargs.setdefault("may_exceed_length", dynamic)
        config = DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)
        return config.replace(hf_config=HFConfig({**values, "head_dim": config.head_dim}))

    @classmethod
    def conventions(cls, hf_config: HFConfig) -> dict[str, Any]:
        """Fields of the model config that are about text: parsers, ``sentencepiece``, a template.

        They are this family's own: ``new-plugin`` leaves them out of a copy.
        """
        del hf_config
        return {}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Bring ``values`` to what the model reads: here those of :func:`rope_keys`.

        Heads rotate whole unless ``partial_rotary_factor`` has a default.

        Raises:
            ConfigError: they ask for what the model does not do.
        """
        values.update(rope_keys(values, cls.rope_types))
        values.pop("rope_parameters", None)
        check_kinds(values, {"rope_theta": 1.0})
        if "partial_rotary_factor" not in cls.defaults:
            refuse_partial_rotary(values)
            return
        check_partial_rotary(values)
        # As of the base, what the object says counts; the model finds one value in one place.
        factor = values["rope_scaling"].pop("partial_rotary_factor", None)
        if factor is not None:
            values["partial_rotary_factor"] = factor

    @classmethod
    def longest(cls, values: Mapping[str, Any]) -> int:
        """Tokens of the longest sequence, see :func:`longest_sequence`."""
        return longest_sequence(values["max_position_embeddings"], values["rope_scaling"])
