"""The golden fixtures on a GPU, in float32: the same tokens, logits within 1e-4."""

import asyncio
import gc
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from golden_fixtures import (
    GOLDEN,
    SETTINGS,
    check_generation,
    check_prefix_cache,
    golden_llm,
    golden_prompts,
)

from engine_core import LLM, AsyncEngine, EngineConfig, SamplingParams
from engine_core.errors import EngineDeadError
from engine_core.runtime import graphs
from engine_core.runtime.step_batch import Choice, GraphKey
from engine_core.steps import StepPlan
from engine_core_chatglm.inputs import BidirectionalContextProcessor

pytestmark = pytest.mark.gpu

FIXTURES = [
    "llama-bias-linear",
    "llama-dynamic",
    "llama-gqa",
    "llama-tied-llama3",
    "llama-yarn",
    "qwen2-gqa",
    "qwen2-swa",
    "qwen2-tied-nowindow",
    "qwen3-tiny",
    "bloom-6heads",
    "bloom-postln",
    "bloom-pow2",
]


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("settings", ["default", "blocks-of-7", "chunks-of-8"])
def test_tokens_and_logits_are_those_of_the_original_code(name: str, settings: str) -> None:
    check_generation(name, {**SETTINGS[settings], "device": "cuda"})


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-swa"])
def test_a_second_run_from_the_prefix_cache_is_the_same(name: str) -> None:
    check_prefix_cache(name, device="cuda")


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", FIXTURES)
def test_plain_greedy_decoding_gives_the_tokens(name: str, eager: bool) -> None:
    """Without logprobs, tokens are chosen inside the captured step and fetched late."""
    prompts = golden_prompts(name)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with golden_llm(name, device="cuda", eager=eager, block_size=4, max_num_seqs=20) as llm:
        outputs = llm.generate([p.input_ids for p in prompts] * 3, params)
    for output, prompt in zip(outputs, prompts * 3, strict=True):
        assert output.outputs[0].token_ids == prompt.new_tokens


def test_more_rows_than_choose_at_once_give_the_same_tokens() -> None:
    """Where nothing is captured greedy rows choose by logits, few of them at a time."""
    prompts = (golden_prompts("llama-gqa") * 70)[:70]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with golden_llm("llama-gqa", device="cuda", eager=True, max_num_seqs=100) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]


def test_graphs_change_nothing_of_random_sampling() -> None:
    prompt = golden_prompts("llama-gqa")[2]
    params = SamplingParams(seed=3, max_tokens=30, n=5, repetition_penalty=1.2, top_p=0.9)
    tokens = []
    for eager in (False, True):
        with golden_llm("llama-gqa", device="cuda", eager=eager) as llm:
            (output,) = llm.generate(prompt.input_ids, params)
            tokens.append([completion.token_ids for completion in output.outputs])
    assert tokens[0] == tokens[1]


def every_kind() -> list[SamplingParams]:
    """Parameters of every kind that a captured step follows by itself, and plainly greedy ones."""
    base = SamplingParams(max_tokens=40, ignore_eos=True, seed=11)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_k": 40},
        {"top_p": 0.9},
        {"temperature": 1.7, "min_p": 0.05},
        {"temperature": 1.3, "top_k": 100, "top_p": 0.8, "min_p": 0.01},
        {"top_k": 1},
        {"temperature": 5.0, "top_p": 0.99},
        {"repetition_penalty": 1.4, "top_k": 50},
        {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"logit_bias": {5: 4.0, 6: -100.0}, "top_p": 0.95},
        {"allowed_token_ids": range(100, 180), "frequency_penalty": 1.0},
        {"min_tokens": 30, "stop_token_ids": range(0, 300, 3), "ignore_eos": False},
    ]
    return [base.replace(seed=index, **given) for index, given in enumerate(settings)]


def hosted() -> list[SamplingParams]:
    """Parameters that a captured step cannot follow."""
    base = SamplingParams(max_tokens=40, ignore_eos=True, top_p=0.9)
    return [
        base.replace(seed=50, logprobs=2),
        base.replace(seed=51, bad_words=[[token] for token in range(40)], presence_penalty=0.5),
    ]


