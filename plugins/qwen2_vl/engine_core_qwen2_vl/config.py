"""Reads configs of Qwen2-VL and Qwen2.5-VL checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import (
    DefaultConfigBuilder,
    HFConfig,
    check_kinds,
    longest_sequence,
    object_of,
    refuse_partial_rotary,
    rope_keys,
    stated_keys,
)
from engine_core.configs.hf_config import read_object
from engine_core.errors import ConfigError, CorruptCheckpointError

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

# Newer checkpoints call it "default": what tells is mrope_section.
_ROPE_TYPES = ("mrope", "default")

# Defaults of keys that checkpoints leave out, from transformers' config and processor classes.
_TEXT = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
_VISION = {
    "depth": 32,
    "embed_dim": 1280,
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_VISION_25 = {
    "depth": 32,
    "embed_dim": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 4,
    "window_size": 112,
}
_PIXELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_IMAGE_SIZE = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
_VIDEO_SIZE = {"min_pixels": 128 * 28 * 28, "max_pixels": 28 * 28 * 768}
# Of a preprocessor's keys these say how pixels are computed; here that is done in one way.
_PIXELS_ONLY = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,  # bicubic
}


class Qwen2VLConfigBuilder:
    """Reads the configs of Qwen2-VL, flat as they were published or with a ``text_config``.

    The built config is flat. Beside the text model's keys it has ``vision_config``, and
    ``preprocessor``: by "image" and "video", the numbers by which pixels become patches.
    """

    architecture: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    vision: ClassVar[dict[str, Any]] = _VISION
    vision_act: ClassVar[str] = "quick_gelu"

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; its ``hf_config`` has every key that the model reads.

        ``model_path`` is where ``preprocessor_config.json`` is read from, if it is there.

        Raises:
            ConfigError: a key is missing or senseless.
        """
        stated = stated_keys(hf_config.to_dict())
        text = stated_keys(object_of(stated, "text_config"))
        values = {**_TEXT, **stated, **text}
        # Transformers ties them if either of its two objects says so.
        values["tie_word_embeddings"] = bool(
            stated.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        )
        values.update(rope_keys(values, _ROPE_TYPES))
        for key in ("rope_parameters", "text_config"):
            values.pop(key, None)
        refuse_partial_rotary(values)
        if "num_attention_heads" in values:
            values.setdefault("num_key_value_heads", values["num_attention_heads"])
        numbers = {key: value for key, value in _TEXT.items() if not key.endswith("_id")}
        check_kinds(values, {"intermediate_size": 1, **numbers})
        _refuse_window(values)
        kwargs.setdefault(
            "max_position_embeddings",
            longest_sequence(values["max_position_embeddings"], values["rope_scaling"]),
        )
        config = DefaultConfigBuilder.build(HFConfig(values), model_path, **kwargs)
        values["head_dim"] = config.head_dim
        _check_sections(values["rope_scaling"], config.head_dim)
        for key in ("image_token_id", "video_token_id"):
            token = values[key]
            if type(token) is not int or not 0 <= token < config.vocab_size:
                raise ConfigError(
                    f"config.json: {key} must be a token of the {config.vocab_size}, got {token!r}"
                )
        vision = cls.vision_config(object_of(stated, "vision_config"), config.hidden_size)
        values["vision_config"] = vision
        values["preprocessor"] = _preprocessors(model_path, vision)
        return config.replace(hf_config=HFConfig(values))

    @classmethod
    def vision_config(cls, stated: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
        """The tower's keys: its own width is ``embed_dim``, the text model's ``hidden_size``.

        Raises:
            ConfigError: one is senseless.
        """
        values = {**cls.vision, "hidden_size": hidden_size, **stated_keys(stated)}
        values["in_channels"] = values.get("in_chans", values.get("in_channels", 3))
        try:
            check_kinds(values, {**cls.vision, "hidden_size": 1, "in_channels": 1})
        except ConfigError as error:
            message = str(error).replace("config.json:", "config.json: vision_config:")
            raise ConfigError(message) from None
        values["rope_theta"] = object_of(values, "rope_parameters").get("rope_theta", 10000.0)
        for key, wanted in (
            ("hidden_act", cls.vision_act),
            ("hidden_size", hidden_size),
            ("in_channels", 3),
        ):
            if values.setdefault(key, wanted) != wanted:
                raise ConfigError(
                    f"config.json: vision_config: {key} {values[key]!r} is not supported, only "
                    f"{wanted!r}"
                )
        if values["embed_dim"] % (4 * values["num_heads"]):
            raise ConfigError(
                f"config.json: vision_config: its width ({values['embed_dim']}) is not divisible "
                f"by 4 x num_heads ({values['num_heads']}), as positions in two dimensions need"
            )
        return values


class Qwen25VLConfigBuilder(Qwen2VLConfigBuilder):
    """Reads the configs of Qwen2.5-VL, which have other names for the tower's widths."""

    architecture: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    vision: ClassVar[dict[str, Any]] = _VISION_25
    vision_act: ClassVar[str] = "silu"

    @classmethod
    def vision_config(cls, stated: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
        """As Qwen2-VL's, with the windows.

        Raises:
            ConfigError: one is senseless.
        """
        renamed = {
            **{key: value for key, value in stated.items() if key != "hidden_size"},
            "embed_dim": stated.get("hidden_size"),
            "hidden_size": stated.get("out_hidden_size"),
        }
        values = super().vision_config(renamed, hidden_size)
        layers = values.setdefault("fullatt_block_indexes", [7, 15, 23, 31])
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise ConfigError(
                "config.json: vision_config: fullatt_block_indexes must be a list of layers, got "
                f"{layers!r}"
            )
        side = values["patch_size"] * values["spatial_merge_size"]
        if values["window_size"] < side:
            raise ConfigError(
                f"config.json: vision_config: window_size ({values['window_size']}) is less than "
                f"the {side} pixels of an embedding"
            )
        return values


def _refuse_window(values: Mapping[str, Any]) -> None:
    types = values.get("layer_types") or []
    if (
        values.get("use_sliding_window")
        or not isinstance(types, list)
        or set(types) - {"full_attention"}
    ):
        raise ConfigError(
            "config.json: a sliding window is not supported in this family, got use_sliding_window "
            f"{values.get('use_sliding_window')!r} and layer_types {types!r}"
        )


def _check_sections(scaling: Mapping[str, Any], head_dim: int) -> None:
    sections: Any = scaling.get("mrope_section")
    fits = isinstance(sections, list) and len(sections) == 3
    if not fits or not all(type(size) is int and size > 0 for size in sections):
        raise ConfigError(
            "config.json: rope_scaling must have mrope_section, three positive integers, got "
            f"{sections!r}"
        )
    if 2 * sum(sections) != head_dim:
        raise ConfigError(
            f"config.json: mrope_section {sections} must add up to half of the head size {head_dim}"
        )


def _preprocessors(folder: Path | None, vision: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """How images and videos become patches; a video's own file counts before the image's."""
    image = _read(folder, "preprocessor_config.json")
    video = _read(folder, "video_preprocessor_config.json") or image
    return {
        "image": _preprocessor(image or {}, _IMAGE_SIZE, vision),
        "video": _preprocessor(video or {}, _VIDEO_SIZE, vision),
    }


def _read(folder: Path | None, name: str) -> dict[str, Any] | None:
    try:
        return None if folder is None else read_object(folder / name, CorruptCheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _preprocessor(
    stated: Mapping[str, Any], sizes: Mapping[str, int], vision: Mapping[str, Any]
) -> dict[str, Any]:
    where = "preprocessor_config.json"
    given = stated_keys(stated)
    for key, wanted in (
        *_PIXELS_ONLY.items(),
        ("patch_size", vision["patch_size"]),
        ("merge_size", vision["spatial_merge_size"]),
        ("temporal_patch_size", vision["temporal_patch_size"]),
    ):
        if given.get(key, wanted) != wanted:
            raise ConfigError(f"{where}: {key} {given[key]!r} is not supported, only {wanted!r}")
    # Three ways of one pair of numbers; transformers takes the first that is there.
    size = given.get("size", {})
    size = size if isinstance(size, dict) else {}
    edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    values = {
        key: given.get(key, size.get(edge, size.get(key, sizes[key])))
        for key, edge in edges.items()
    }
    if not all(type(value) is int and value > 0 for value in values.values()):
        raise ConfigError(f"{where}: min_pixels and max_pixels must be positive, got {values}")
    for key, default in _PIXELS.items():
        numbers = given.get(key, default)
        if (
            not isinstance(numbers, list)
            or len(numbers) != 3
            or not all(type(number) in (int, float) for number in numbers)
            or (key == "image_std" and not all(number > 0 for number in numbers))
        ):
            positive = " positive" * (key == "image_std")
            raise ConfigError(f"{where}: {key} must be three{positive} numbers, got {numbers!r}")
        values[key] = numbers
    return values
