"""Config builders of Gemma 2 and Gemma 3 checkpoints. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import (
    HFConfig,
    RotaryConfigBuilder,
    check_kinds,
    longest_sequence,
    refuse_partial_rotary,
    rope_keys,
    stated_keys,
)
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

logger = logging.getLogger(__name__)

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma2ConfigBuilder(RotaryConfigBuilder):
    """Reads the configs of Gemma 2.

    The built config has every key that the model reads: ``layer_types`` and ``sliding_window``, the
    soft caps, which may be None, and ``rope_parameters``, an object for each kind of layer.
    """

    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    # Defaults of keys that a checkpoint may leave out, from transformers' config class.
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    nullable: ClassVar[dict[str, tuple[Any, Any]]] = {
        "sliding_window": (1, 4096),
        "attn_logit_softcapping": (1.0, 50.0),
        "final_logit_softcapping": (1.0, 30.0),
    }

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Say the kind of each layer, and the rotary embedding of each kind.

        Raises:
            ConfigError: the config asks for what the model does not do.
        """
        if values.get("use_bidirectional_attention"):
            raise ConfigError(
                "config.json: use_bidirectional_attention is true: this is an encoder, and only "
                "attention to earlier tokens is supported"
            )
        values["layer_types"] = cls.layer_types(values)
        values["rope_parameters"] = cls.ropes(values)
        values.pop("rope_scaling", None)
        for rope in values["rope_parameters"].values():
            refuse_partial_rotary({**values, "rope_scaling": rope})

    @classmethod
    def layer_types(cls, values: Mapping[str, Any]) -> list[str]:
        """The kind of each layer; configs without them alternate, a sliding window first.

        Raises:
            ConfigError: they are no kinds, too few or too many, or slide without a window.
        """
        layers, types = values["num_hidden_layers"], values.get("layer_types")
        if types is None:
            every = cls.full_every(values)
            types = [_SLIDING if (index + 1) % every else _FULL for index in range(layers)]
        if not isinstance(types, list) or not all(kind in (_FULL, _SLIDING) for kind in types):
            raise ConfigError(
                f"config.json: layer_types must be a list of {_FULL!r} and {_SLIDING!r}, got "
                f"{types!r}"
            )
        if len(types) != layers:
            raise ConfigError(
                f"config.json: layer_types has {len(types)} entries, num_hidden_layers is {layers}"
            )
        if values["sliding_window"] is None and _SLIDING in types:
            raise ConfigError(
                f"config.json: {_SLIDING} layers need a sliding_window, got null; give its width, "
                f"or layer_types of {_FULL!r} alone"
            )
        return types

    @classmethod
    def full_every(cls, values: Mapping[str, Any]) -> int:
        """One layer in how many attends to all tokens, in configs without ``layer_types``."""
        del values
        return 2

    @classmethod
    def ropes(cls, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The rotary embedding of each kind of layer, with ``rope_type`` and ``rope_theta``.

        Raises:
            ConfigError: it is of a type that is not supported.
        """
        return dict.fromkeys((_FULL, _SLIDING), cls.rope(values, 10000.0))

    @classmethod
    def rope(cls, values: Mapping[str, Any], base: float) -> dict[str, Any]:
        """One of them, of the keys that :func:`rope_keys` reads; ``base`` if they have none."""
        rope = rope_keys(values, cls.rope_types)
        theta = base if rope["rope_theta"] is None else rope["rope_theta"]
        check_kinds({"rope_theta": theta}, {"rope_theta": base})
        return {**rope["rope_scaling"], "rope_theta": float(theta)}

    @classmethod
    def longest(cls, values: Mapping[str, Any]) -> int:
        """Tokens of the longest sequence."""
        return longest_sequence(values["max_position_embeddings"], values["rope_parameters"][_FULL])


class Gemma3ConfigBuilder(Gemma2ConfigBuilder):
    """Reads the configs of Gemma 3 without a vision tower.

    Layers with a window rotate by a base of their own, and only the others are scaled.
    """

    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    defaults: ClassVar[dict[str, Any]] = {
        **Gemma2ConfigBuilder.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
    nullable: ClassVar[dict[str, tuple[Any, Any]]] = {
        "sliding_window": (1, 4096),
        "attn_logit_softcapping": (1.0, None),
        "final_logit_softcapping": (1.0, None),
    }

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """As for Gemma 2.

        Raises:
            ConfigError: as there; or scores are capped, which transformers reads and does not do.
        """
        _refuse_cap(values, "attn_logit_softcapping", "Gemma 3 caps no scores")
        super().complete(values)

    @classmethod
    def full_every(cls, values: Mapping[str, Any]) -> int:
        """``sliding_window_pattern``, 6 if it is not given.

        Raises:
            ConfigError: it is no positive integer.
        """
        pattern: int = values.get("sliding_window_pattern", 6)
        check_kinds({"sliding_window_pattern": pattern}, {"sliding_window_pattern": 1})
        return pattern

    @classmethod
    def ropes(cls, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Those of ``rope_parameters``, or of the keys before there was that.

        Older configs have ``rope_theta``, ``rope_local_base_freq`` and ``rope_scaling``, which
        counts for layers without a window alone. Newer ones have an object for each kind of layer.

        Raises:
            ConfigError: a rotary embedding is not supported, or given twice and not the same.
        """
        newer = values.get("rope_parameters") or {}
        if not isinstance(newer, Mapping):
            raise ConfigError(f"config.json: rope_parameters must be an object, got {newer!r}")
        # An override of the scaling stands beside the kinds.
        beside = {key: value for key, value in newer.items() if key not in (_FULL, _SLIDING)}
        scaling = values.get("rope_scaling") or {}
        if isinstance(scaling, Mapping) and (_FULL in scaling or _SLIDING in scaling):
            scaling = {}  # the override of the other name, which has the same content
        ropes = {}
        for kind, base_key, base, extra in (
            (_FULL, "rope_theta", 1_000_000.0, {**beside, **scaling}),
            (_SLIDING, "rope_local_base_freq", 10_000.0, {}),
        ):
            own = newer.get(kind) or {}
            if not isinstance(own, Mapping):
                raise ConfigError(f"config.json: rope_parameters.{kind} must be an object")
            older, inside = values.get(base_key), own.get("rope_theta")
            if inside is not None and older not in (None, inside):
                raise ConfigError(
                    f"config.json: {base_key} is {older!r}, but rope_parameters.{kind} has "
                    f"{inside!r}; give the same for both"
                )
            ropes[kind] = cls.rope({"rope_scaling": {**own, **extra}, "rope_theta": older}, base)
        return ropes

    @classmethod
    def longest(cls, values: Mapping[str, Any]) -> int:
        """``max_position_embeddings``: unlike in other families it has the stretch already."""
        super().longest(values)  # It checks the scaling.
        return int(values["max_position_embeddings"])


def _refuse_cap(values: Mapping[str, Any], key: str, why: str) -> None:
    if values[key] is not None:
        raise ConfigError(
            f"config.json: {key} is {values[key]!r}, but {why}: transformers ignores the key; if "
            "this model does too, set it to null with hf_overrides"
        )


class Gemma3WithVisionConfigBuilder(Gemma3ConfigBuilder):
    """Reads the configs of Gemma 3 from 4B on, whose text model is all that is served."""

    architecture: ClassVar[str] = "Gemma3ForConditionalGeneration"

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config of ``text_config``; what the whole model's says goes before it.

        Raises:
            ConfigError: as for Gemma 3, or there is no ``text_config``.
        """
        given = hf_config.to_dict()
        text = given.pop("text_config", None)
        if not isinstance(text, Mapping):
            raise ConfigError(f"config.json: text_config must be an object, got {text!r}")
        given.pop("vision_config", None)
        whole = stated_keys(given)
        logger.warning(
            "%s is served for text alone: its vision tower is not loaded, and prompts with "
            "pictures are refused",
            cls.architecture,
        )
        return super().build(HFConfig({**text, **whole}), model_path, **kwargs)

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """As for Gemma 3.

        Raises:
            ConfigError: as there; or logits are capped, which transformers reads and does not do.
        """
        _refuse_cap(values, "final_logit_softcapping", f"{cls.architecture} caps no logits")
        super().complete(values)
