"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_core.testing import ConformanceCase, MediaPrompt

Grid = tuple[int, int, int]


# Text alone: neither these nor the answers to them have the tokens of pictures, 3 and 4.
_draw = random.Random(0)
_PROMPTS = [[_draw.randrange(2, 160) for _ in range(length)] for length in (1, 6, 21, 45)]


def _shown(
    name: str,
    ids: Sequence[int],
    images: Sequence[Grid] = (),
    videos: Sequence[Grid] = (),
    seconds: float | None = None,
) -> MediaPrompt:
    """A prompt with items of random patches, whose sizes in patches are given.

    ``seconds`` is the time between patches of a video, where the model counts it.
    """
    draw = np.random.default_rng(len(name))

    def items(values: str, sizes: str, grids: Sequence[Grid]) -> list[dict[str, np.ndarray]]:
        return [
            {
                values: draw.normal(size=(np.prod(grid), 96)).astype(np.float32),
                sizes: np.array(grid),
            }
            for grid in grids
        ]

    media: dict[str, list[dict[str, Any]]] = {
        "image": items("pixel_values", "image_grid_thw", images),
        "video": items("pixel_values_videos", "video_grid_thw", videos),
    }
    media = {kind: given for kind, given in media.items() if given}
    inputs = {
        key: np.stack([i[key] for i in given])
        if "grid" in key
        else np.concatenate([i[key] for i in given])
        for given in media.values()
        for key in given[0]
    }
    if seconds is not None:
        media["video"] = [{**each, "second_per_grid_ts": seconds} for each in media["video"]]
        inputs["second_per_grid_ts"] = np.array([seconds] * len(media["video"]), np.float32)
    inputs["mm_token_type_ids"] = np.array([[{3: 1, 4: 2}.get(token, 0) for token in ids]])
    return MediaPrompt(name=name, token_ids=ids, media=media, reference_inputs=inputs)


_MEDIA = [
    _shown("a picture first", [*[3] * 6, 9, 8], [(1, 4, 6)]),
    _shown("text after a picture", [7, 5, *[3] * 4, 9, 8, 11, 12], [(1, 4, 4)]),
    _shown("two pictures", [7, *[3] * 6, 5, 6, *[3] * 4, 8], [(1, 4, 6), (1, 8, 2)]),
    # Its width is more than its length in time, after which transformers does not go on.
    _shown("a video and a picture", [7, *[4] * 20, 5, *[3] * 4, 8], [(1, 4, 4)], [(2, 4, 10)]),
]
_SECONDS = _shown("a slow video", [7, *[4] * 20, 8], [], [(2, 4, 10)], seconds=0.75)

_TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "image_token_id": 3,
    "video_token_id": 4,
}

CASES = [
    ConformanceCase(
        name="qwen2-vl",
        architecture="Qwen2VLForConditionalGeneration",
        config={
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **_TEXT,
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "patch_size": 4,
            },
        },
        prompts=_PROMPTS,
        media=_MEDIA,
    ),
    ConformanceCase(
        name="qwen2.5-vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        config={
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            **_TEXT,
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "num_heads": 2,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        prompts=_PROMPTS,
        media=[*_MEDIA, _SECONDS],
    ),
]