def sampled(params: list[SamplingParams], **settings: Any) -> list[list[int]]:
    """A completion for each of ``params``, all in one batch."""
    prompts = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
    settings = {"device": "cuda", "max_num_seqs": 20, **settings}
    with golden_llm("llama-gqa", **settings) as llm:
        outputs = llm.generate(
            [prompts[index % len(prompts)] for index in range(len(params))], params
        )
        llm.engine.scheduler.check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("company", ["none", "hosted"])
def test_graphs_and_batches_change_nothing_of_any_sampling(company: str) -> None:
    """Rows that are hosted have the sampler run outside of the graph, for all of the batch."""
    params = every_kind() + (hosted() if company == "hosted" else [])
    expected = sampled(params, eager=True)
    assert sampled(params) == expected
    alone = sampled(params, max_num_seqs=1)
    assert alone == expected


def test_sampling_on_a_gpu_is_that_of_a_cpu() -> None:
    """In float32; logits that differ by rounding turn few of the random choices."""
    params = every_kind()
    prompts = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
    prompts = [prompts[index % len(prompts)] for index in range(len(params))]
    tokens = []
    for device in ("cpu", "cuda"):
        with golden_llm("llama-gqa", device=device, max_num_seqs=20) as llm:
            outputs = llm.generate(prompts, params)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert sum(cpu != gpu for cpu, gpu in zip(*tokens, strict=True)) <= 2


@pytest.mark.parametrize("kinds", ["random", "adjusted"])
def test_random_steps_are_repeated_without_the_host(kinds: str) -> None:
    """As often as a plan may ask for it, with ends in the middle of a plan."""
    params = every_kind()[:8] if kinds == "random" else every_kind()
    params = [p.replace(max_tokens=23 + 3 * index) for index, p in enumerate(params)]
    params = [p.replace(min_tokens=0, stop_token_ids=()) for p in params]
    expected = sampled(params, eager=True)
    prompts = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
    with golden_llm("llama-gqa", device="cuda", max_num_seqs=20) as llm:
        scheduler = llm.engine.scheduler
        plans: list[int] = []
        schedule = scheduler.schedule

        def note() -> StepPlan | None:
            scheduler.repeat_limit = scheduler.config.max_repeat
            plan = schedule()
            if plan is not None:
                plans.append(plan.repeat)
            return plan

        scheduler.schedule = note  # type: ignore[method-assign]
        outputs = llm.generate([prompts[i % len(prompts)] for i in range(len(params))], params)
        scheduler.check()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert max(plans) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_of_a_plan_are_written_to_the_host_once(temperature: float) -> None:
    """However often it is repeated, and the one before was: nothing is between two replays."""
    prompt = golden_prompts("llama-gqa")[0].input_ids
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=33, ignore_eos=True)
    settings = {"max_num_seqs": 4, "enable_prefix_caching": False}
    expected = sampled([params], eager=True)
    with golden_llm("llama-gqa", device="cuda", **settings) as llm:
        llm.warmup()
        llm.generate(prompt, params)
        scheduler = llm.engine.scheduler
        plans: list[int] = []
        schedule = scheduler.schedule

        def note() -> StepPlan | None:
            # The second plan, and with it the places of the turns of all that follow.
            scheduler.repeat_limit = 3 if len(plans) < 2 else scheduler.config.max_repeat
            plan = schedule()
            if plan is not None:
                plans.append(plan.repeat)
            return plan

        scheduler.schedule = note  # type: ignore[method-assign]
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            (output,) = llm.generate([prompt], params)
    assert [output.outputs[0].token_ids] == expected
    names = [event.name for event in profile.events()]
    copies = sum("Memcpy DtoH" in name for name in names)
    written = sum("add<unsigned char>" in name for name in names)
    assert plans[:3] == [1, 3, 8]
    # A random first token is chosen by the logits of its prompt; it and its status are copied.
    assert copies == (2 if temperature else 0)
    assert written == len(plans) - (1 if temperature else 0)


def test_random_requests_leave_the_greedy_graphs_as_they_were() -> None:
    # While kernels are compiled beside it, no step of adjusted choice is captured.
    settings = {"device": "cuda", "max_num_seqs": 20, "compile_processes": 0}
    with golden_llm("llama-gqa", **settings) as llm:
        decode, _ = captured(llm)
        before = dict(decode)
        assert {key.choice for key in before} == {Choice.GREEDY}
        llm.generate([golden_prompts("llama-gqa")[0].input_ids] * 13, every_kind())
        assert {key: decode[key] for key in before} == before
        assert {key.choice for key in decode} == {Choice.GREEDY, Choice.ADJUSTED}


