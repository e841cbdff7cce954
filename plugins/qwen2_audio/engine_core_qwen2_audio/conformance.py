"""A tiny model of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from engine_core.testing import ConformanceCase, MediaPrompt

_FRAMES = 100

# Text alone: neither these nor the answers to them have the token of a sound, 0.
_draw = random.Random(0)
_PROMPTS = [[_draw.randrange(1, 160) for _ in range(length)] for length in (1, 6, 21, 45)]


def _shown(name: str, ids: Sequence[int], frames: Sequence[int]) -> MediaPrompt:
    """A prompt with sounds of random features, and of so many frames."""
    draw = np.random.default_rng(len(name))
    inputs = {
        "input_features": draw.normal(size=(len(frames), 16, _FRAMES)).astype(np.float32),
        "feature_attention_mask": np.stack([np.arange(_FRAMES) < n for n in frames]).astype(int),
    }
    items = [{key: each[index] for key, each in inputs.items()} for index in range(len(frames))]
    return MediaPrompt(name=name, token_ids=ids, media={"audio": items}, reference_inputs=inputs)


CASES = [
    ConformanceCase(
        name="qwen2-audio",
        architecture="Qwen2AudioForConditionalGeneration",
        config={
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "model_type": "qwen2_audio",
            "audio_token_index": 0,
            "text_config": {
                "model_type": "qwen2",
                "vocab_size": 160,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 160,
                "rms_norm_eps": 1e-5,
            },
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "max_source_positions": _FRAMES // 2,
            },
        },
        prompts=_PROMPTS,
        media=[
            _shown("a sound first", [*[0] * 5, 9, 8], [20]),
            _shown("text after a sound", [7, 5, *[0] * 3, 9, 8, 11, 12], [13]),
            # One of an odd number of frames, of positions too, and the longest.
            _shown("three sounds", [7, *[0] * 5, 6, 6, *[0] * 25, 4, *[0] * 2, 8], [21, 100, 9]),
        ],
    ),
]
