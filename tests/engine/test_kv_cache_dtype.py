"""A KV cache of 8 bits: tokens that no chunking changes, near the original's, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.check import check_model
from engine_core.configs import KVCacheSpec
from engine_core.errors import ConfigError, OptionError
from engine_core.kernels import codes
from engine_core.runtime.source import check_kv_cache

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
DTYPES = ["int8", "fp8"]


def run(name: str, prompts: list[list[int]], **options: Any) -> list[list[tuple[int, float]]]:
    """Each prompt's tokens with their log-probabilities, the prompts one after another."""
    config = EngineConfig(skip_tokenizer_init=True, max_model_len=160, dtype="float32", **options)
    with LLM(str(GOLDEN / name), config) as llm:
        outputs = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in prompts]
    return [
        [(token, step[token].logprob) for token, step in zip(o.token_ids, o.logprobs, strict=True)]
        for o in outputs
    ]


def same(a: list[tuple[int, float]], b: list[tuple[int, float]]) -> bool:
    """Equal tokens, and log-probabilities but for a code that lay between two.

    The last bits of a product with more rows may turn it, which is a step of its scale: up to 0.002
    was seen. Without codes log-probabilities are 0.005 to 0.05 apart.
    """
    return all(x == y and abs(p - q) < 3e-3 for (x, p), (y, q) in zip(a, b, strict=True))


# Grouped heads, ALiBi, soft caps beside windows, windows alone.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("llama-gqa", "fp8"), ("bloom-6heads", "int8"), ("gemma2-caps", "fp8")),
        pytest.param("qwen2-swa", "int8", marks=pytest.mark.long),
    ],
)
def test_tokens_do_not_depend_on_chunks_nor_on_cached_prefixes(name: str, dtype: str) -> None:
    """A chunk sees its own tokens as they are stored, as all later ones do."""
    prompt = max((p.input_ids for p in golden_prompts(name)), key=len)
    whole, hit = run(name, [prompt, prompt], kv_cache_dtype=dtype, block_size=4)
    (chunked,) = run(name, [prompt], kv_cache_dtype=dtype, max_num_batched_tokens=7)
    (exact,) = run(name, [prompt])
    assert same(whole, chunked)
    assert same(whole, hit)
    assert not same(whole[:1], exact[:1]), "it is quantised"
    assert abs(whole[0][1] - exact[0][1]) < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_preempted_sequences_come_back_from_host_memory(dtype: str) -> None:
    prompts = [p.input_ids for p in golden_prompts("llama-gqa")]
    alone = run("llama-gqa", prompts, kv_cache_dtype=dtype)
    config = EngineConfig(
        skip_tokenizer_init=True, max_model_len=160, dtype="float32", block_size=4,
        kv_cache_memory="1MiB", swap_space="4MiB", kv_cache_dtype=dtype,
    )  # fmt: skip
    with LLM(str(GOLDEN / "llama-gqa"), config) as llm:
        page = llm.engine.cache_plan.bytes_per_block
    # One sequence fits.
    with LLM(str(GOLDEN / "llama-gqa"), config.replace(kv_cache_memory=42 * page)) as llm:
        outputs = llm.generate(prompts * 3, GREEDY.replace(max_tokens=40))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    got = [output.outputs[0].token_ids[: GREEDY.max_tokens] for output in outputs]
    assert got == [[token for token, _ in row] for row in alone] * 3


def test_two_ranks_keep_codes() -> None:
    prompts = [p.input_ids for p in golden_prompts("llama-gqa")][:2]
    one = run("llama-gqa", prompts, kv_cache_dtype="int8")
    two = run("llama-gqa", prompts, kv_cache_dtype="int8", tensor_parallel_size=2)
    assert all(same(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_block_has_codes_and_a_scale_a_token_and_head(dtype: str) -> None:
    spec = KVCacheSpec(num_kv_heads=2, head_dim=64, v_head_dim=48, dtype=dtype)
    assert spec.bytes_per_block(16) == 16 * 2 * (64 + 4 + 48 + 4)
    keys, _ = spec.tensors(16)
    cache = torch.zeros(3, *keys.shape, dtype=torch.uint8).view(getattr(torch, keys.dtype))
    held, scales = codes.cache_parts(cache)
    assert held.shape == (3, 16, 2, 64)
    assert scales is not None
    assert scales.shape == (3, 2, 16)
    scales.fill_(1.0)
    assert not cache.view(torch.uint8).flatten(1)[:, : 16 * 2 * 64].any()


def test_check_model_plans_it() -> None:
    plans = {}
    for dtype in ("auto", "int8"):
        config = EngineConfig(kv_cache_dtype=dtype, dtype="bfloat16", device="cpu")
        report = check_model(str(GOLDEN / "llama-gqa"), config)
        assert report.memory is not None
        plans[dtype] = report.memory
        (group,) = report.memory.groups
        assert group.dtype == {"auto": "bfloat16", "int8": "int8"}[dtype]
    ratio = plans["int8"].kv_bytes_per_token / plans["auto"].kv_bytes_per_token
    width = plans["auto"].groups[0].head_dim
    assert ratio == pytest.approx((width + 4) / (2 * width))


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"deterministic and kv_cache_dtype 'int8'.* leave one"):
        EngineConfig(kv_cache_dtype="int8", deterministic=True)
    with pytest.raises(ConfigError, match="block_size that is a multiple of 4, for its scales"):
        EngineConfig(kv_cache_dtype="fp8", block_size=6)
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        EngineConfig(kv_cache_dtype="int4")
    gpu = torch.device("cuda")
    with pytest.raises(OptionError, match=r"'fp8' needs .* 8\.9 .* take kv_cache_dtype='int8'"):
        check_kv_cache("fp8", gpu, (8, 0))
    assert check_kv_cache("int8", gpu, (8, 0)) is None
    slower = check_kv_cache("fp8", gpu, (9, 0))
    assert slower is not None
    assert "portable kernel" in slower
    assert check_kv_cache("auto", gpu, (9, 0)) is None
