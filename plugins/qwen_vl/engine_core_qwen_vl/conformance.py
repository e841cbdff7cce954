"""Tiny models of this family, for the conformance kit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.testing import ConformanceCase, MediaPrompt

if TYPE_CHECKING:
    from torch import nn


def original(config: Mapping[str, Any]) -> nn.Module:
    """Qwen in plain torch: transformers has no class for it."""
    from engine_core_qwen_vl.reference import QWen

    return QWen(config)


# Neither these nor the answers to them have the marks of images. No answer leaves its prompt's
# base of the rotation, which changes where the length doubles.
_PROMPTS = [[(7 * i + n + 1) % 90 for i in range(n)] for n in (1, 6, 21, 40)]
_CONFIG = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "hidden_size": 128,
    "intermediate_size": 192,
    "kv_channels": 32,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rotary_emb_base": 5000,
    "seq_length": 32,
    "tie_word_embeddings": False,
    "vocab_size": 104,
}
# From configuration_qwen.py.
_DEFAULTS = {
    "layer_norm_epsilon": 1e-6,
    "kv_channels": 128,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "rotary_emb_base": 10000,
    "seq_length": 8192,
    "tie_word_embeddings": False,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}
# Of red, green and blue, as the original's visual.py has them.
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_MARK = 100  # before an image; the next two tokens are the mark behind it and the pad


def _shown(name: str, images: int, text: int) -> MediaPrompt:
    """A prompt with images of random pixels, and text behind each; the last is of bytes."""
    draw = np.random.default_rng(images)
    raw = draw.integers(0, 256, (24, 24, 3), np.uint8)
    pixels = draw.normal(size=(images, 3, 24, 24)).astype(np.float32)
    pixels[-1] = ((raw / 255 - _MEAN) / _STD).transpose(2, 0, 1)
    behind = [(11 * i) % 90 for i in range(text)]
    return MediaPrompt(
        name=name,
        token_ids=[7, *[*[_MARK, _MARK + 1], *behind] * images],
        media={"image": [*({"pixel_values": each} for each in pixels[:-1]), raw]},
        reference_ids=[7, *[*[_MARK, *[_MARK + 2] * 256, _MARK + 1], *behind] * images],
        reference_inputs={"pixel_values": pixels},
    )


CASES = [
    ConformanceCase(
        name="qwen",
        architecture="QWenLMHeadModel",
        config=_CONFIG,
        reference=original,
        prompts=_PROMPTS,
        kinds_elsewhere=("image",),
        defaults=_DEFAULTS,
    ),
    ConformanceCase(
        name="qwen-vl",
        architecture="QWenLMHeadModel",
        config={
            **_CONFIG,
            "seq_length": 64,
            "visual": {
                "heads": 2,
                "image_size": 24,
                "image_start_id": _MARK,
                "layers": 2,
                "mlp_ratio": 2.0,
                "output_dim": 128,
                "patch_size": 6,
                "width": 32,
            },
        },
        reference=original,
        prompts=_PROMPTS,
        media=[_shown("an image", 1, 4), _shown("two images", 2, 3)],
        defaults=_DEFAULTS,
    ),
]
