"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine_core.testing import ConformanceCase, MediaPrompt

if TYPE_CHECKING:
    from torch import nn


def original(config: Mapping[str, Any]) -> nn.Module:
    """transformers' model under the original layout's names."""
    import transformers

    llm = config["llm_config"]
    vision = {
        **config["vision_config"],
        "model_type": "internvl_vision",
        "attention_bias": config["vision_config"]["qkv_bias"],
        "use_qk_norm": config["vision_config"]["qk_normalization"],
    }
    values = {**_config({**llm, "tie_word_embeddings": False}, {}), "vision_config": vision}
    theirs: Any = transformers.InternVLForConditionalGeneration
    model: nn.Module = theirs._from_config(
        theirs.config_class(**{key: each for key, each in values.items() if key != "model_type"}),
        attn_implementation="eager",
    )

    for name, module in model.named_modules():
        if name.endswith((".q_norm", ".k_norm")) and "vision_tower" in name:
            module.variance_epsilon = vision.get("layer_norm_eps", 1e-6)  # transformers has 1e-6

    def renamed(_: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        import torch

        del metadata
        tensors = {name.removeprefix(prefix): state.pop(name) for name in list(state)}
        for name, tensor in tensors.items():
            if ".q_proj." in name and "vision_tower" in name:
                parts = [name.replace(".q_proj.", f".{part}_proj.") for part in "qkv"]
                name = name.replace("attention.q_proj", "attn.qkv")
                tensor = torch.cat([tensors[part] for part in parts])
            elif "vision_tower" in name and ("k_proj" in name or "v_proj" in name):
                continue
            for theirs, ours in _ORIGINAL.items():
                name = name.replace(theirs, ours)
            state[prefix + name] = tensor

    model.register_state_dict_post_hook(renamed)
    return model


_ORIGINAL = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_model.",
    "embeddings.cls_token": "embeddings.class_embedding",
    "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
    "embeddings.position_embeddings": "embeddings.position_embedding",
    "encoder.layer.": "encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "lambda_": "ls",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "model.multi_modal_projector.layer_norm": "mlp1.0",
    "model.multi_modal_projector.linear_1": "mlp1.1",
    "model.multi_modal_projector.linear_2": "mlp1.3",
}

# Text alone: neither these nor the answers to them have the tokens of images, 3, 4 and 5.
_draw = random.Random(2)
_PROMPTS = [[_draw.randrange(6, 160) for _ in range(length)] for length in (1, 6, 21, 45)]

Values = NDArray[Any]
_IMAGE, _VIDEO = [3], [4, 5]  # placeholders of one


def _tiles(count: int) -> dict[str, Values]:
    draw = np.random.default_rng(count)
    return {"pixel_values": draw.normal(size=(count, 3, 16, 16)).astype(np.float32)}


def _shown(
    name: str,
    ids: Sequence[int | list[int]],
    items: Sequence[tuple[str, Any, Values]],
    options: Mapping[str, Any] | None = None,
) -> MediaPrompt:
    """A prompt of tokens and placeholders, with its items: kind, what is given, and its tiles."""
    given: list[int] = []
    whole: list[int] = []
    counts = iter(len(tiles) for _, _, tiles in items)
    for each in ids:
        given += each if isinstance(each, list) else [each]
        whole += [4, *[3] * 4 * next(counts), 5] if isinstance(each, list) else [each]
    media: dict[str, list[Any]] = {}
    for kind, item, _ in items:
        media.setdefault(kind, []).append(item)
    return MediaPrompt(
        name=name,
        token_ids=given,
        media=media,
        options=options or {},
        reference_ids=whole,
        reference_inputs={"pixel_values": np.concatenate([tiles for _, _, tiles in items])},
    )


def _media(mean: Sequence[float], std: Sequence[float], *, cuts: bool = True) -> list[MediaPrompt]:
    """Prompts with features, with pixels and with a video, whose frame needs no label.

    ``cuts`` is whether a picture becomes several tiles where a prompt does not say.
    """
    from PIL import Image

    pixels = np.random.default_rng(9).integers(0, 256, (16, 32, 3), np.uint8)
    small = np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BICUBIC))
    tiles = np.stack([pixels[:, :16], pixels[:, 16:], small]).astype(np.float32) / 255
    all_cut = (tiles - np.array(mean, np.float32)) / np.array(std, np.float32)
    all_cut = all_cut.transpose(0, 3, 1, 2)
    cut, whole = all_cut[:2], all_cut if cuts else all_cut[2:]
    one, two = _tiles(1), _tiles(2)
    first, second = one["pixel_values"], two["pixel_values"]
    return [
        _shown("an image first", [_IMAGE, 9, 8], [("image", one, first)]),
        _shown("text after an image", [7, 9, _IMAGE, 9, 8, 11], [("image", two, second)]),
        _shown(
            "two images",
            [7, _IMAGE, 6, 8, _IMAGE, 9],
            [("image", two, second), ("image", one, first)],
        ),
        _shown(
            "pixels without a thumbnail",
            [7, _IMAGE, 8],
            [("image", pixels, cut)],
            {"use_thumbnail": False, "dynamic_image_size": True, "max_dynamic_patch": 2},
        ),
        _shown("pixels", [7, _IMAGE, 8], [("image", pixels, whole)]),
        _shown(
            "a video and an image",
            [7, _VIDEO, 9, _IMAGE, 8],
            [("video", two | {"pixel_values": second[:1]}, second[:1]), ("image", one, first)],
        ),
    ]


_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
_TOKENS = {"image_token_id": 3, "image_start_token_id": 4, "image_end_token_id": 5}
_TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def _config(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
        **_TOKENS,
        "tie_word_embeddings": False,
        "text_config": {**_TEXT, **text},
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [16, 16],
            "patch_size": [4, 4],
            "attention_bias": True,
            **vision,
        },
    }


CASES = [
    ConformanceCase(
        name="internvl-llama",
        architecture="InternVLForConditionalGeneration",
        config=_config({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, {}),
        prompts=_PROMPTS,
        media=_media(_CLIP_MEAN, _CLIP_STD),
    ),
    ConformanceCase(
        name="internvl-llama-dynamic-rope",
        architecture="InternVLForConditionalGeneration",
        config=_config(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            {},
        ),
        prompts=_PROMPTS,
        media=_media(_CLIP_MEAN, _CLIP_STD)[:1],
        kinds_elsewhere=("video",),
    ),
    ConformanceCase(
        name="internvl-qwen2-6b",
        architecture="InternVLForConditionalGeneration",
        config=_config(
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
        ),
        prompts=_PROMPTS,
        media=_media(_CLIP_MEAN, _CLIP_STD),
    ),
    ConformanceCase(
        name="internvl-chat",
        architecture="InternVLChatModel",
        config={
            "architectures": ["InternVLChatModel"],
            "model_type": "internvl_chat",
            "downsample_ratio": 0.5,
            "ps_version": "v2",
            **_TOKENS,
            "vocab_size": 160,
            "max_position_embeddings": 64,
            "llm_config": {
                **_TEXT,
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "tie_word_embeddings": True,  # The original ties none.
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "layer_norm_eps": 1e-5,
                "norm_type": "rms_norm",
                "qk_normalization": True,
                "qkv_bias": False,
            },
        },
        reference=original,
        prompts=_PROMPTS,
        media=_media(_MEAN, _STD, cuts=False),
    ),
]
