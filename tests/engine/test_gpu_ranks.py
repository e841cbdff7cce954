"""Two ranks on GPUs, on one card and on two: graphs, sums through each other's memory, failures."""

from __future__ import annotations

import one_card
import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.engine.timings import Timings

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(params=[1, 2], ids=["one-card", "two-cards"])
def cards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many GPUs the two ranks have."""
    count: int = request.param
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    if count == 1:
        monkeypatch.setenv(one_card.SHARED, "1")
    return count


def two_ranks(name: str, **more: object) -> LLM:
    settings: dict[str, object] = {
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        "rank_sums": "auto",
        "device": "cuda",
        "max_model_len": 160,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": 64 << 20,
        "custom_module_map": one_card.__file__,
    }
    return LLM(str(GOLDEN / name), EngineConfig(**(settings | more)))


def check_tokens(llm: LLM, name: str) -> None:
    """All prompts at once, and the first alone."""
    golden = golden_prompts(name)
    for some in (golden, golden[:1]):
        outputs = llm.generate([prompt.input_ids for prompt in some], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in some]


def ways(llm: LLM) -> dict[str, float]:
    return Timings(llm.engine.core.stats().timings).steps()


@pytest.mark.parametrize("name", ["llama-gqa", "llama-bias-linear", "qwen2-gqa", "bloom-pow2"])
def test_captured_ranks_give_the_tokens(name: str, cards: int) -> None:
    with two_ranks(name) as llm:
        llm.warmup()
        check_tokens(llm, name)
        steps = ways(llm)
        assert steps["graph"] > 0
        assert steps["eager"] == 0
        assert len(llm.engine.core.executor.leads()) == 2


def test_eager_ranks_give_the_tokens(cards: int, caplog: pytest.LogCaptureFixture) -> None:
    with two_ranks("llama-gqa", eager=True) as llm:
        assert "tensor_parallel_size 2: a model as small as this one" in caplog.text
        check_tokens(llm, "llama-gqa")
        assert ways(llm)["graph"] == 0


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_nccl_gives_the_tokens(cards: int, eager: bool) -> None:
    if cards == 1:
        pytest.skip("NCCL takes no two ranks on one GPU")
    with two_ranks("llama-gqa", rank_sums="nccl", eager=eager) as llm:
        llm.warmup()
        check_tokens(llm, "llama-gqa")
        assert (ways(llm)["graph"] > 0) is not eager


@pytest.mark.parametrize("failing", ["0 1", "1 1", "1 4"])
def test_a_capture_that_fails_on_one_rank_leaves_the_others_going(
    failing: str, cards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collectives that the other rank has captured by then are dropped with its graph.

    The fourth is that of a random choice for one row, so a request that is sampled runs eagerly.
    """
    monkeypatch.setenv(one_card.FAILS, failing)
    sampled = SamplingParams(seed=3, max_tokens=4, ignore_eos=True)
    with two_ranks("llama-gqa") as llm:
        llm.warmup()
        for _ in range(2):
            check_tokens(llm, "llama-gqa")
            llm.generate([golden_prompts("llama-gqa")[0].input_ids], sampled)
        assert ways(llm)["graph"] > 0
        assert ways(llm)["eager"] > 0


def test_in_deterministic_mode_company_changes_no_token(cards: int) -> None:
    """In bfloat16, where fused and plain sums, one shot and two, meet different batches."""
    prompts = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
    settings = {"dtype": "bfloat16", "deterministic": True, "enable_prefix_caching": False}
    with two_ranks("llama-gqa", **settings) as llm:
        llm.warmup()
        together = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
        alone = [llm.generate([each], GREEDY)[0].outputs[0].token_ids for each in prompts]
    assert together == alone


def test_random_choices_are_those_of_one_rank(cards: int) -> None:
    """In float32, where sums of two terms round as one card's do, or nearly so."""
    prompt = golden_prompts("llama-gqa")[1].input_ids
    random = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)
    tokens = []
    for size in (1, 2):
        with two_ranks("llama-gqa", tensor_parallel_size=size) as llm:
            tokens.append(llm.generate(prompt, random)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]
