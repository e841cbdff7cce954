"""A cache spec of an author's own, with scales beside its keys, through the whole engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from extension_imports import check_imports
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import LLM, AsyncEngine, EngineConfig, SamplingParams
from engine_core.check.preflight import check_model
from engine_core.errors import ErrorCode, PluginLoadError

MODEL = Path(__file__).parent / "int8_cache_model.py"
PROMPTS = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("int8-cache")
    source = GOLDEN / "llama-gqa"
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Int8CacheLlama"]}))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return str(folder)


def config(**settings: Any) -> EngineConfig:
    fixed = {"custom_module_map": str(MODEL), "skip_tokenizer_init": True, "device": "cpu"}
    return EngineConfig(**{**fixed, "max_model_len": 160, "block_size": 4, **settings})


def generated(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def alone(checkpoint: str) -> list[list[int]]:
    """The tokens of each prompt by itself, computed at once."""
    with LLM(checkpoint, config(max_num_seqs=1, enable_prefix_caching=False)) as llm:
        return [generated(llm, [prompt])[0] for prompt in PROMPTS]


def test_two_specs_share_one_pool(checkpoint: str) -> None:
    settings = config(kv_cache_memory=2**20)
    report = check_model(checkpoint, settings)
    assert report.errors == ()
    assert report.memory is not None
    # Two layers of int8 and a scale, one of float32: 2 heads of 8 each.
    assert report.memory.kv_bytes_per_token == 2 * 2 * 2 * (8 + 4) + 2 * 2 * 8 * 4
    assert [group.kind for group in report.memory.groups] == ["Int8CacheSpec", "KVCacheSpec"]
    with LLM(checkpoint, settings) as llm:
        plan = llm.engine.cache_plan
        assert len(plan.cache_config.groups) > 1
        assert plan.bytes_per_block * plan.cache_config.num_blocks <= 2**20
        assert plan.full_sequences == report.memory.full_sequences
        assert plan.max_tokens == report.memory.max_tokens


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}, {"block_size": 1}, {"block_size": 16}],
    ids=str,
)
def test_tokens_in_a_batch_are_those_alone(
    checkpoint: str, alone: list[list[int]], settings: dict[str, Any]
) -> None:
    with LLM(checkpoint, config(**settings)) as llm:
        assert generated(llm, PROMPTS) == alone


def test_tokens_from_the_prefix_cache_are_the_same(checkpoint: str, alone: list[list[int]]) -> None:
    with LLM(checkpoint, config()) as llm:
        assert generated(llm, PROMPTS) == alone
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert bool(output.metrics.num_cached_tokens) == (len(prompt) > 4)


@pytest.mark.parametrize("swap_space", ["0", "16MiB"])
def test_tokens_after_a_preemption_are_the_same(
    checkpoint: str, alone: list[list[int]], swap_space: str
) -> None:
    with LLM(checkpoint, config()) as llm:
        plan = llm.engine.cache_plan
    memory = (1 + plan.cache_config.max_blocks(160, 256)) * plan.bytes_per_block
    limits = {"kv_cache_memory": memory, "max_num_batched_tokens": 256, "swap_space": swap_space}
    with LLM(checkpoint, config(**limits)) as llm:
        # On a CPU no step is left in flight by itself.
        llm.engine.core.depth = 2
        assert generated(llm, PROMPTS * 3) == alone * 3
        assert llm.engine.scheduler.num_preemptions > 0
        assert (llm.engine.scheduler.num_swaps > 0) == (swap_space != "0")


def test_ranks_have_a_share_each(checkpoint: str, alone: list[list[int]]) -> None:
    with LLM(checkpoint, config(tensor_parallel_size=2)) as llm:
        assert generated(llm, PROMPTS) == alone


def test_a_process_without_torch_does_not_need_the_spec(
    checkpoint: str, alone: list[list[int]]
) -> None:
    async def run() -> list[int]:
        engine = await AsyncEngine.start(checkpoint, config())
        try:
            stream = await engine.add_request(PROMPTS[0], PARAMS)
            return [token async for output in stream for token in output.outputs[0].token_ids]
        finally:
            await engine.close()

    assert asyncio.run(run()) == alone[0]


@pytest.mark.parametrize(
    ("line", "instead", "fault"),
    [
        ("return Int8CacheSpec(", "return dict(", "is {'num_kv_heads': 2"),
        ("    return (\n", "    return ()\n        (\n", "names no tensor"),
        ("heads = (block_size, self", "heads = (block_size, 0 * self", "without elements"),
        ("heads = (", "1 / 0\n        heads = (", "fails: ZeroDivisionError"),
        (
            "    head_dim: int\n",
            "    head_dim: int\n\n    def first_needed(self, at):\n        return at + 1\n",
            "need positions from [1, 2, 16, 17, 18, 1001, 100001] on",
        ),
    ],
)
def test_a_spec_that_is_wrong_is_refused_by_the_name_of_its_layer(
    line: str, instead: str, fault: str, checkpoint: str, tmp_path: Path
) -> None:
    wrong = tmp_path / "model.py"
    assert line in MODEL.read_text()
    wrong.write_text(MODEL.read_text().replace(line, instead, 1))
    settings = config(custom_module_map=str(wrong))
    (problem,) = check_model(checkpoint, settings).errors
    assert problem.code == ErrorCode.PLUGIN
    with pytest.raises(PluginLoadError) as refused:
        LLM(checkpoint, settings)
    for message in (problem.message, str(refused.value)):
        assert message.startswith(
            "model.layers.0.self_attn.attend (Int8Attention): its cache spec "
        )
        assert fault in message


def test_it_uses_public_names_only() -> None:
    check_imports(MODEL)
