"""The engine in a process of its own: the same tokens and text as in this one, and what happens
when somebody leaves, is slow, asks too much, or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from golden_fixtures import GOLDEN, golden_prompts
from slow_llama import SETTINGS as SLOW
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine_core import (
    LLM,
    AsyncEngine,
    CompletionOutput,
    EngineConfig,
    RequestOutput,
    SamplingParams,
)
from engine_core.engine import RequestStream, process, replica
from engine_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    EngineDeadError,
    ErrorCode,
    PluginLoadError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    TokenizerError,
    WeightsMismatchError,
)
from engine_core.runtime.compiles import NOBODY
from engine_core.steps import EngineStats, TokenUpdates

MODEL = str(GOLDEN / "llama-gqa")
PROMPTS = golden_prompts("llama-gqa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
IDS_ONLY = EngineConfig(skip_tokenizer_init=True)
CAPTURES = Path(__file__).parents[1] / "idle_captures.py"

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutines, all on one event loop: an engine belongs to the loop that started it."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer whose vocabulary the golden model's covers."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4], trainer)
    assert backend.get_vocab_size() <= 320
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": '
        '"{% for m in messages %}{{ m.role }}: {{ m.content }}{{ sign }}\\n{% endfor %}"}'
    )
    return folder


@pytest.fixture(scope="module")
def text_config(tokenizer_folder: Path) -> EngineConfig:
    return EngineConfig(tokenizer=str(tokenizer_folder), max_num_seqs=8)


@pytest.fixture(scope="module")
def llm(text_config: EngineConfig) -> Iterator[LLM]:
    # What memory is free differs between this start and the other.
    with LLM(MODEL, text_config.replace(kv_cache_memory="64MiB")) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(run: Run, text_config: EngineConfig) -> Iterator[AsyncEngine]:
    yield from started(run, text_config.replace(kv_cache_memory="64MiB"))


@pytest.fixture(scope="module")
def slow_engine(run: Run, text_config: EngineConfig) -> Iterator[AsyncEngine]:
    """One in which a ``LONG`` request is still running when a test looks at it."""
    yield from started(run, text_config.replace(**SLOW))


def started(run: Run, config: EngineConfig) -> Iterator[AsyncEngine]:
    engine = run(AsyncEngine.start(MODEL, config, max_queued_requests=2))
    yield engine
    assert engine.dead is None
    run(settled(engine))
    run(engine.close())


async def settled(engine: AsyncEngine) -> None:
    """Wait until nothing runs or waits and no block is held."""
    await until(lambda: engine.stats()[:3] == (0, 0, 0.0))


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come about"
        await asyncio.sleep(0.002)


class Whole:
    """All deltas of a stream together, for each completion."""

    def __init__(self, outputs: list[RequestOutput], n: int = 1) -> None:
        self.outputs = outputs
        self.texts = [""] * n
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.logprobs: list[list[Any]] = [[] for _ in range(n)]
        self.reasons: list[Any] = [None] * n
        self.sums: list[float | None] = [None] * n
        self.prompt_logprobs: list[Any] = []
        for output in outputs:
            self.prompt_logprobs += output.prompt_logprobs or []
            for item in output.outputs:
                self.texts[item.index] += item.text
                self.tokens[item.index] += item.token_ids
                self.logprobs[item.index] += item.logprobs or []
                self.reasons[item.index] = (item.finish_reason, item.stop_reason)
                self.sums[item.index] = item.cumulative_logprob

    def check_same(self, output: RequestOutput) -> None:
        """As much as one output of an engine in this process says."""
        assert [o.finished for o in self.outputs] == [False] * (len(self.outputs) - 1) + [True]
        for index, completion in enumerate(output.outputs):
            assert self.tokens[index] == completion.token_ids
            assert self.texts[index] == completion.text
            assert self.logprobs[index] == (completion.logprobs or [])
            assert self.sums[index] == completion.cumulative_logprob
            assert self.reasons[index] == (completion.finish_reason, completion.stop_reason)
        assert self.prompt_logprobs == (output.prompt_logprobs or [])
        assert self.outputs[-1].prompt == output.prompt
        assert self.outputs[-1].prompt_token_ids == output.prompt_token_ids


async def read(stream: RequestStream, n: int = 1) -> Whole:
    return Whole([output async for output in stream], n)


async def read_into(outputs: list[RequestOutput], stream: RequestStream) -> None:
    async for output in stream:
        outputs.append(output)  # noqa: PERF401 - a comprehension keeps nothing when it fails


async def generate(engine: AsyncEngine, prompt: Any, params: SamplingParams, **more: Any) -> Whole:
    return await read(await engine.add_request(prompt, params, **more), params.n)


def test_prompts_at_once_give_the_tokens_of_the_original_code(
    run: Run, engine: AsyncEngine
) -> None:
    async def all_at_once() -> list[Whole]:
        return await asyncio.gather(*(generate(engine, p.input_ids, GREEDY) for p in PROMPTS))

    for whole, prompt in zip(run(all_at_once()), PROMPTS, strict=True):
        assert whole.tokens == [prompt.new_tokens]
        assert whole.reasons == [("length", None)]
        last = whole.outputs[-1].metrics
        assert last.arrival_time < last.first_token_time < last.finished_time
    assert run(generate(engine, PROMPTS[2].input_ids, GREEDY)).tokens == [PROMPTS[2].new_tokens]


VARIANTS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 5},
    "three": {"seed": 5, "n": 3},
    "logprobs": {"seed": 1, "logprobs": 3, "n": 2},
    "prompt logprobs": {"seed": 1, "prompt_logprobs": 2, "n": 2},
    "special": {"seed": 2, "skip_special_tokens": False, "ignore_eos": False},
    "stop token": {"temperature": 0.0, "stop_token_ids": (PROMPTS[2].new_tokens[9],)},
    "kept stop token": {
        "temperature": 0.0,
        "stop_token_ids": (PROMPTS[2].new_tokens[9],),
        "include_stop_str_in_output": True,
    },
    "bad words": {"seed": 5, "bad_words": ("a", "e")},
}


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_it_gives_what_an_engine_in_this_process_gives(
    run: Run, engine: AsyncEngine, llm: LLM, values: dict[str, Any]
) -> None:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **values})
    for prompt in (PROMPTS[2].input_ids, "the quick brown fox"):
        (expected,) = llm.generate(prompt, params)
        assert expected.outputs[0].text
        run(generate(engine, prompt, params)).check_same(expected)


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_ends_text_and_tokens_where_it_does_in_this_process(
    run: Run, slow_engine: AsyncEngine, llm: LLM, keep: bool
) -> None:
    params = SamplingParams(seed=8, max_tokens=60, ignore_eos=True)
    (free,) = llm.generate("the lazy dog", params)
    text = free.outputs[0].text
    # Across tokens, and early enough that what the other process generates goes far beyond it.
    stop = text[len(text) // 3 : len(text) // 3 + 3]
    params = params.replace(stop=(stop, "never"), include_stop_str_in_output=keep, max_tokens=1900)
    (expected,) = llm.generate("the lazy dog", params)
    assert expected.outputs[0].finish_reason == "stop"
    assert expected.outputs[0].text == text[: text.index(stop) + (len(stop) if keep else 0)]
    before = slow_engine.stats()
    run(generate(slow_engine, "the lazy dog", params)).check_same(expected)
    run(settled(slow_engine))
    # It was told to end, and that is no abort.
    assert slow_engine.stats().generated_tokens - before.generated_tokens < 1900
    assert slow_engine.stats().aborted == before.aborted


@pytest.mark.parametrize(
    ("token", "stop", "count", "text"),
    [
        ("x", "xx", 5, ""),
        ("x", "xxxxx", 5, ""),
        ("x", "x" * 6, 5, "xxxxx"),
        # The first byte of a character of four: what it is shows when nothing more comes.
        ("ð", "\ufffd", 1, ""),
    ],
    ids=["early", "last", "never", "at the end"],
)
def test_a_stop_string_that_the_last_allowed_token_completes_is_why_it_stopped(
    run: Run, engine: AsyncEngine, llm: LLM, token: str, stop: str, count: int, text: str
) -> None:
    assert llm.tokenizer is not None
    only = llm.tokenizer.token_to_id(token)
    assert only is not None
    params = SamplingParams(allowed_token_ids=(only,), stop=(stop,), max_tokens=count)
    reason = ("length", None) if text else ("stop", stop)
    (output,) = llm.generate("the", params)
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == reason
    assert completion.text == text
    whole = run(generate(engine, "the", params))
    assert (whole.reasons, whole.texts) == ([reason], [text])
    kept = run(generate(engine, "the", params.replace(include_stop_str_in_output=True)))
    assert (kept.reasons, kept.texts) == ([reason], [text or stop])
    run(settled(engine))


def test_requests_without_a_seed_draw_the_seeds_that_they_would_draw_in_this_process(
    run: Run, text_config: EngineConfig
) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, n=2)

    async def fresh() -> list[Whole]:
        engine = await AsyncEngine.start(MODEL, text_config)
        try:
            return [await generate(engine, PROMPTS[i].input_ids, params) for i in (1, 2)]
        finally:
            await engine.close()

    with LLM(MODEL, text_config) as llm:
        expected = llm.generate([PROMPTS[i].input_ids for i in (1, 2)], params)
    for whole, output in zip(run(fresh()), expected, strict=True):
        whole.check_same(output)


def test_long_texts_and_chats_become_the_same_prompts(
    run: Run, engine: AsyncEngine, llm: LLM
) -> None:
    text = "over the lazy dog " * 300
    assert engine.tokenize(text) == llm.engine.tokenize(text)
    params = GREEDY.replace(max_tokens=2)
    (expected,) = llm.generate(text, params)
    run(generate(engine, text, params)).check_same(expected)
    messages = [{"role": "user", "content": "hi"}]
    ids = engine.frontend.render_chat(messages, template_kwargs={"sign": "!"})
    assert ids == engine.tokenize("user: hi!\n")[1]
    assert engine.tokenizer is not None
    assert engine.default_sampling_params() == llm.default_sampling_params()
    assert engine.max_model_len == llm.engine.max_model_len
    assert engine.eos_token_ids == llm.engine.eos_token_ids
    assert engine.cache_plan == llm.engine.cache_plan
    assert engine.startup["weights"] > 0


def test_an_error_has_its_code_here_too(run: Run, engine: AsyncEngine) -> None:
    params = GREEDY.replace(allowed_token_ids=(7,), stop_token_ids=(7,), min_tokens=1)

    async def last() -> CompletionOutput:
        stream = await engine.add_request(PROMPTS[1].input_ids, params)
        return [output async for output in stream][-1].outputs[0]

    completion = run(last())
    assert (completion.finish_reason, completion.error_code) == ("error", ErrorCode.NO_TOKEN)
    assert "leave no token to choose" in str(completion.error)


def test_what_a_slow_reader_leaves_lies_in_one_output(
    run: Run, engine: AsyncEngine, llm: LLM
) -> None:
    params = GREEDY.replace(max_tokens=200, logprobs=1)

    async def slow() -> tuple[int, Whole]:
        stream = await engine.add_request(PROMPTS[2].input_ids, params)
        first = await anext(stream)
        await settled(engine)
        rest = [output async for output in stream]
        return len(rest), Whole([first, *rest])

    count, whole = run(slow())
    assert count == 1
    (expected,) = llm.generate(PROMPTS[2].input_ids, params)
    whole.check_same(expected)


async def by_abort(stream: RequestStream, reader: asyncio.Task[Whole]) -> None:
    await stream.abort()
    whole = await reader
    assert whole.reasons == [("abort", None)]
    assert whole.outputs[-1].finished
    assert 0 < len(whole.tokens[0]) < 1900
    await stream.abort()


async def by_closing(stream: RequestStream, reader: asyncio.Task[Whole]) -> None:
    reader.cancel()
    await asyncio.wait([reader])
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def by_cancellation(stream: RequestStream, reader: asyncio.Task[Whole]) -> None:
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled()


LEAVING = {"abort": by_abort, "aclose": by_closing, "cancellation": by_cancellation}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING.keys())
def test_who_leaves_gives_the_blocks_back_and_disturbs_nobody(
    run: Run, slow_engine: AsyncEngine, leave: Callable[..., Awaitable[None]]
) -> None:
    async def scene() -> None:
        before = slow_engine.stats()
        stream = await slow_engine.add_request(PROMPTS[3].input_ids, LONG)
        reader = asyncio.create_task(read(stream))
        await until(lambda: slow_engine.stats().generated_tokens > before.generated_tokens + 2)
        await asyncio.sleep(0)
        other = asyncio.create_task(generate(slow_engine, PROMPTS[2].input_ids, GREEDY))
        await leave(stream, reader)
        assert (await other).tokens == [PROMPTS[2].new_tokens]
        await settled(slow_engine)
        after = slow_engine.stats()
        assert after.aborted == before.aborted + 1
        assert after.generated_tokens < before.generated_tokens + 1900

    run(scene())


def test_streams_that_are_dropped_or_left_by_their_block_are_aborted(
    run: Run, slow_engine: AsyncEngine
) -> None:
    async def scene() -> None:
        before = slow_engine.stats().aborted
        async with await slow_engine.add_request(PROMPTS[3].input_ids, LONG) as stream:
            async for _ in stream:
                break
        await settled(slow_engine)
        stream = await slow_engine.add_request(PROMPTS[3].input_ids, LONG)
        await anext(stream)
        del stream
        gc.collect()
        await settled(slow_engine)
        assert slow_engine.stats().aborted == before + 2

    run(scene())


def test_a_request_id_may_be_used_again_at_once_after_an_abort(
    run: Run, slow_engine: AsyncEngine
) -> None:
    async def scene() -> None:
        for _ in range(3):
            stream = await slow_engine.add_request(PROMPTS[3].input_ids, LONG, request_id="mine")
            assert stream.request_id == "mine"
            with pytest.raises(RequestError, match="already a request 'mine'"):
                await slow_engine.add_request(PROMPTS[3].input_ids, LONG, request_id="mine")
            for _ in range(3):
                await anext(stream)
            await stream.abort()
            # What is on its way for the first one is not taken for the second one's.
            again = await generate(slow_engine, PROMPTS[2].input_ids, GREEDY, request_id="mine")
            assert again.tokens == [PROMPTS[2].new_tokens]

    run(scene())


def test_a_request_ends_at_its_time_limit(run: Run, slow_engine: AsyncEngine) -> None:
    async def scene() -> None:
        stream = await slow_engine.add_request(PROMPTS[3].input_ids, LONG, timeout=0.05)
        outputs: list[RequestOutput] = []
        with pytest.raises(RequestTimeoutError, match=r"after 0\.05 s"):
            await read_into(outputs, stream)
        assert not any(output.finished for output in outputs)
        late = await slow_engine.add_request(PROMPTS[3].input_ids, LONG, timeout=0.0)
        with pytest.raises(RequestTimeoutError, match="after 0 s"):
            await read(late)
        await settled(slow_engine)
        in_time = await generate(slow_engine, PROMPTS[2].input_ids, GREEDY, timeout=60.0)
        assert in_time.tokens == [PROMPTS[2].new_tokens]

    run(scene())


def test_a_full_queue_refuses_and_takes_again_when_there_is_room(
    run: Run, slow_engine: AsyncEngine
) -> None:
    async def scene() -> None:
        # Eight rows and two places, all at once: nothing of it has come back when the last is sent.
        streams = [await slow_engine.add_request(PROMPTS[3].input_ids, LONG) for _ in range(10)]
        for n in (1, 3):
            with pytest.raises(QueueFullError, match=f"lets 2 wait: no place for {n} more"):
                await slow_engine.add_request(PROMPTS[3].input_ids, LONG.replace(n=n))
        await until(lambda: slow_engine.stats().waiting == 2)
        with pytest.raises(QueueFullError, match="2 sequences wait already"):
            await slow_engine.add_request(PROMPTS[3].input_ids, LONG)
        for stream in streams[:9]:
            await stream.abort()
        await until(lambda: slow_engine.stats().running == 1)
        taken = await generate(slow_engine, PROMPTS[2].input_ids, GREEDY)
        assert taken.tokens == [PROMPTS[2].new_tokens]
        await streams[9].abort()

    run(scene())


def test_what_can_never_be_queued_is_not_to_come_again(run: Run, slow_engine: AsyncEngine) -> None:
    async def scene() -> None:
        await settled(slow_engine)
        # Eight rows and two places.
        for prompts, n in (([PROMPTS[2].input_ids], 11), ([PROMPTS[2].input_ids] * 6, 2)):
            with pytest.raises(RequestError, match=r"1[12] sequences .* at once"):
                await slow_engine.add_requests(prompts, GREEDY.replace(n=n))
        streams = await slow_engine.add_requests([PROMPTS[2].input_ids] * 5, GREEDY.replace(n=2))
        wholes = await asyncio.gather(*(read(stream, 2) for stream in streams))
        assert [whole.tokens for whole in wholes] == [[PROMPTS[2].new_tokens] * 2] * 5

    run(scene())


def test_several_prompts_are_queued_together_or_not_at_all(
    run: Run, slow_engine: AsyncEngine
) -> None:
    good, bad = PROMPTS[2].input_ids, [1] * 2048

    async def scene() -> None:
        await settled(slow_engine)
        before = slow_engine.stats()
        with pytest.raises(RequestError, match="leaves no room"):
            await slow_engine.add_requests([good, bad], GREEDY)
        with pytest.raises(RequestError, match="two requests are called 'one'"):
            await slow_engine.add_requests([good, good], GREEDY, request_ids=["one", "one"])
        with pytest.raises(RequestError, match="request_ids has 1 entries for 2 prompts"):
            await slow_engine.add_requests([good, good], GREEDY, request_ids=["one"])
        streams = await slow_engine.add_requests([good] * 9, LONG)
        with pytest.raises(QueueFullError, match="lets 2 wait: no place for 2 more; send the"):
            await slow_engine.add_requests([good] * 2, GREEDY)
        for stream in streams:
            await stream.abort()
        await until(lambda: slow_engine.stats().aborted == before.aborted + 9)
        assert slow_engine.stats().added == before.added + 9
        one, two = await slow_engine.add_requests([good, good], GREEDY, request_ids=["one", "two"])
        assert (one.request_id, two.request_id) == ("one", "two")
        for whole in await asyncio.gather(read(one), read(two)):
            assert whole.tokens == [PROMPTS[2].new_tokens]

    run(scene())


def test_a_time_limit_counts_from_the_arrival(run: Run, slow_engine: AsyncEngine) -> None:
    async def scene() -> None:
        arrived = time.monotonic() - 1000
        (stream,) = await slow_engine.add_requests(
            [PROMPTS[3].input_ids], LONG, timeout=1000.5, arrival_time=arrived
        )
        with pytest.raises(RequestTimeoutError, match=r"after 1000\.5 s, its limit"):
            await read(stream)
        await settled(slow_engine)

    run(scene())


REFUSED = {
    "empty": ([], {}, "prompt is empty"),
    "too long": ([1] * 2048, {}, "leaves no room"),
    "outside": ([1, 320], {}, "token 320 at position 1"),
    "no prompt": (7, {}, "text or a list of token ids"),
    "stop token": ([1], {"stop_token_ids": (320,)}, "stop_token_ids"),
    "logprobs": ([1], {"logprobs": 321}, "logprobs 321"),
    "logits processor": ([1], {"logits_processors": (lambda ids, x: x,)}, "logits_processors"),
}


MISUSED = {
    "priority": ({"priority": "high"}, "priority must be an integer, got 'high'"),
    "timeout": (
        {"timeout": float("nan")},
        "timeout must be a number of seconds, 0 or more, or None; got nan",
    ),
    "timeout as text": (
        {"timeout": "1"},
        "timeout must be a number of seconds, 0 or more, or None; got '1'",
    ),
    "request id": ({"request_id": 7}, "request_id must be a string or None, got 7"),
}
MISUSED_LISTS = {
    "prompts": ({"prompts": "ab"}, "prompts must be a list, one per request; got 'ab'"),
    "no prompts": ({"prompts": 5}, "prompts must be a list, one per request; got 5"),
    "request ids": ({"request_ids": "a"}, "request_ids must be a list, one per request; got 'a'"),
    "arrival time": (
        {"arrival_time": "now"},
        "arrival_time must be seconds of time.monotonic or None; got 'now'",
    ),
}


@pytest.mark.parametrize(("values", "message"), MISUSED.values(), ids=MISUSED.keys())
def test_arguments_that_mean_nothing_are_refused(
    run: Run, engine: AsyncEngine, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        run(engine.add_request([1, 2], GREEDY, **values))


@pytest.mark.parametrize(("values", "message"), MISUSED_LISTS.values(), ids=MISUSED_LISTS.keys())
def test_lists_that_are_none_are_refused(
    run: Run, engine: AsyncEngine, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        run(engine.add_requests(**{"prompts": [[1, 2]], "sampling_params": GREEDY, **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": 5}, "got 5"),
        ({"config": {}}, "config must be an EngineConfig, got {}"),
        ({"max_queued_requests": "x"}, "max_queued_requests must be a number .*; got 'x'"),
        ({"step_timeout": "x"}, "step_timeout must be a positive number .*; got 'x'"),
        ({"max_step_time": 0}, "max_step_time must be a positive number .*; got 0"),
    ],
)
def test_what_no_engine_can_be_made_of_is_refused(
    run: Run, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(AsyncEngine.start(**{"model": MODEL, **values}))


def test_parameters_of_another_type_are_refused(run: Run, engine: AsyncEngine) -> None:
    for given in ({"max_tokens": 3}, 5, [GREEDY]):
        with pytest.raises(RequestError, match="must be a SamplingParams"):
            run(engine.add_request([1, 2], given))


@pytest.mark.parametrize(("prompt", "values", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_served_is_refused_before_it_is_sent(
    run: Run, engine: AsyncEngine, prompt: Any, values: dict[str, Any], message: str
) -> None:
    added = engine.stats().added
    with pytest.raises(RequestError, match=message):
        run(engine.add_request(prompt, SamplingParams(**values)))
    assert run(generate(engine, PROMPTS[2].input_ids, GREEDY)).tokens == [PROMPTS[2].new_tokens]
    assert engine.stats().added == added + 1


def test_new_requests_are_served_while_a_long_one_runs(run: Run, slow_engine: AsyncEngine) -> None:
    async def scene() -> None:
        stream = await slow_engine.add_request(PROMPTS[3].input_ids, LONG)
        await anext(stream)
        for _ in range(3):
            short = await generate(slow_engine, PROMPTS[2].input_ids, GREEDY)
            assert short.tokens == [PROMPTS[2].new_tokens]
        assert slow_engine.stats().running == 1
        await stream.abort()

    run(scene())


def test_an_idle_engine_takes_no_time(run: Run, engine: AsyncEngine) -> None:
    def ticks() -> int:
        fields = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    run(settled(engine))
    before = ticks()
    time.sleep(0.5)
    # A loop that spins would take all of it.
    assert ticks() - before < 0.25 * os.sysconf("SC_CLK_TCK")


class Captures:
    """Records the captures of an engine with ``idle_captures`` and lets it continue."""

    config = IDS_ONLY.replace(custom_module_map=(str(CAPTURES),))

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def journal(self) -> list[str]:
        file = self.folder / "journal"
        return file.read_text().splitlines() if file.exists() else []

    def open(self) -> None:
        """Let captures go on."""
        (self.folder / "open").touch()

    def fail(self, number: int) -> None:
        """Let this capture fail."""
        (self.folder / "fails").write_text(str(number))


ALL_CAPTURES = [f"{what} {number}" for number in range(4) for what in ("begin", "end")]


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Captures:
    monkeypatch.setenv("ENGINE_CORE_TEST_CAPTURES", str(tmp_path))
    return Captures(tmp_path)


def test_an_idle_engine_captures_and_a_request_waits_for_one_at_most(
    run: Run, captures: Captures, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, captures.config)
        await until(lambda: captures.journal == ["begin 0"])
        stream = await engine.add_request(PROMPTS[2].input_ids, GREEDY)
        captures.open()
        assert (await read(stream)).tokens == [PROMPTS[2].new_tokens]
        # What the process logs comes while it is idle, too.
        await until(lambda: "captured 4 more CUDA graphs while idle" in caplog.text)
        steps = captures.journal.count("step")
        assert steps >= 1
        assert captures.journal == ALL_CAPTURES[:2] + ["step"] * steps + ALL_CAPTURES[2:]
        await engine.close()

    with caplog.at_level(logging.INFO, "engine_core"):
        run(scene())


def test_closing_waits_for_one_capture_at_most(run: Run, captures: Captures) -> None:
    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, captures.config)
        await until(lambda: captures.journal == ["begin 0"])
        closing = asyncio.create_task(engine.close())
        # Before the socket is closed a thread ends the processes beside the engine.
        await asyncio.sleep(0.5)
        captures.open()
        await closing
        assert captures.journal == ["begin 0", "end 0"]

    run(scene())


def test_a_failing_capture_says_why_the_engine_ended(run: Run, captures: Captures) -> None:
    async def scene() -> None:
        captures.fail(2)
        captures.open()
        engine = await AsyncEngine.start(MODEL, captures.config)
        error = await engine.wait_dead()
        assert str(error) == (
            "the engine stopped while a step was captured: RuntimeError: an illegal memory access "
            "was encountered"
        )
        assert "_capture_next" in str(error.__cause__)
        with pytest.raises(EngineDeadError, match="while a step was captured"):
            await engine.add_request(PROMPTS[2].input_ids, GREEDY)
        await engine.close()

    run(scene())


class FakeCore:
    """Counts down its steps and captures.

    Attributes:
        events: what was done, in order.
        captures: that are still to be made.
        stats_size: bytes of what it tells after a command.
    """

    def __init__(self, captures: int, stats_size: int = 0) -> None:
        self.events: list[str] = []
        self.captures = captures
        self.stats_size = stats_size
        self.num_steps = 0
        self.num_in_flight = 0
        self.trace = None
        self.is_preparing = False
        # What it says each time that it is asked, and then that there is no time.
        self.spare: list[float] = []
        self._steps_left = 0

    @property
    def spare_seconds(self) -> float:
        return self.spare.pop(0) if self.spare else 0.0

    @property
    def has_unfinished(self) -> bool:
        return self._steps_left > 0

    def add(self, steps: int) -> None:
        self._steps_left = steps

    def abort(self, request_id: str) -> None:
        self.events.append(f"abort {request_id}")

    def step(self) -> TokenUpdates:
        self.events.append("step")
        self._steps_left -= 1
        self.num_steps += 1
        return TokenUpdates([])

    def stats(self) -> EngineStats:
        return EngineStats(running=cast(Any, bytes(self.stats_size)))

    def capture_next(self, *, part: bool = False) -> bool:
        assert part, "a request is looked for in the middle"
        if self.captures == 0:
            return False
        self.captures -= 1
        self.events.append("capture")
        return True

    def time_steps(self, seconds: float) -> Iterator[None]:
        try:
            for number in range(1, 4):
                self.events.append(f"timed {number} of {seconds}")
                yield
        finally:
            self.events.append("left")


class ScriptedLinks(process._Links):
    """Before each look something comes, or nothing; in the end the other side is gone.

    Attributes:
        waits: how long each look might take.
    """

    def __init__(self, arrivals: list[bytes], *, drains_after: int = 0) -> None:
        """The other side reads before each look but the first ``drains_after``."""
        ours, self._other = socket.socketpair()
        super().__init__(ours, None)
        self._ours = ours
        self._other.setblocking(False)
        self._arrivals = arrivals
        self._drains_after = drains_after
        self.waits: list[float | None] = []

    def receive(self, wait: float | None) -> list[Any]:
        if not self._arrivals:
            raise EOFError
        self.waits.append(wait)
        data = self._arrivals.pop(0)
        if wait is None and not data:
            raise EOFError  # It would wait for ever.
        if data:
            self._other.send(data)
        if len(self.waits) > self._drains_after:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._other.recv(1 << 20)
        return super().receive(wait)

    def close(self) -> None:
        self._ours.close()
        self._other.close()


ABORT = process.encode(("abort", ["a"]))
NOTHING = b""
IDLE = process._IDLE_SECONDS


def run_core(channel: ScriptedLinks, core: FakeCore, seconds: float = 0.0) -> None:
    leisure = process._Leisure(cast(Any, core), NOBODY, seconds)
    with contextlib.closing(channel), pytest.raises(EOFError):
        process._run(channel, cast(Any, core), leisure)


def test_an_idle_core_captures_all_there_is_and_then_waits_without_end() -> None:
    core = FakeCore(captures=2)
    channel = ScriptedLinks([NOTHING, NOTHING, NOTHING, ABORT, NOTHING, ABORT])
    run_core(channel, core)
    # Once nobody has wanted anything for a while, one capture follows the other.
    assert channel.waits == [IDLE, 0.0, 0.0, None, IDLE, None]
    assert core.events == ["capture", "capture", "abort a", "abort a"]


def test_a_core_captures_when_it_has_been_idle_for_a_while_after_a_request() -> None:
    core = FakeCore(captures=2)
    channel = ScriptedLinks([process.encode(("add", [2])), NOTHING, NOTHING, ABORT, NOTHING])
    run_core(channel, core)
    assert channel.waits == [IDLE, 0.0, IDLE, 0.0, IDLE]
    assert core.events == ["step", "step", "capture", "abort a", "capture"]


def test_steps_are_timed_once_all_are_captured_and_anew_if_something_came_between() -> None:
    core = FakeCore(captures=1)
    channel = ScriptedLinks([NOTHING, NOTHING, NOTHING, ABORT, *[NOTHING] * 4, ABORT, NOTHING])
    run_core(channel, core, 2.0)
    assert channel.waits == [IDLE, 0.0, 0.0, 0.0, IDLE, 0.0, 0.0, 0.0, None, IDLE]
    timed = ["timed 1 of 2.0", "timed 2 of 2.0", "timed 3 of 2.0"]
    # What was begun is over before the command is obeyed; what has come to its end is not repeated.
    assert core.events == ["capture", *timed[:2], "left", "abort a", *timed, "left", "abort a"]


def test_what_comes_while_the_device_is_busy_is_heard_before_the_next_step() -> None:
    core = FakeCore(captures=0)
    channel = ScriptedLinks([process.encode(("add", [1])), NOTHING, ABORT, NOTHING, NOTHING])
    core.spare = [0.0042, 0.0031, 0.0011, 0.0009]
    run_core(channel, core)
    busy = process._SPARE_SECONDS
    assert channel.waits == [IDLE, busy, busy, busy, IDLE]
    assert core.events == ["abort a", "step"]


@pytest.mark.parametrize("size", [3, len(ABORT) - 1], ids=["header", "content"])
def test_nothing_is_captured_between_the_pieces_of_a_command(size: int) -> None:
    core = FakeCore(captures=1)
    channel = ScriptedLinks([ABORT[:size], ABORT[size:], NOTHING])
    run_core(channel, core)
    assert channel.waits == [IDLE, None, IDLE]
    assert core.events == ["abort a", "capture"]


def test_nothing_is_captured_before_the_other_side_has_everything() -> None:
    core = FakeCore(captures=1, stats_size=16 << 20)
    held = ScriptedLinks([ABORT, NOTHING, NOTHING], drains_after=3)
    run_core(held, core)
    assert core.events == ["abort a"]
    core = FakeCore(captures=1, stats_size=16 << 20)
    read = ScriptedLinks([ABORT, *[NOTHING] * 200])
    run_core(read, core)
    assert read.waits[-1] is None
    assert core.events == ["abort a", "capture"]


def test_the_prefix_cache_serves_later_requests_and_is_counted(
    run: Run, engine: AsyncEngine
) -> None:
    async def scene() -> None:
        prompt = [*range(40, 80)]
        before = engine.stats()
        first = await generate(engine, prompt, GREEDY)
        second = await generate(engine, prompt, GREEDY)
        after = engine.stats()
        assert first.tokens == second.tokens
        assert second.outputs[-1].metrics.num_cached_tokens == 32
        assert after.prefix_cache_queries - before.prefix_cache_queries == 80
        assert after.prefix_cache_hits - before.prefix_cache_hits == 32
        assert after.prompt_tokens - before.prompt_tokens == 80
        assert after.generated_tokens - before.generated_tokens == 32

    run(scene())


def test_draining_lets_what_runs_end_and_takes_nothing_new(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """And what the engine process logs is logged here."""

    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, IDS_ONLY.replace(kv_cache_memory="200KB"))
        assert "max_model_len is cut from 2048" in caplog.text
        running = asyncio.create_task(generate(engine, PROMPTS[2].input_ids, GREEDY))
        await until(lambda: engine.stats().added == 1)
        draining = asyncio.create_task(engine.drain(None))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.add_request(PROMPTS[2].input_ids, GREEDY)
        await draining
        assert (await running).tokens == [PROMPTS[2].new_tokens]
        await engine.close()
        await engine.close()
        assert engine.dead is None

    run(scene())


def test_a_drain_that_takes_too_long_aborts_and_the_urgent_overtake(run: Run) -> None:
    """Here, and in an engine in this process."""
    config = IDS_ONLY.replace(max_num_seqs=1)
    slow = config.replace(**SLOW)
    order: list[int] = []

    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, slow)

        async def one(priority: int) -> None:
            await generate(engine, PROMPTS[2].input_ids, GREEDY, priority=priority)
            order.append(priority)

        running = await engine.add_request(PROMPTS[3].input_ids, LONG)
        await anext(running)
        tasks = [asyncio.create_task(one(priority)) for priority in (5, 0, 7, -3)]
        await until(lambda: engine.stats().waiting + engine.stats().running == 5)
        await running.abort()
        await asyncio.gather(*tasks)

        stream = await engine.add_request(PROMPTS[3].input_ids, LONG)
        await anext(stream)
        await engine.drain(0.01)
        assert (await read(stream)).reasons == [("abort", None)]
        await settled(engine)
        await engine.close()

    run(scene())
    assert order == [-3, 0, 5, 7]
    with LLM(MODEL, config) as llm:
        outputs = llm.generate([PROMPTS[2].input_ids] * 4, GREEDY, priority=[5, 0, 7, -3])
        times = [output.metrics.finished_time for output in outputs]
        assert sorted(range(4), key=times.__getitem__) == [3, 1, 0, 2]
        with pytest.raises(RequestError, match="2 prompts, but 1 priorities"):
            llm.generate([PROMPTS[2].input_ids] * 2, GREEDY, priority=[5])


def test_a_killed_process_ends_every_stream_with_the_signal(run: Run) -> None:
    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, IDS_ONLY.replace(**SLOW))
        watching = asyncio.create_task(engine.wait_dead())
        streams = [await engine.add_request(PROMPTS[3].input_ids, LONG) for _ in range(3)]
        readers = [asyncio.create_task(read(stream)) for stream in streams[:2]]
        got = [await anext(streams[2])]
        os.kill(engine.pid, signal.SIGKILL)
        errors = await asyncio.gather(*readers, return_exceptions=True)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await read_into(got, streams[2])
        # What came before the end is not lost.
        tokens = Whole(got).tokens[0]
        assert tokens[:16] == PROMPTS[3].new_tokens[: len(tokens)]
        assert all(isinstance(e, EngineDeadError) and "SIGKILL" in str(e) for e in errors)
        assert str(await watching) == str(engine.dead)
        with pytest.raises(EngineDeadError, match=f"pid {engine.pid}.*SIGKILL"):
            await engine.add_request(PROMPTS[3].input_ids, LONG)
        await engine.close()

    run(scene())


BREAKING = """
import threading
import time
from engine_core_llama.config import LlamaConfigBuilder
from engine_core_llama.model import LlamaForCausalLM

