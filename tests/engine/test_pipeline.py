"""Stages over gloo: the tokens of one stage, each stage with its own layers and its own cache."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.checkpoint import open_checkpoint
from engine_core.engine.export import export_model
from engine_core.errors import EngineDeadError, OptionError
from engine_core.registry import build_registry
from engine_core.runtime.loader import build_on_meta, load_weights
from engine_core.runtime.stages import StageLink, cut, parts_of
from engine_core.step_context import BuildContext
from engine_core.steps import PlanRow, StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
CPU = torch.device("cpu")


def config(**more: Any) -> EngineConfig:
    settings = {"skip_tokenizer_init": True, "max_model_len": 160, "pipeline_parallel_size": 2}
    return EngineConfig(**settings | more)


def network(name: str) -> torch.nn.Module:
    registry = build_registry(())
    model_config = registry.model_config(open_checkpoint(GOLDEN / name).hf_config, GOLDEN / name)
    model_class = registry.model_class(model_config.architecture)
    return build_on_meta(model_class, model_config, BuildContext(dtype=torch.float32))


# Three layers on two stages, a tied head, layers of two kinds.
@pytest.mark.parametrize(
    "name",
    [
        # Below with two ranks on each.
        pytest.param("llama-gqa", marks=pytest.mark.long),
        *("llama-tied-llama3", "gemma3-ropes"),
    ],
)
def test_two_stages_give_the_tokens_of_the_original_code(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = golden_prompts(name)
    with LLM(str(GOLDEN / name), config(block_size=4, max_num_batched_tokens=64)) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]
    assert not multiprocessing.active_children()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "name", ["llama-tied-llama3", pytest.param("qwen2-gqa", marks=pytest.mark.long)]
)
def test_stages_of_a_vocabulary_of_codes(name: str, tmp_path: Path) -> None:
    """An embedding of codes gives numbers for the stage after, and a tied head takes its codes."""
    file = tmp_path / "int8.safetensors"
    export_model(str(GOLDEN / name), file, EngineConfig(quantization="int8"))
    prompts = [prompt.input_ids for prompt in golden_prompts(name)]
    found = []
    for stages in (1, 2):
        with LLM(str(file), config(pipeline_parallel_size=stages)) as llm:
            # One by one: few rows are multiplied in bfloat16.
            outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_two_ranks_on_each_of_two_stages_give_them_too() -> None:
    prompts = golden_prompts("llama-gqa")
    # First: what it compiles is there for all ranks.
    one = config(pipeline_parallel_size=1)
    with LLM(str(GOLDEN / "llama-gqa"), one) as llm:
        alone = llm.generate(prompts[1].input_ids, SamplingParams(seed=3, max_tokens=9))
    with LLM(str(GOLDEN / "llama-gqa"), config(tensor_parallel_size=2)) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], GREEDY)
        sampled = llm.generate(prompts[1].input_ids, SamplingParams(seed=3, max_tokens=9))
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]
    assert sampled[0].outputs[0].token_ids == alone[0].outputs[0].token_ids


@pytest.mark.long
def test_two_stages_share_out_a_vocabulary_that_is_packed(smollm2_gguf: Path) -> None:
    """Of a file whose head is its embedding, in blocks."""
    prompts, tokens = [[504, 3575, 282], list(range(40, 90))], []
    for stages in (1, 2):
        blocks = config(pipeline_parallel_size=stages, quantization="gguf")
        with LLM(str(smollm2_gguf), blocks) as llm:
            outputs = llm.generate(prompts, GREEDY)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_two_stages_preempt_swap_report_and_reuse_rows_as_one_does() -> None:
    """More sequences than rows, and fewer blocks than they need."""
    prompts = [prompt.input_ids for prompt in golden_prompts("llama-gqa")[:4]]
    prompts += [list(range(1 + i, 12 + 2 * i)) for i in range(6)]
    params = [
        SamplingParams(
            temperature=0.0 if index % 3 else 0.8,
            seed=index,
            max_tokens=8 + 6 * (index % 4),
            ignore_eos=True,
            logprobs=1 if index % 4 == 1 else None,
            prompt_logprobs=1 if index == 2 else None,
            repetition_penalty=1.3 if index == 5 else 1.0,
        )
        for index in range(len(prompts))
    ]
    results = []
    for stages, own_layers in ((1, 3), (2, 2)):
        small = config(
            pipeline_parallel_size=stages,
            max_model_len=64,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            # As many blocks in all: the first stage has two of the three layers.
            kv_cache_memory=18 * 512 * own_layers,
            swap_space=8 * 1536,
        )
        with LLM(str(GOLDEN / "llama-gqa"), small) as llm:
            outputs = llm.generate(prompts, params)
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        results.append(
            [
                (
                    output.outputs[0].token_ids,
                    [list(each) for each in output.outputs[0].logprobs or ()],
                    [each and list(each) for each in output.prompt_logprobs or ()],
                )
                for output in outputs
            ]
        )
    assert results[0] == results[1]


def test_a_stage_that_dies_ends_the_request() -> None:
    prompt = golden_prompts("llama-gqa")[2]
    with LLM(str(GOLDEN / "llama-gqa"), config()) as llm:
        stream = llm.stream(prompt.input_ids, GREEDY)
        assert next(stream).outputs[0].token_ids == prompt.new_tokens[:1]
        victim = next(p for p in multiprocessing.active_children() if p.name.endswith("rank-0"))
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 0 ended by signal SIGKILL"):
            list(stream)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("name", "stages", "why"),
    [
        ("bloom-pow2", 2, "BloomForCausalLM cannot be cut into 2 stages: it is no engine_core"),
        ("llama-gqa", 4, "cannot be cut into 4 stages: it has 3 layers; set .* to at most 3"),
        ("internvl-hf-qwen2", 2, "cannot be cut into 2 stages: it is no engine_core"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(name: str, stages: int, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        LLM(str(GOLDEN / name), config(pipeline_parallel_size=stages))
    assert not multiprocessing.active_children()


def test_a_model_that_embeds_is_not_cut() -> None:
    with pytest.raises(OptionError, match=r"LlamaForCausalLM cannot be cut .* it gives vectors"):
        LLM(str(GOLDEN / "llama-gqa"), config(task="embed"))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied-llama3", "qwen3moe-stacked"])
def test_each_stage_loads_its_own_tensors(name: str) -> None:
    source = open_checkpoint(GOLDEN / name)
    whole = network(name)
    load_weights(whole, source, name, CPU)
    values = dict(whole.named_parameters(remove_duplicate=False))
    found: list[str] = []
    for stage in range(2):
        model = network(name)
        part, cached = cut(model, source, name, StageLink(stage, 2))
        assert part is not None
        load_weights(model, part, name, CPU)
        own = dict(model.named_parameters())
        for parameter, value in own.items():
            assert torch.equal(value, values[parameter]), parameter
        layers = {int(each.split(".")[2]) for each in own if each.startswith("model.layers.")}
        assert layers == {*cached}
        found += [each for each in own if "embed_tokens" not in each]
        assert ("model.embed_tokens.weight" in own) == (stage == 0 or "tied" in name)
        assert ("model.norm.weight" in own) == (stage == 1)
    wanted = dict(whole.named_parameters())
    assert sorted(found) == sorted(each for each in wanted if "embed_tokens" not in each)


def test_a_plan_is_parted_by_rows() -> None:
    rows = [PlanRow(str(i), i, 7, 1, ((),), True) for i in range(5)]
    parts = parts_of(StepPlan(3, rows, swap_in=((1, 2),)), 2)
    assert [[row.row for row in part.rows] for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part.swap_in for part in parts] == [((1, 2),), ()]
    assert [part.step_id for part in parts] == [3, 3]
    assert len(parts_of(StepPlan(3, rows[:1]), 4)) == 1