def test_steps_that_sample_nothing_are_not_run_ahead_of() -> None:
    """Chunks of a prompt share pinned buffers; a busy device must not see the next one's numbers.

    With 8 tokens a step a prompt of 88 takes more steps than there are buffers.
    """
    prompt = next(p.input_ids for p in golden_prompts("llama-gqa") if len(p.input_ids) >= 88)
    random = SamplingParams(temperature=1.0, top_k=1, seed=1, max_tokens=8, ignore_eos=True)
    settings = {"max_num_batched_tokens": 8, "enable_prefix_caching": False}
    with golden_llm("llama-gqa", device="cuda", **settings) as llm:
        # Captures and compiles, which wait for the device.
        llm.generate([prompt], random)
        (expected,) = llm.generate([prompt], random.replace(temperature=0.0))
        torch.cuda._sleep(2_000_000_000)
        (output,) = llm.generate([prompt], random)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


CHOOSING = """
import triton
from golden_fixtures import golden_llm, golden_prompts
from engine_core import SamplingParams

compiled = []
prompt = golden_prompts("llama-gqa")[0].input_ids
base = SamplingParams(max_tokens=6, ignore_eos=True)
ways = [{}, {"temperature": 0.0}, {"presence_penalty": 1.0}, {"logit_bias": {5: 4.0}}]
ways += [{"presence_penalty": 1.0, "logit_bias": {5: 4.0}}]
ways += [{"min_tokens": 3, "stop_token_ids": (9,)}]
params = [base.replace(**way, **more) for more in ({}, {"bad_words": ((5, 6),)}) for way in ways]
with golden_llm("llama-gqa", device="cuda", dtype="bfloat16", max_num_seqs=20) as llm:
    llm.warmup()
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    for way in reversed(params):
        llm.generate([prompt], way)
    llm.generate([prompt] * len(params), params)
print(compiled)
"""


def test_after_a_warmup_no_way_of_choosing_tokens_compiles_a_kernel() -> None:
    """In a process of its own, which no other test has brought kernels to."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", CHOOSING],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.stdout == "[]\n", done.stderr


def test_stopping_late_loses_and_adds_nothing() -> None:
    """The end is found out after more steps were submitted."""
    prompts = golden_prompts("llama-gqa")
    with golden_llm("llama-gqa", device="cuda", max_num_seqs=4) as llm:
        for _ in range(2):
            stops = [prompt.new_tokens[index % 7] for index, prompt in enumerate(prompts)]
            params = [
                SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop_token_ids=(s,))
                for s in stops
            ]
            outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
            for output, prompt, stop in zip(outputs, prompts, stops, strict=True):
                end = prompt.new_tokens.index(stop) + 1
                assert output.outputs[0].token_ids == prompt.new_tokens[:end]
        llm.engine.scheduler.check()


PLAIN = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
AT_START = {GraphKey(20, 20, 0), GraphKey(1, 1, 0)}
DECODE = {
    GraphKey(rows, rows, 0, choice)
    for rows in (1, 2, 4, 8, 16, 20)
    for choice in (Choice.GREEDY, Choice.RANDOM)
}
PROMPT_AT_START = {GraphKey(64, 0, 1)}
# Up to the size that holds the longest prompt, which has 160 tokens.
PROMPTS = PROMPT_AT_START | {GraphKey(tokens, 0, 1) for tokens in (128, 192)}
# And steps full of prompts, which takes more than 8 of them, without and with rows that decode.
PROMPTS |= {GraphKey(2048, 0, 32), GraphKey(2080, 32, 32)}
# And prompts of each size beside rows that decode.
PROMPTS |= {GraphKey(tokens, 32, 8) for tokens in (64, 128, 192)}


def captured(llm: LLM) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The graphs that there are by now, of decode steps and of steps with prompts."""
    runner = llm.engine.core.executor._runner
    return runner._decode_graphs._graphs, runner._graph_steps._graphs


def check_tokens(llm: LLM, name: str) -> None:
    """Each prompt alone, and all at once."""
    prompts = golden_prompts(name)
    for batch in ([prompt] for prompt in prompts), [prompts * 3]:
        for some in batch:
            outputs = llm.generate([prompt.input_ids for prompt in some], PLAIN)
            for output, prompt in zip(outputs, some, strict=True):
                assert output.outputs[0].token_ids == prompt.new_tokens, prompt.name