class StrikeError(RuntimeError):
    pass

class MyModel(LlamaForCausalLM):
    def forward(self, input_ids, *args, **kwargs):
        if (input_ids == 319).any():
            # Python waits for it before a process ends.
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise StrikeError("the tensor cores are on strike")
        time.sleep(0.02)  # so that another request is still running when it comes to that
        return super().forward(input_ids, *args, **kwargs)

class MyBuilder(LlamaConfigBuilder):
    @classmethod
    def condition(cls, hf_config):
        return hf_config.get("architectures") == ["MyModel"]

MODULE_MAP = {"MyModel": "MyModel"}
CONFIG_BUILDERS = [MyBuilder]
"""


def test_a_failing_step_ends_every_stream_with_the_traceback(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module map travels, too. The process would not end by itself."""
    monkeypatch.setattr(replica, "_STOP_SECONDS", 0.5)
    file = tmp_path / "my_family.py"
    file.write_text(BREAKING)
    config = IDS_ONLY.replace(
        custom_module_map=(str(file),), hf_overrides={"architectures": ["MyModel"]}
    )

    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, config)
        assert (await generate(engine, PROMPTS[2].input_ids, GREEDY)).tokens == [
            PROMPTS[2].new_tokens
        ]
        stream = await engine.add_request(PROMPTS[3].input_ids, LONG)
        await anext(stream)
        striking = await engine.add_request([1, 319], GREEDY)
        for one in (stream, striking):
            with pytest.raises(
                EngineDeadError, match="StrikeError: the tensor cores are on strike"
            ) as caught:
                await read(one)
            assert "my_family.py" in str(caught.value.__cause__)
            assert 'raise StrikeError("the tensor cores' in str(caught.value.__cause__)
        assert str(await engine.wait_dead()) == str(caught.value)
        await engine.close()
        file.write_text("MODULE_MAP = {")
        with pytest.raises(PluginLoadError, match="my_family"):
            await AsyncEngine.start(MODEL, config)

    run(scene())


