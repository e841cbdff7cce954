"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine_core.inputs import Video
from engine_core.testing import ConformanceCase, MediaPrompt

# Of red, green and blue, from 0 to 1.
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
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


def _raw(
    name: str, kind: str, options: dict[str, Any], fps: float | None = None, *, says: bool = False
) -> MediaPrompt:
    """A prompt with a picture, or with a video of four frames, as bytes that need no other size.

    A video has ``fps`` frames in a second, and may say so itself.
    """
    size = (4, 16, 48, 3) if kind == "video" else (16, 48, 3)
    frames = np.random.default_rng(len(name)).integers(0, 256, size, np.uint8)
    # A picture is a video of two equal frames.
    pixels = (frames if frames.ndim == 4 else np.stack([frames] * 2)) / 255
    pixels = (pixels - _MEAN) / _STD
    # Frames by two, rows and columns of embeddings of 2 x 2 patches of 4 x 4 pixels.
    cut = pixels.reshape(-1, 2, 2, 2, 4, 6, 2, 4, 3)
    values = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 96).astype(np.float32)
    grid = np.array([[len(values) // 48, 4, 12]])
    token, names = (4, "_videos") if kind == "video" else (3, "")
    ids = [7, *[token] * (len(values) // 4), 9]
    inputs = {
        f"pixel_values{names}": values,
        f"{kind}_grid_thw": grid,
        "mm_token_type_ids": np.array([[{3: 1, 4: 2}.get(each, 0) for each in ids]]),
    }
    if fps is not None:
        inputs["second_per_grid_ts"] = np.array([2 / fps], np.float32)
    return MediaPrompt(
        name=name,
        token_ids=[7, token, 9],
        media={kind: [Video(frames, fps) if says else frames]},
        options=options,
        reference_ids=ids,
        reference_inputs=inputs,
    )


_MEDIA = [
    _shown("a picture first", [*[3] * 6, 9, 8], [(1, 4, 6)]),
    _shown("text after a picture", [7, 5, *[3] * 4, 9, 8, 11, 12], [(1, 4, 4)]),
    _shown("two pictures", [7, *[3] * 6, 5, 6, *[3] * 4, 8], [(1, 4, 6), (1, 8, 2)]),
    # Its width is more than its length in time, after which transformers does not go on.
    _shown("a video and a picture", [7, *[4] * 20, 5, *[3] * 4, 8], [(1, 4, 4)], [(2, 4, 10)]),
]
_SMALL = {"min_pixels": 64}
_PIXELS = _raw("pixels", "image", _SMALL)
_SECONDS = [
    # 2.8 positions between its two halves.
    _shown("a slow video", [7, *[4] * 20, 8], [], [(2, 4, 10)], seconds=0.7),
    _raw("frames with their number in a second", "video", _SMALL, fps=3.0, says=True),
    _raw("frames, and how many in a second", "video", {**_SMALL, "fps": 5}, fps=5),
    _raw("frames alone", "video", _SMALL, fps=2.0),
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
        media=[*_MEDIA, _PIXELS],
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
        media=[*_MEDIA, *_SECONDS],
    ),
]
