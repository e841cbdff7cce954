"""Preemption with blocks in host memory, through the whole engine."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.errors import CacheMemoryError

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


def small_cache(name: str, **settings: Any) -> EngineConfig:
    """Blocks of 4 for one sequence of 160 tokens, so that several must preempt one another."""
    config = EngineConfig(
        skip_tokenizer_init=True, max_model_len=160, block_size=4, device="cpu", dtype="float32"
    )
    with LLM(str(GOLDEN / name), config) as llm:
        plan = llm.engine.cache_plan
    # With windows, what a long chunk may take is enough for several sequences.
    chunk = 32 if len(plan.cache_config.groups) > 1 else 256
    memory = (1 + plan.cache_config.max_blocks(160, chunk)) * plan.bytes_per_block
    limits = {"kv_cache_memory": memory, "max_num_batched_tokens": chunk}
    return config.replace(**{**limits, **settings})


def run(name: str, config: EngineConfig, depth: int) -> None:
    """Every golden prompt three times; the tokens are those of the original code."""
    prompts = golden_prompts(name) * 3
    with LLM(str(GOLDEN / name), config) as llm:
        # On a CPU no step is left in flight by itself.
        llm.engine.core.pacing.depth = depth
        outputs = llm.generate([p.input_ids for p in prompts], GREEDY)
        scheduler = llm.engine.scheduler
        assert scheduler.num_preemptions > 0
        assert scheduler.num_swaps > 0
        scheduler.check()
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]


# Grouped heads, layers with and without a window, and spans that must stay whole.
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-swa", "chatglm1-tiny"])
@pytest.mark.parametrize("depth", [0, 2])
def test_swapped_requests_are_the_same(name: str, depth: int) -> None:
    run(name, small_cache(name, swap_space="16MiB", enable_prefix_caching=depth == 0), depth)


@pytest.mark.parametrize("swap_space", ["0", "16MiB"])
def test_priorities_do_not_show_in_the_tokens(swap_space: str) -> None:
    name = "qwen2-swa"
    prompts = golden_prompts(name) * 3
    priorities = [(7 * number) % 3 for number in range(len(prompts))]
    config = small_cache(name, swap_space=swap_space)
    with LLM(str(GOLDEN / name), config) as llm:
        llm.engine.core.pacing.depth = 2
        outputs = llm.generate([p.input_ids for p in prompts], GREEDY, priority=priorities)
        assert llm.engine.scheduler.num_preemptions > 0
        assert (llm.engine.scheduler.num_swaps > 0) == (swap_space != "0")
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]


def test_host_memory_that_is_short_leaves_the_rest_to_recomputation() -> None:
    config = small_cache("llama-gqa")
    block = config.kv_cache_memory // 41
    prompts = golden_prompts("llama-gqa") * 3
    with LLM(str(GOLDEN / "llama-gqa"), config.replace(swap_space=4 * block)) as llm:
        llm.engine.core.pacing.depth = 2
        outputs = llm.generate([p.input_ids for p in prompts], GREEDY)
        assert 0 < llm.engine.scheduler.num_swaps < llm.engine.scheduler.num_preemptions
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]


def test_sampling_goes_on_where_it_was() -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=24, ignore_eos=True, repetition_penalty=1.3)
        for seed in range(12)
    ]
    prompts = [golden_prompts("llama-gqa")[2].input_ids] * len(params)
    small = small_cache("llama-gqa", swap_space="16MiB")
    results = []
    for config in (small.replace(kv_cache_memory=None, swap_space=0), small):
        with LLM(str(GOLDEN / "llama-gqa"), config) as llm:
            llm.engine.core.pacing.depth = 2
            outputs = llm.generate(prompts, params)
            results.append([output.outputs[0].token_ids for output in outputs])
            assert (llm.engine.scheduler.num_swaps > 0) == (config is small)
    assert results[0] == results[1]


def test_every_rank_keeps_its_own_blocks() -> None:
    name = "llama-gqa"
    config = small_cache(name, swap_space="16MiB")
    halved = config.replace(kv_cache_memory=config.kv_cache_memory // 2, tensor_parallel_size=2)
    run(name, halved, depth=1)


def test_swap_space_below_a_block_is_refused() -> None:
    with pytest.raises(CacheMemoryError, match="swap_space is 100 bytes"):
        LLM(str(GOLDEN / "llama-gqa"), skip_tokenizer_init=True, swap_space=100)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-swa"])
def test_swapped_requests_are_the_same_on_a_gpu(name: str, eager: bool) -> None:
    config = small_cache(name, swap_space="16MiB")
    run(name, config.replace(device="cuda", eager=eager), depth=2)