FAULTS: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "no model": ("./no-such-folder", {}, CheckpointNotFoundError, "no-such-folder"),
    "weights": (
        MODEL,
        {"hf_overrides": {"num_hidden_layers": 4}},
        WeightsMismatchError,
        r"missing: model\.layers\.3\.",
    ),
    "length": (MODEL, {"max_model_len": 4096}, ConfigError, "4096 is above the 2048"),
    "tokenizer": (MODEL, {"skip_tokenizer_init": False}, TokenizerError, "tokenizer"),
}


@pytest.mark.parametrize(
    ("model", "values", "kind", "message"),
    [
        pytest.param(*fault, id=name, marks=[pytest.mark.long] if name == "length" else [])
        for name, fault in FAULTS.items()
    ],
)
def test_what_cannot_start_says_why_as_in_this_process(
    run: Run, model: str, values: dict[str, Any], kind: type[Exception], message: str
) -> None:
    config = IDS_ONLY.replace(**values)
    with pytest.raises(kind, match=message) as caught:
        run(AsyncEngine.start(model, config))
    with pytest.raises(kind) as expected:
        LLM(model, config)
    assert type(caught.value) is type(expected.value)
    assert str(caught.value) == str(expected.value)
    assert getattr(caught.value, "missing", None) == getattr(expected.value, "missing", None)


