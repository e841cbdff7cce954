"""A request's tokens do not depend on what else is in its batch, in bfloat16 too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import golden_llm
from torch import nn

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.configs import HFConfig, ModelConfig
from engine_core.errors import OptionError
from engine_core.nn import HeadsRMSNorm
from engine_core.runtime.loader import build_on_meta
from engine_core.step_context import BuildContext, building

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 300,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 384,
    "n_layer": 3,
    "n_head": 6,
    "vocab_size": 4096,
    "seq_length": 4096,
    "layer_norm_epsilon": 1e-5,
    "torch_dtype": "bfloat16",
}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def dummy_llm(folder: Path, config: dict[str, Any], **settings: Any) -> LLM:
    """Random weights, whose logits are so close to each other that any rounding changes tokens."""
    (folder / "config.json").write_text(json.dumps(config))
    chosen = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048}
    return LLM(str(folder), EngineConfig(device="cuda", **chosen | settings))


def random_requests(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    generator = random.Random(seed)
    prompts, params = [], []
    shared = [generator.randrange(4096) for _ in range(200)]
    for index in range(count):
        length = generator.choice([1, 3, 17, 64, 65, 130, 257, 600, 1100])
        prompt = [generator.randrange(4096) for _ in range(length)]
        prompts.append([*shared, *prompt] if index % 3 == 0 else prompt)
        randomness = {"temperature": 1.0, "top_p": 0.9, "seed": index} if index % 4 == 0 else {}
        params.append(
            SamplingParams(
                **{"temperature": 0.0, **randomness},
                max_tokens=generator.choice([1, 20, 60]),
                ignore_eos=True,
            )
        )
    return prompts, params


def tokens_of(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> list[tuple[int, ...]]:
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("config", [LLAMA, QWEN2, BLOOM], ids=["llama", "qwen2-window", "bloom"])
def test_tokens_do_not_depend_on_the_batch(tmp_path: Path, config: dict[str, Any]) -> None:
    """Alone without graphs, against: together, in chunks, preempted, from the prefix cache."""
    prompts, params = random_requests(60, seed=1)
    with dummy_llm(
        tmp_path, config, deterministic=True, eager=True, enable_prefix_caching=False
    ) as llm:
        alone = [
            tokens_of(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)
        ]
    settings: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 8192, "max_num_seqs": 200},
        {"max_num_batched_tokens": 97, "max_num_seqs": 33},
        {"max_num_batched_tokens": 300, "kv_cache_memory": 45 * 64 * 8192},
    ]
    for chosen in settings:
        with dummy_llm(tmp_path, config, deterministic=True, **chosen) as llm:
            for _ in range(2):
                together = tokens_of(llm, prompts, params)
                different = [
                    i for i, (a, b) in enumerate(zip(alone, together, strict=True)) if a != b
                ]
                assert not different, f"{chosen}: {len(different)} requests: {different}"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_nor_do_tokens_of_two_ranks(tmp_path: Path) -> None:
    prompts, params = random_requests(20, seed=2)
    with dummy_llm(tmp_path, LLAMA, deterministic=True, tensor_parallel_size=2) as llm:
        together = tokens_of(llm, prompts, params)
        each = zip(prompts, params, strict=True)
        alone = [tokens_of(llm, [prompt], [one])[0] for prompt, one in each]
    assert together == alone


def test_where_it_would_mean_nothing_it_is_refused() -> None:
    with pytest.raises(OptionError, match="deterministic is for GPUs: on cpu"):
        golden_llm("llama-gqa", deterministic=True, device="cpu")


def test_a_norm_over_the_heads_of_several_ranks_is_refused() -> None:
    with (
        building(BuildContext(deterministic=True, tp_size=2)),
        pytest.raises(OptionError, match="a norm over the heads of several ranks"),
    ):
        HeadsRMSNorm(4, 8)


def test_products_of_torchs_own_modules_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self, config: HFConfig, ctx_mgr: Any, **options: Any) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

    config = ModelConfig(
        hf_config=HFConfig({}),
        architecture="Model",
        num_layers=1,
        max_position_embeddings=8,
        vocab_size=8,
        hidden_size=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=4,
    )
    assert build_on_meta(Model, config, BuildContext()) is not None
    with pytest.raises(OptionError, match=r"inner\.0 of Model is a torch\.nn\.Linear"):
        build_on_meta(Model, config, BuildContext(deterministic=True))