def test_a_start_captures_little_and_a_warmup_the_rest() -> None:
    settings = {"device": "cuda", "max_num_seqs": 20, "enable_prefix_caching": False}
    # Where kernels are compiled beside it, a start captures less.
    with golden_llm("llama-gqa", compile_processes=0, **settings) as llm:
        decode, mixed = captured(llm)
        assert (set(decode), set(mixed)) == (AT_START, PROMPT_AT_START)
        before = {**decode, **mixed}
        check_tokens(llm, "llama-gqa")
        llm.warmup()
        assert set(decode) >= DECODE
        assert set(mixed) >= PROMPTS
        every = {**decode, **mixed}
        assert {key: every[key] for key in before} == before
        llm.warmup()
        assert {**decode, **mixed} == every
        check_tokens(llm, "llama-gqa")
        assert {key: {**decode, **mixed}[key] for key in every} == every


def test_a_warmup_comes_to_the_same_before_any_request() -> None:
    with golden_llm("llama-gqa", device="cuda", max_num_seqs=20) as llm:
        llm.warmup()
        decode, mixed = captured(llm)
        assert (set(decode), {key for key in mixed if not key.quick}) == (DECODE, PROMPTS)
        check_tokens(llm, "llama-gqa")


def test_captures_between_the_steps_of_a_request_change_nothing() -> None:
    prompt = golden_prompts("llama-gqa")[2]
    with golden_llm("llama-gqa", device="cuda", max_num_seqs=20) as llm:
        tokens: list[int] = []
        for output in llm.stream(prompt.input_ids, PLAIN):
            tokens = output.outputs[0].token_ids
            llm.engine.core.capture_next()
        assert tokens == prompt.new_tokens


def test_smaller_batches_reuse_the_memory_of_the_largest() -> None:
    def reserved() -> int:
        """Bytes of graphs; cuBLAS has its workspace among all others."""
        torch.cuda.empty_cache()
        segments = torch.cuda.memory_snapshot()
        return sum(
            int(segment["total_size"])
            for segment in segments
            if tuple(segment["segment_pool_id"]) != (0, 0)
        )

    with golden_llm("llama-gqa", device="cuda", max_num_seqs=20) as llm:
        # The largest steps of both kinds, random choice among them, come before the others.
        largest = {GraphKey(size, size, 0, Choice.RANDOM) for size in (1, 20)}
        while not largest <= captured(llm)[0].keys():
            assert llm.engine.core.capture_next()
        before = reserved()
        assert before > 0
        while len(captured(llm)[0]) < len(DECODE):
            assert llm.engine.core.capture_next()
        # A segment of the allocator at most, not one a graph.
        assert reserved() - before <= 2 * 2**20