SCRIPT = """
import asyncio, sys
from engine_core import AsyncEngine, EngineConfig, SamplingParams

async def main():
    engine = await AsyncEngine.start({model!r}, EngineConfig(skip_tokenizer_init=True))
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    stream = await engine.add_request([1, 2, 3], params)
    await anext(stream)
    print(engine.pid, "torch" in sys.modules, flush=True)
    if sys.argv[1] == "wait":
        async for _ in stream:
            pass
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("forgetful", marks=pytest.mark.long)])
def test_the_process_ends_with_its_parent(tmp_path: Path, end: str) -> None:
    """Also when the parent is killed, or ends without a word. And the parent needs no torch."""
    script = tmp_path / "serve.py"
    script.write_text(textwrap.dedent(SCRIPT.format(model=MODEL)))
    mode = "wait" if end == "killed" else "leave"
    with subprocess.Popen(
        [sys.executable, str(script), mode], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, torch_is_there = parent.stdout.readline().split()
        assert torch_is_there == "False"
        if end == "killed":
            assert Path(f"/proc/{pid}").exists()
            parent.kill()
        parent.wait()
    limit = time.monotonic() + 60
    while is_alive(int(pid)):
        assert time.monotonic() < limit, "it lives on"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_ranks_run_below_the_engine_process(run: Run) -> None:
    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, IDS_ONLY.replace(tensor_parallel_size=2))
        ranks = children(engine.pid)
        assert len(ranks) >= 2
        whole = await generate(engine, PROMPTS[2].input_ids, GREEDY)
        assert whole.tokens == [PROMPTS[2].new_tokens]
        stream = await engine.add_request(PROMPTS[3].input_ids, LONG)
        await anext(stream)
        # One hangs, and the other waits for it: neither reads that the process above is gone.
        os.kill(ranks[-1], signal.SIGSTOP)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await read(stream)
        await until(lambda: not any(is_alive(rank) for rank in ranks))
        await engine.close()

    run(scene())


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
