"""The config builder for what transformers knows. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.configs import DefaultConfigBuilder, HFConfig, stated_keys
from engine_core.errors import ConfigError, UnknownArchitectureError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from engine_core.configs import ModelConfig

ARCHITECTURE = "TransformersModel"

_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp", "dense",
                     "sparse"})  # fmt: skip
_ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional", "ntk_alpha"})
_SENSES = ("vision_config", "audio_config", "image_token_id", "audio_token_id", "vision_tower")


class FallbackConfigBuilder:
    """Reads the configs of transformers' causal models, by its own config classes."""

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the config names an architecture; whether it can be run is said by build."""
        names = hf_config.get("architectures")
        return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; ``hf_config`` in it is the checkpoint's own.

        Raises:
            UnknownArchitectureError: transformers does not know the architecture, or it cannot be
                run right; says why.
            ConfigError: a key is missing or senseless.
        """
        name = hf_config.architectures[0]
        reason = _refusal(hf_config)
        if reason is not None:
            raise UnknownArchitectureError(f"transformers' own code cannot run {name}: {reason}")
        config = read_config(hf_config)
        reason = _refused_config(config)
        if reason is not None:
            raise UnknownArchitectureError(f"transformers' own code cannot run {name}: {reason}")
        layer = layer_config(config)
        heads = layer.num_attention_heads
        stated = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": _first(layer, "num_key_value_heads", "num_kv_heads") or heads,
            "head_dim": _first(layer, "head_dim") or config.hidden_size // heads,
            "max_position_embeddings": _first(config, "max_position_embeddings", "max_seq_len"),
        }
        if stated["max_position_embeddings"] is None:
            raise UnknownArchitectureError(
                f"transformers' own code cannot run {name}: its config says no longest sequence "
                "(max_position_embeddings)"
            )
        values = stated_keys(stated)
        built = DefaultConfigBuilder.build(
            hf_config.replace(**values, dtype=_dtype(hf_config)),
            model_path,
            architecture=ARCHITECTURE,
            caveat=(
                f"{name} is run by transformers' own code (package engine-core-transformers), "
                "since no installed package knows it or model_impl asks for it: less of it "
                "is fused, so it is slower than a package of its own"
            ),
            **kwargs,
        )
        return built.replace(hf_config=hf_config)


def read_config(hf_config: HFConfig) -> PreTrainedConfig:
    """Transformers' config of a checkpoint, of its own class, with its defaults.

    Raises:
        ConfigError: that class refuses it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = _plain(hf_config.to_dict())
    for key in ("auto_map", "quantization_config", "transformers_version"):
        values.pop(key, None)
    try:
        return CONFIG_MAPPING[values.pop("model_type")].from_dict(values)
    except Exception as error:  # Each class checks in its own way.
        cause = error.__cause__ or error
        raise ConfigError(f"config.json: transformers refuses it: {cause}") from error


def _plain(value: Any) -> Any:
    """A value of a config.json with the infinite numbers that transformers writes as objects."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def model_class(name: str) -> type:
    """Transformers' class of this name."""
    import transformers

    found: type = getattr(transformers, name)
    return found


def _refusal(hf_config: HFConfig) -> str | None:
    """The reason why a checkpoint cannot be run, as far as its config alone tells."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as WITHOUT_HEAD

    name, kind = hf_config.architectures[0], hf_config.get("model_type")
    known = {value for value in NAMES.values() if isinstance(value, str)}
    if any(hf_config.get(key) is not None for key in _SENSES):
        return "it takes pictures or sounds, which need a package of the family's own"
    if name not in known or kind not in NAMES:
        if hf_config.get("auto_map") is not None:
            return "its code is in the checkpoint (auto_map), and code from there is never run"
        with_head = None if kind in ENCODERS else NAMES.get(kind)
        # Not by the end of its name: GPT2LMHeadModel has a head.
        if name == WITHOUT_HEAD.get(kind) and isinstance(with_head, str):
            return (
                "it is saved without a head; if it is to embed, set the task 'embed' and "
                f'hf_overrides {{"architectures": ["{with_head}"]}}'
            )
        return f"version {__version__} has no causal language model of that name"
    if NAMES[kind] != name:
        return f"its model_type {kind!r} is that of {NAMES[kind]}"
    if hf_config.get("is_encoder_decoder") is True:
        return "it is an encoder and a decoder, and cross attention has no cache here"
    return None


def _refused_config(config: PreTrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        return "it attends over an encoder's output, which has no cache here"
    lacking = [
        key
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        if not isinstance(getattr(layer_config(config), key, None), int)
    ]
    if lacking:
        return f"its config has no {', '.join(lacking)}, so it is no ordinary decoder"
    kinds = [
        kind
        for key in ("layer_types", "layers_block_type")
        for kind in getattr(config, key, None) or ()
        if kind not in _LAYERS
    ]
    if kinds:
        return f"it has layers of the kind {kinds[0]!r}, which keep more than keys and values"
    ropes = sorted(rope_types(getattr(config, "rope_parameters", None)) - _ROPES)
    if ropes:
        return (
            f"its rotary embedding is of the type {ropes[0]!r}, whose angles depend on the longest "
            "sequence of a batch"
        )
    return None


def layer_config(config: PreTrainedConfig) -> Any:
    """The config of the first layer, where each layer may have values of its own."""
    return config.per_layer_config[0] if config.is_heterogeneous else config


def rope_types(parameters: Any) -> set[str]:
    """The rope types in transformers' ``rope_parameters``, which may be one by kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    found = {parameters.get("rope_type", "default")} if "rope_theta" in parameters else set()
    for value in parameters.values():
        found |= rope_types(value)
    if "rope_type" in parameters:
        found.add(parameters["rope_type"])
    return found


def _first(config: PreTrainedConfig, *keys: str) -> Any:
    return next((value for key in keys if (value := getattr(config, key, None)) is not None), None)


def _dtype(hf_config: HFConfig) -> Any:
    return hf_config.get("dtype", hf_config.get("torch_dtype"))
