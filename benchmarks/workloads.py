"""The workloads and model shapes that engine-core and its peers are measured with.

Random weights, greedy, end of sequence ignored, no prefix caching. ``tpot`` is the time a decode
step takes at a context of about 1000 tokens: (time for 129 tokens - time for 1) / 128. The mix is
256 requests whose prompt and output lengths are uniform in 100..1024.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16"}

SHAPES: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen2_0_5b": {
        **_COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}

Run = Callable[[list[list[int]], list[int]], float]
"""Completes prompts with exactly so many tokens each; returns the seconds it took."""


def write_config(name: str, folder: Path) -> Path:
    """Write a checkpoint that is only a ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def random_ids(count: int, vocab: int, generator: random.Random) -> list[int]:
    """Token ids away from the special ones at both ends."""
    return [generator.randrange(1000, vocab - 3000) for _ in range(count)]


def measure(
    run: Run, vocab: int, *, batches: tuple[int, ...] = (1, 8, 32, 128, 256), mix: int = 256
) -> dict[str, float]:
    """Run the workloads; milliseconds, tokens a second and seconds by name."""
    generator = random.Random(0)
    out: dict[str, float] = {}

    def fresh(batch: int, length: int) -> list[list[int]]:
        return [random_ids(length, vocab, generator) for _ in range(batch)]

    run(fresh(4, 64), [8] * 4)
    for batch in batches:
        once = min(run(fresh(batch, 1024), [1] * batch) for _ in range(2))
        many = min(run(fresh(batch, 1024), [129] * batch) for _ in range(2))
        out[f"tpot_ms_b{batch}"] = (many - once) / 128 * 1e3
        out[f"prefill_tok_s_b{batch}"] = batch * 1024 / once
    out["ttft_ms_4k"] = min(run(fresh(1, 4096), [1]) for _ in range(3)) * 1e3
    if mix:
        generator = random.Random(0)
        prompts = [random_ids(generator.randint(100, 1024), vocab, generator) for _ in range(mix)]
        lengths = [generator.randint(100, 1024) for _ in range(mix)]
        seconds = run(prompts, lengths)
        out["mix_out_tok_s"] = sum(lengths) / seconds
        out["mix_s"] = seconds
    return out
