"""Reads configs of InternVL, in the original layout and in transformers'. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.configs import HFConfig, check_kinds, object_of, stated_keys
from engine_core.configs.hf_config import read_object
from engine_core.errors import ConfigError, CorruptCheckpointError
from engine_core.registry import text_model_config
from engine_core_internvl.inputs import MOST_FRAMES, frame_label
from engine_core_internvl.templates import chat_template

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig

# Who brings the text models that InternVL was published around.
PACKAGES = {
    "InternLM2ForCausalLM": "engine-core-internlm2",
    "LlamaForCausalLM": "engine-core-llama",
    "MistralForCausalLM": "engine-core-llama",
    "Qwen2ForCausalLM": "engine-core-qwen2",
    "Qwen3ForCausalLM": "engine-core-qwen2",
}
# Text configs that transformers saves may leave their architecture out.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh")
_NORMS = ("layer_norm", "rms_norm")

# A config may state them, but for the first of transformers' layout it is the tokenizer's files
# that do.
_TOKENS = {
    "image_token_id": "<IMG_CONTEXT>",
    "image_start_token_id": "<img>",
    "image_end_token_id": "</img>",
    "video_token_id": "<video>",
}

# Defaults of keys that checkpoints leave out, from the original config classes.
_CHAT = {
    "downsample_ratio": 0.5,
    "dynamic_image_size": False,
    "use_thumbnail": False,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 6,
    "ps_version": "v1",
}
_VISION = {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_hidden_layers": 48,
    "num_attention_heads": 25,
    "image_size": 224,
    "patch_size": 14,
    "qkv_bias": False,
    "qk_normalization": True,
    "norm_type": "rms_norm",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
# The same of transformers' classes, under the original names.
_HF_VISION = {
    **_VISION,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 448,
    "qk_normalization": False,
    "norm_type": "layer_norm",
    # Of queries and keys; the original's is that of the other norms.
    "qk_norm_eps": 1e-6,
}
# Of a preprocessor's keys these say how pixels are computed; here that is done in one way.
_PIXELS_ONLY = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,  # bicubic
}


class InternVLChatConfigBuilder:
    """Reads the configs of InternVL-Chat 1.x to 2.5 as they were published.

    The built config has the keys of both layouts under the same names: ``text_config``, which the
    text model's own family has read, ``vision_config``, and what the input processor needs.
    """

    architecture: ClassVar[str] = "InternVLChatModel"

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """The model config; but for the architecture and the template it is the text model's.

        ``model_path`` is where the tokenizer's files are, which know the tokens of images.

        Raises:
            ConfigError: a key is missing or senseless, or the tokens are not there.
            UnknownArchitectureError: the text model's family is not installed.
        """
        stated = {**_CHAT, **stated_keys(hf_config.to_dict())}
        check_kinds(stated, _CHAT)
        # The original code ties none of its text models, whatever their part of the config says.
        llm = {**_text(stated, "llm_config"), "tie_word_embeddings": False}
        values = {
            **_tower(stated_keys(object_of(stated, "vision_config")), _VISION),
            "ps_version": stated["ps_version"],
            "select_layer": stated.get("select_layer", -1),
            "image_mean": _MEAN,
            "image_std": _STD,
            "tiles": {
                "dynamic_image_size": stated["dynamic_image_size"],
                "use_thumbnail": stated["use_thumbnail"],
                "min_dynamic_patch": stated["min_dynamic_patch"],
                "max_dynamic_patch": stated["max_dynamic_patch"],
            },
        }
        if stated["ps_version"] not in ("v1", "v2"):
            raise ConfigError(
                f"config.json: ps_version {stated['ps_version']!r} is not one of v1, v2"
            )
        if stated.get("pad2square"):
            raise ConfigError("config.json: pad2square is not supported; only false is")
        tile_size = stated.get("force_image_size") or values["vision_config"]["image_size"]
        tokens = _tokens(stated, model_path)
        if "<IMG_CONTEXT>" not in tokens:
            raise ConfigError(
                f"{model_path or 'the checkpoint'}: neither added_tokens.json nor "
                "tokenizer_config.json nor tokenizer.json has the token <IMG_CONTEXT>, whose "
                "places images take; give the tokenizer's files with the checkpoint, or set "
                "image_token_id with hf_overrides"
            )
        found, end = chat_template(
            stated.get("template"),
            stated.get("system_message"),
            begins=llm.get("architectures") == ["InternLM2ForCausalLM"],
        )
        config = _build(
            cls.architecture, llm, model_path, values, tile_size, stated["downsample_ratio"], tokens
        )
        # The original code ends an answer there, whatever else the checkpoint says.
        ends = (*config.eos_token_ids, *(tokens[name] for name in tokens if name == end))
        return config.replace(
            eos_token_ids=tuple(dict.fromkeys(ends)),
            chat_template=found,
            **kwargs,
        )


class InternVLConfigBuilder:
    """Reads the configs of transformers' class."""

    architecture: ClassVar[str] = "InternVLForConditionalGeneration"

    @classmethod
    def condition(cls, hf_config: HFConfig) -> bool:
        """Whether the checkpoint calls itself by this architecture."""
        return bool(hf_config.get("architectures") == [cls.architecture])

    @classmethod
    def build(
        cls, hf_config: HFConfig, model_path: Path | None = None, **kwargs: Any
    ) -> ModelConfig:
        """As the other builder's.

        Raises:
            ConfigError: a key is missing or senseless.
            UnknownArchitectureError: the text model's family is not installed.
        """
        stated = stated_keys(hf_config.to_dict())
        text = _text(stated, "text_config")
        ties = text.get("tie_word_embeddings", True)
        text["tie_word_embeddings"] = stated.get("tie_word_embeddings", ties)
        if "architectures" not in text and text.get("model_type", "qwen2") in _ARCHITECTURES:
            text["architectures"] = [_ARCHITECTURES[text.get("model_type", "qwen2")]]
        vision = stated_keys(object_of(stated, "vision_config"))
        for theirs, ours in (("attention_bias", "qkv_bias"), ("use_qk_norm", "qk_normalization")):
            if theirs in vision:
                vision[ours] = vision[theirs]
        for key, wanted in (
            ("vision_feature_select_strategy", "default"),
            ("projector_hidden_act", "gelu"),
        ):
            _only("config.json", stated, key, wanted)
        for key, flag in (
            ("use_mean_pooling", True),
            ("use_mask_token", False),
            ("use_absolute_position_embeddings", True),
        ):
            _only("config.json: vision_config", vision, key, flag)
        preprocessor = _read(model_path, "preprocessor_config.json")
        for key, value in _PIXELS_ONLY.items():
            _only("preprocessor_config.json", preprocessor, key, value)
        values = {
            **_tower(vision, _HF_VISION),
            "ps_version": "v2",
            "select_layer": stated.get("vision_feature_layer", -1),
            "image_mean": _three(preprocessor, "image_mean", _CLIP_MEAN),
            "image_std": _three(preprocessor, "image_std", _CLIP_STD),
            # Its processor cuts images to tiles unless it is told not to.
            "tiles": {
                "dynamic_image_size": True,
                "use_thumbnail": True,
                "min_dynamic_patch": preprocessor.get("min_patches", 1),
                "max_dynamic_patch": preprocessor.get("max_patches", 12),
            },
        }
        tile_size = values["vision_config"]["image_size"]
        size = preprocessor.get("size", {})
        for edge in ("height", "width"):
            _only("preprocessor_config.json: size", size, edge, tile_size)
        tokens = _tokens({"image_token_id": 151667, **stated}, model_path)
        ratio = stated.get("downsample_ratio", 0.5)
        config = _build(cls.architecture, text, model_path, values, tile_size, ratio, tokens)
        return config.replace(**kwargs)


