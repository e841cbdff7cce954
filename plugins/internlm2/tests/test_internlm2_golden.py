"""The InternLM2 fixtures through the whole engine, against the original code's outputs."""

from __future__ import annotations

from typing import Any

import pytest
from golden_fixtures import (
    GOLDEN,
    check_generation,
    check_preemption,
    check_prefix_cache,
    golden_prompts,
    some_of,
    with_settings,
)

from engine_core import LLM, SamplingParams
from engine_core.configs import HFConfig
from engine_core.errors import ConfigError
from engine_core_internlm2.config import InternLM2ConfigBuilder

FIXTURES = ["internlm2-gqa", "internlm2-dynamic"]


@pytest.mark.parametrize(("name", "settings"), with_settings(FIXTURES))
def test_tokens_and_logits_are_those_of_the_original_code(
    name: str, settings: dict[str, Any]
) -> None:
    check_generation(name, settings)


@pytest.mark.parametrize("name", some_of(FIXTURES, "internlm2-dynamic"))
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name)


@pytest.mark.parametrize("name", some_of(FIXTURES, "internlm2-gqa"))
def test_preempted_requests_are_the_same(name: str) -> None:
    check_preemption(name)


@pytest.mark.long  # the conformance kit has two ranks
def test_two_ranks() -> None:
    name = "internlm2-gqa"
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = golden_prompts(name)
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "skip_tokenizer_init": True}
    with LLM(str(GOLDEN / name), **settings) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]


def test_keys_that_a_checkpoint_leaves_out() -> None:
    config = HFConfig.from_folder(GOLDEN / "internlm2-gqa").to_dict()
    for key in ("bias", "num_key_value_heads", "rope_theta"):
        del config[key]
    built = InternLM2ConfigBuilder.build(HFConfig(config))
    assert built.num_key_value_heads == built.num_attention_heads == 8
    assert built.hf_config.bias is True
    assert built.hf_config.rope_theta == 10000


def test_length_of_dynamic_scaling() -> None:
    built = InternLM2ConfigBuilder.build(HFConfig.from_folder(GOLDEN / "internlm2-dynamic"))
    assert built.max_position_embeddings == 64
    assert built.may_exceed_length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not one of default, linear"),
        ({"bias": 1}, "bias must be true or false, got 1"),
        ({"intermediate_size": 0}, "intermediate_size must be a positive integer"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    config = HFConfig.from_folder(GOLDEN / "internlm2-gqa").replace(**changes)
    with pytest.raises(ConfigError, match=message):
        InternLM2ConfigBuilder.build(config)