def test_an_idle_process_captures_what_a_warmup_does(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(
        device="cuda", skip_tokenizer_init=True, max_model_len=160, max_num_seqs=20
    )
    prompts = golden_prompts("llama-gqa")

    async def tokens(engine: AsyncEngine, prompt: list[int]) -> list[int]:
        out: list[int] = []
        async for output in await engine.add_request(prompt, PLAIN):
            out += output.outputs[0].token_ids
        return out

    async def scene(busy: bool) -> None:
        caplog.clear()
        engine = await AsyncEngine.start(str(GOLDEN / "llama-gqa"), config)
        if busy:
            # At once, and captures go on between and after them.
            for prompt in prompts:
                assert await tokens(engine, prompt.input_ids) == prompt.new_tokens
        for _ in range(6000):
            if "more CUDA graphs while idle" in caplog.text:
                break
            await asyncio.sleep(0.01)
        if not busy:
            count = len(DECODE) - len(AT_START) + len(PROMPTS) - len(PROMPT_AT_START)
            said = re.search(r"captured (\d+) more CUDA graphs while idle", caplog.text)
            # Where kernels are compiled beside a start it leaves two more.
            assert said is not None
            assert int(said[1]) - count in (0, 2)
        assert "more CUDA graphs while idle" in caplog.text
        every = await asyncio.gather(*(tokens(engine, prompt.input_ids) for prompt in prompts))
        assert list(every) == [prompt.new_tokens for prompt in prompts]
        await engine.close()

    with caplog.at_level(logging.INFO, "engine_core"):
        asyncio.run(scene(busy=False))
        asyncio.run(scene(busy=True))


@pytest.mark.parametrize("declared", [True, False])
def test_nothing_is_captured_before_row_state_is_known(
    declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "chatglm1-tiny"
    if not declared:
        monkeypatch.setattr(BidirectionalContextProcessor, "prompt_state", None)
    with golden_llm(name, device="cuda", max_num_seqs=20) as llm:
        llm.warmup()
        decode, mixed = captured(llm)
        if not declared:
            assert (len(decode), len(mixed)) == (0, 0)
            check_tokens(llm, name)
            llm.warmup()
        assert set(decode) >= DECODE
        assert set(mixed) >= PROMPTS
        check_tokens(llm, name)


def out_of_memory_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an allocation in the middle of each capture fail."""

    def failing(choose: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: Any, **more: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return choose(*args, **more)

        return fail

    monkeypatch.setattr(graphs, "choose_greedy", failing(graphs.choose_greedy))
    monkeypatch.setattr(graphs, "sample_tokens", failing(graphs.sample_tokens))


def out_of_memory_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each capture fail when it is complete, as when a graph cannot be made executable."""

    class Graph(torch.cuda.graph):
        def __exit__(self, *args: object) -> None:
            super().__exit__(*args)
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "graph", Graph)


@contextmanager
def collecting_often() -> Iterator[None]:
    """Have what failed captures leave behind be collected in the next one, if anything is."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200, 2, 2)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("fail", [out_of_memory_inside, out_of_memory_at_the_end])
def test_without_memory_for_graphs_the_tokens_are_the_same(
    fail: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = every_kind() + hosted()
    expected = sampled(params, eager=True)
    prompts = [prompt.input_ids for prompt in golden_prompts("llama-gqa")]
    prompts = [prompts[index % len(prompts)] for index in range(len(params))]
    settings = {"device": "cuda", "max_num_seqs": 20}
    # Where kernels are compiled beside it, a start captures less.
    with golden_llm("llama-gqa", compile_processes=0, **settings) as llm:
        decode, mixed = captured(llm)
        with monkeypatch.context() as patch, collecting_often():
            fail(patch)
            check_tokens(llm, "llama-gqa")
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            llm.warmup()
        assert "no memory to capture a decode step of up to" in caplog.text
        assert "tokens with prompts among them" in caplog.text
        assert (set(decode), set(mixed)) == (AT_START, PROMPT_AT_START)
        # There is memory again: what failed stays without a graph, the rest is served.
        llm.warmup()
        assert (set(decode), set(mixed)) == (AT_START, PROMPT_AT_START)
        check_tokens(llm, "llama-gqa")
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        llm.engine.scheduler.check()


def test_a_capture_that_fails_ahead_leaves_the_engine_alive_and_one_by_need_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = golden_prompts("llama-gqa")[2]
    choose = graphs.sample_tokens

    def fail(*args: Any, **more: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not while a stream is capturing")
        return choose(*args, **more)

    said = (
        r"\(random choice\) could not be captured as a CUDA graph: ValueError: not while a stream"
    )
    random = SamplingParams(seed=1, max_tokens=4, ignore_eos=True)
    # Kernels that are still being compiled would have another way taken instead.
    with golden_llm("llama-gqa", device="cuda", max_num_seqs=20, compile_processes=0) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "sample_tokens", fail)
            llm.warmup()
        assert re.search(said, caplog.text)
        check_tokens(llm, "llama-gqa")
        llm.generate(prompt.input_ids, random)
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "sample_tokens", fail)
            with pytest.raises(EngineDeadError, match=said + ".*eager=True"):
                llm.generate([prompt.input_ids] * 5, random)


def test_another_thread_may_use_the_device_beside_captures() -> None:
    ended = threading.Event()

    def work() -> int:
        count = 0
        while not ended.is_set():
            count += 1
            # Of another size each time, so that memory is asked of the device.
            assert torch.ones(count << 20, device="cuda").sum().item() == count << 20
            count %= 64
        return count

    with (
        golden_llm("llama-gqa", device="cuda", max_num_seqs=20) as llm,
        ThreadPoolExecutor(1) as pool,
    ):
        working = pool.submit(work)
        try:
            llm.warmup()
        finally:
            ended.set()
        working.result()
        decode, mixed = captured(llm)
        assert (set(decode), {key for key in mixed if not key.quick}) == (DECODE, PROMPTS)
        check_tokens(llm, "llama-gqa")
