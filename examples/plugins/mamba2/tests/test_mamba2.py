"""Mamba-2 through the whole engine, against transformers' outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import (
    GOLDEN,
    SETTINGS,
    check_generation,
    check_int8,
    check_output,
    golden_llm,
    golden_prompts,
    greedy_params,
)
from transformers import BambaConfig, Mamba2Config

from engine_core import LLM, EngineConfig
from engine_core.check.preflight import check_model
from engine_core.configs import HFConfig, KVCacheSpec
from engine_core.errors import ConfigError, OptionError
from engine_core.nn import StateSpec
from engine_core.registry import build_registry
from engine_core.runtime.memory import plan_cache

NAME = "mamba2-tiny"


@pytest.mark.parametrize("name", ["default", "blocks-of-7", "chunks-of-8"])
def test_tokens_and_logits_are_those_of_transformers(name: str) -> None:
    check_generation(NAME, SETTINGS[name])


def test_int8_weights_choose_nearly_the_same() -> None:
    check_int8(NAME)


@pytest.mark.parametrize("swap_space", ["0", "16MiB"])
def test_preempted_requests_are_the_same(swap_space: str) -> None:
    """Three take all blocks; then a more important one with a long prompt comes."""
    prompts = golden_prompts(NAME)
    with golden_llm(NAME, block_size=1) as llm:
        plan = llm.engine.cache_plan
    memory = plan.bytes_per_block * (1 + plan.cache_config.max_blocks(160, 16))
    limits = {"kv_cache_memory": memory, "max_num_batched_tokens": 16, "swap_space": swap_space}
    outputs = {}
    with golden_llm(NAME, block_size=1, **limits) as llm:
        for turn, prompt in enumerate(prompts):
            params = greedy_params(NAME)
            llm.engine.add_request(prompt.input_ids, params, request_id=prompt.name, priority=-turn)
            for _ in range(3):
                outputs |= {output.request_id: output for output in llm.engine.step()}
        while llm.engine.has_unfinished:
            outputs |= {output.request_id: output for output in llm.engine.step()}
        assert llm.engine.scheduler.num_preemptions > 0
        assert (llm.engine.scheduler.num_swaps > 0) == (swap_space != "0")
    for prompt in prompts:
        check_output(outputs[prompt.name], prompt)


def test_without_a_prefix_cache_sequences_run_as_long_as_there_are_states() -> None:
    """One block each, from its first token to its last."""
    prompt = golden_prompts(NAME)[1]
    settings = {"enable_prefix_caching": False, "max_num_seqs": 12}
    with golden_llm(NAME, **settings) as llm:
        memory = llm.engine.cache_plan.bytes_per_block * 6
    with golden_llm(NAME, kv_cache_memory=memory, **settings) as llm:
        assert llm.engine.cache_plan.full_sequences == 5
        for number in range(9):
            llm.engine.add_request(prompt.input_ids, greedy_params(NAME), request_id=str(number))
        most = 0
        while llm.engine.has_unfinished:
            for output in llm.engine.step():
                if output.finished:
                    check_output(output, prompt)
            most = max(most, llm.engine.scheduler.num_running)
        assert most == 5
        assert llm.engine.scheduler.num_preemptions == 0


@pytest.fixture(scope="module")
def warm() -> Iterator[LLM]:
    """An engine with states every 16 tokens, which has seen all prompts."""
    with golden_llm(NAME, block_size=2, max_num_batched_tokens=48) as llm:
        llm.generate([prompt.input_ids for prompt in golden_prompts(NAME)], greedy_params(NAME))
        yield llm


@pytest.fixture(scope="module")
def cold() -> Iterator[LLM]:
    with golden_llm(NAME, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize("cut", [16, 17, 31, 32, 48, 100, 128, 133])
def test_a_prefix_from_the_cache_ends_as_a_cold_one(warm: LLM, cold: LLM, cut: int) -> None:
    """A prompt that shares ``cut`` tokens with one before, and the same without a cache."""
    *_, prompt = golden_prompts(NAME)
    ids = [*prompt.input_ids[:cut], 95, *prompt.input_ids[cut:120]]
    params = greedy_params(NAME)
    (hit,) = warm.generate(ids, params)
    (other,) = cold.generate(ids, params)
    assert hit.metrics.num_cached_tokens == cut // 16 * 16
    assert hit.outputs[0].token_ids == other.outputs[0].token_ids
    mine, theirs = (
        torch.tensor(
            [[row[token].logprob for token in range(96)] for row in each.outputs[0].logprobs]
        )
        for each in (hit, other)
    )
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_prompts_seen_before_are_taken_from_the_cache(warm: LLM) -> None:
    for prompt in golden_prompts(NAME):
        (output,) = warm.generate(prompt.input_ids, greedy_params(NAME))
        assert output.metrics.num_cached_tokens == (len(prompt.input_ids) - 1) // 16 * 16
        check_output(output, prompt)


def states_of(**settings: Any) -> tuple[int, int, int]:
    """Bytes of a state, tokens of its block, and blocks that a sequence of 160 tokens holds."""
    config = EngineConfig(
        skip_tokenizer_init=True,
        device="cpu",
        max_model_len=160,
        kv_cache_memory="8MiB",
        **settings,
    )
    report = check_model(str(GOLDEN / NAME), config)
    assert report.errors == ()
    assert report.memory is not None
    assert report.memory.kv_bytes_per_token == 0
    with LLM(str(GOLDEN / NAME), config) as llm:
        plan = llm.engine.cache_plan
    (group,) = plan.cache_config.groups
    assert isinstance(group.spec, StateSpec)
    assert plan.full_sequences == report.memory.full_sequences
    assert group.block_size == report.memory.state_tokens
    blocks = plan.cache_config.max_blocks(160, 1)
    return report.memory.state_bytes, group.block_size, blocks


def test_the_cost_of_a_sequence_does_not_grow_with_its_length() -> None:
    # Three layers of two states: lengths, 3 inputs of 64 + 2 * 2 * 12 channels, 8 heads of 8 * 12.
    each = 3 * 2 * (4 + 3 * 112 * 4 + 8 * 8 * 12 * 4)
    assert states_of(block_size=4) == (each, 32, 2)
    assert states_of(block_size=4, enable_prefix_caching=False) == (each, 256, 1)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_keys_beside_states_waste_little_memory(prefix_caching: bool) -> None:
    """Bamba 9B on 80 GiB with 65,536 tokens: 29 layers with states, 3 with keys and values."""
    state = StateSpec(
        taps=3, channels=8704, dtype="bfloat16", num_heads=128, head_dim=64, state_size=256
    )
    keys = KVCacheSpec(num_kv_heads=8, head_dim=128, v_head_dim=128, dtype="bfloat16")
    config = EngineConfig(enable_prefix_caching=prefix_caching, max_num_seqs=1024)
    limits = {"block_size": 64, "budget": 80 * 2**30, "max_model_len": 65536}
    plan = plan_cache([state] * 29 + [keys] * 3, config, **limits)
    states = 29 * 2 * (128 * 64 * 256 * 4 + 3 * 8704 * 2 + 4)
    # With a prefix cache a sequence may hold two blocks of each layer where one ends.
    alone = states * (1 + prefix_caching) + 3 * 65536 * 2 * 8 * 128 * 2
    assert 0.8 < plan.full_sequences / (80 * 2**30 / alone) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, r"number of state-space heads \(8\) is not divisible by"),
        ({"tensor_parallel_size": 4}, r"groups of a gated norm \(2\) are not divisible by"),
        ({"kv_cache_dtype": "int8"}, "Mamba2ForCausalLM has no engine_core.nn.Attention"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_what_states_cannot_do_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        golden_llm(NAME, device="cpu", **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; engine-core-mamba2 knows only 'silu'"),
        (
            {"num_heads": 7},
            r"num_heads \(7\) times head_dim \(8\) must be hidden_size",
        ),
        ({"n_groups": 3}, r"num_heads \(8\) is not divisible by n_groups \(3\)"),
        ({"conv_kernel": 1}, "conv_kernel must be at least 2"),
        ({"use_bias": 1}, "use_bias must be true or false"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit must be the least and the greatest"),
        ({"time_step_limit": 3}, "time_step_limit must be the least and the greatest"),
    ],
)
def test_configs_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    values = json.loads((GOLDEN / NAME / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        build_registry(plugin_errors="strict").model_config(HFConfig(values, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mamba_d_head": 5},
            r"mamba_n_heads \(128\) times mamba_d_head \(5\) must be hidden_size",
        ),
        ({"attn_layer_indices": 9}, "attn_layer_indices must be a list of layers, got 9"),
        ({"mamba_n_groups": 3}, r"mamba_n_heads \(128\) is not divisible by mamba_n_groups"),
    ],
)
def test_bambas_config_is_checked_too(change: dict[str, Any], message: str) -> None:
    values = {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [9, 18, 27]}
    registry = build_registry(plugin_errors="strict")
    config = registry.model_config(HFConfig(values))
    assert (config.head_dim, config.hf_config.mamba_d_head) == (128, 64)
    with pytest.raises(ConfigError, match=message):
        registry.model_config(HFConfig(values, **change))


def test_a_convolution_of_bamba_has_no_bias_if_that_is_null() -> None:
    values = {"architectures": ["BambaForCausalLM"], "mamba_conv_bias": None}
    config = build_registry(plugin_errors="strict").model_config(HFConfig(values))
    assert not BambaConfig(mamba_conv_bias=None).mamba_conv_bias
    assert not config.hf_config.mamba_conv_bias


def test_a_saved_config_means_what_transformers_reads(tmp_path: Path) -> None:
    theirs = Mamba2Config(num_hidden_layers=3, architectures=["Mamba2ForCausalLM"])
    theirs.save_pretrained(tmp_path)
    config = build_registry(plugin_errors="strict").model_config(HFConfig.from_folder(tmp_path))
    for key in ("num_heads", "head_dim", "n_groups", "state_size", "layer_norm_epsilon"):
        assert getattr(config.hf_config, key) == getattr(theirs, key)
    assert tuple(config.hf_config.time_step_limit) == tuple(theirs.time_step_limit)
    assert config.eos_token_ids == (2,)
    assert config.may_exceed_length
