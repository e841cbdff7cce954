from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine_core.testing import ConformanceCase, MediaPrompt

if TYPE_CHECKING:
    from torch import nn

_draw = np.random.default_rng(0)
_A, _B, _C = (_draw.integers(0, 256, (*size, 3), np.uint8) for size in ((2, 3), (3, 2), (3, 2)))


def reference(config: Mapping[str, Any]) -> nn.Module:
    """transformers' Llama behind an eye of plain torch."""
    from engine_core_looks.reference import Reference

    return Reference(config)


def _shown(
    name: str, ids: Sequence[int], pictures: Sequence[Any], light: float | None = None
) -> MediaPrompt:
    whole, left = [], list(pictures)
    for token in ids:
        whole += [3] * (left[0].shape[0] * left.pop(0).shape[1]) if token == 3 else [token]
    numbers = [picture.reshape(-1, 3) / 127.5 - 1 + (light or 0.0) for picture in pictures]
    sizes = [picture.shape[:2] for picture in pictures]
    inputs = {"pixels": np.concatenate(numbers).astype(np.float32), "sizes": np.array(sizes)}
    return MediaPrompt(
        name=name,
        token_ids=ids,
        media={"image": pictures},
        options={} if light is None else {"light": light},
        reference_ids=whole,
        reference_inputs=inputs,
    )


CASES = [
    ConformanceCase(
        name="looks",
        architecture="LooksForCausalLM",
        config={
            "architectures": ["LooksForCausalLM"],
            "model_type": "llama",
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        reference=reference,
        prompts=[[5], [9, 8, 7, 6, 5, 4]],
        media=[
            _shown("a picture first", [3, 7, 8], [_A]),
            _shown("a lighter picture", [7, 3, 8, 9], [_A], 0.5),
            _shown("three pictures", [7, 3, 8, 3, 3, 9], [_A, _B, _C]),
        ],
    )
]