def _text(stated: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The text model's part of a config; what the whole says of ends goes before it."""
    ends = {"eos_token_id": stated["eos_token_id"]} if "eos_token_id" in stated else {}
    return {**stated_keys(object_of(stated, key)), **ends}


def _build(
    architecture: str,
    text: Mapping[str, Any],
    model_path: Path | None,
    values: dict[str, Any],
    tile_size: Any,
    ratio: Any,
    tokens: Mapping[str, Any],
) -> ModelConfig:
    """The text model's config, with what both layouts have."""
    config = text_model_config(HFConfig(text), model_path, PACKAGES)
    merge = {0.5: 2, 1: 1, 0.25: 4}.get(ratio) if isinstance(ratio, int | float) else None
    if merge is None:
        raise ConfigError(f"config.json: downsample_ratio {ratio!r} is not one of 0.25, 0.5, 1")
    vision = values["vision_config"]
    side = vision["patch_size"] * merge
    if type(tile_size) is not int or tile_size <= 0 or tile_size % side:
        raise ConfigError(
            f"config.json: the size of a tile, {tile_size!r}, is no multiple of the {side} pixels "
            "of an embedding (patch_size / downsample_ratio)"
        )
    layers, layer = vision["num_hidden_layers"], values.pop("select_layer")
    if type(layer) is not int or not -layers - 1 <= layer <= layers:
        raise ConfigError(
            f"config.json: the tower's output {layer!r} (select_layer or vision_feature_layer) is "
            f"none of its {layers} layers, nor the embedding before them"
        )
    # Outputs are counted from that of the embedding on.
    values["vision_depth"] = layer if layer >= 0 else layers + 1 + layer
    values["tiles"] = {**values["tiles"]}
    counts = {key: value for key, value in values["tiles"].items() if key.endswith("patch")}
    check_kinds(counts, dict.fromkeys(counts, 1))
    ids = {key: tokens.get(text) for key, text in _TOKENS.items()}
    for key, token in ids.items():
        if token is not None and (type(token) is not int or not 0 <= token < config.vocab_size):
            raise ConfigError(
                f"config.json: {key} must be a token of the {config.vocab_size}, got {token!r}"
            )
    values |= {
        **ids,
        "architectures": [architecture],
        "tile_size": tile_size,
        "merge_size": merge,
        "text_config": config.hf_config.to_dict(),
    }
    return config.replace(
        architecture=architecture,
        hf_config=HFConfig(values),
        text_model=config,
        texts={frame_label(number): () for number in range(1, MOST_FRAMES + 1)},
    )


def _tower(stated: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``vision_config`` with the keys of ``defaults``, which make sense."""
    values = {key: stated.get(key, default) for key, default in defaults.items()}
    for key in ("image_size", "patch_size"):
        sides = values[key]
        if isinstance(sides, list) and sides and sides == [sides[0]] * 2:
            values[key] = sides[0]
    try:
        check_kinds(values, defaults)
        for key, known in (("hidden_act", _ACTIVATIONS), ("norm_type", _NORMS)):
            if values[key] not in known:
                raise ConfigError(
                    f"config.json: {key} {values[key]!r} is not one of {', '.join(known)}"
                )
        for whole, part in (("hidden_size", "num_attention_heads"), ("image_size", "patch_size")):
            if values[whole] % values[part]:
                raise ConfigError(
                    f"config.json: {whole} ({values[whole]}) is not divisible by {part} "
                    f"({values[part]})"
                )
        _only("config.json", stated, "num_channels", 3)
    except ConfigError as error:
        message = str(error).replace("config.json:", "config.json: vision_config:")
        raise ConfigError(message) from None
    return {"vision_config": {"qk_norm_eps": values["layer_norm_eps"], **values}}


def _tokens(stated: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """The tokens of images and videos, and others that a tokenizer adds, by their texts."""
    found: dict[str, Any] = dict(_added_tokens(folder))
    return found | {text: stated[key] for key, text in _TOKENS.items() if key in stated}


def _added_tokens(folder: Path | None) -> dict[str, int]:
    """The tokens that a tokenizer's files add to its vocabulary, with their ids.

    tokenizer.json, which may be large, is looked into only if the others do not have them.
    """
    found: dict[str, Any] = {}
    entries = _read(folder, "tokenizer_config.json").get("added_tokens_decoder", {})
    if isinstance(entries, dict):
        found |= _contents((token, entry) for token, entry in entries.items())
    found |= _read(folder, "added_tokens.json")
    if "<IMG_CONTEXT>" not in found:
        listed = _read(folder, "tokenizer.json").get("added_tokens", [])
        if isinstance(listed, list):
            found |= _contents(
                (entry.get("id"), entry) for entry in listed if isinstance(entry, dict)
            )
    return {token: number for token, number in found.items() if type(number) is int}


def _contents(entries: Iterable[tuple[Any, Any]]) -> dict[str, int]:
    return {
        str(entry.get("content")): int(token)
        for token, entry in entries
        if isinstance(entry, dict) and str(token).isdecimal()
    }


def _read(folder: Path | None, name: str) -> dict[str, Any]:
    try:
        return {} if folder is None else read_object(folder / name, CorruptCheckpointError)
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _only(where: str, values: Any, key: str, wanted: Any) -> None:
    given = values.get(key) if isinstance(values, Mapping) else None
    if given is not None and given != wanted:
        raise ConfigError(f"{where}: {key} {given!r} is not supported, only {wanted!r}")


def _three(values: Mapping[str, Any], key: str, default: list[float]) -> list[float]:
    numbers: Any = values.get(key) or default
    if (
        not isinstance(numbers, list)
        or len(numbers) != 3
        or not all(type(number) in (int, float) for number in numbers)
        or (key == "image_std" and not all(number > 0 for number in numbers))
    ):
        positive = " positive" * (key == "image_std")
        raise ConfigError(
            f"preprocessor_config.json: {key} must be three{positive} numbers, got {numbers!r}"
        )
    return numbers
