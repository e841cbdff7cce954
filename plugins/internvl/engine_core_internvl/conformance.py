"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.testing import ConformanceCase, MediaPrompt

if TYPE_CHECKING:
    from torch import nn


def original(config: Mapping[str, Any]) -> nn.Module:
    """The same model under the original layout's names."""
    llm = config["llm_config"]
    vision = {
        **config["vision_config"],
        "model_type": "internvl_vision",
        "attention_bias": config["vision_config"]["qkv_bias"],
        "use_qk_norm": config["vision_config"]["qk_normalization"],
    }
    import transformers

    values = {**_config(llm, {}), "vision_config": vision}
    del values["model_type"]
    theirs: Any = transformers.InternVLForConditionalGeneration
    model: nn.Module = theirs._from_config(
        theirs.config_class(**values), attn_implementation="eager"
    )

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

# Text alone: neither these nor the answers to them have the token of images, 3.
_draw = random.Random(0)
_PROMPTS = [[_draw.randrange(4, 160) for _ in range(length)] for length in (1, 6, 21, 45)]


def _shown(name: str, ids: Sequence[int], *tiles: int) -> MediaPrompt:
    """A prompt with images of so many random tiles, 4 embeddings each."""
    draw = np.random.default_rng(len(name))
    images = [draw.normal(size=(count, 3, 16, 16)).astype(np.float32) for count in tiles]
    return MediaPrompt(
        name=name,
        token_ids=ids,
        media={"image": [{"pixel_values": image} for image in images]},
        reference_inputs={"pixel_values": np.concatenate(images)},
    )


_MEDIA = [
    _shown("an image first", [*[3] * 4, 9, 8], 1),
    _shown("text after two tiles", [7, 5, *[3] * 8, 9, 8, 11], 2),
    _shown("two images", [7, *[3] * 4, 5, *[3] * 8, 6], 1, 2),
]

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
        "image_token_id": 3,
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
        media=_MEDIA,
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
        media=_MEDIA,
        kinds_elsewhere=("video",),
    ),
    ConformanceCase(
        name="internvl-chat",
        architecture="InternVLChatModel",
        config={
            "architectures": ["InternVLChatModel"],
            "model_type": "internvl_chat",
            "downsample_ratio": 0.5,
            "ps_version": "v2",
            "image_token_id": 3,
            "vocab_size": 160,
            "max_position_embeddings": 64,
            "llm_config": {
                **_TEXT,
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "norm_type": "rms_norm",
                "qk_normalization": True,
                "qkv_bias": False,
            },
        },
        reference=original,
        prompts=_PROMPTS,
        media=_MEDIA,
        kinds_elsewhere=("video",),
    ),
]
