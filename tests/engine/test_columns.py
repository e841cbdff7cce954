"""Decoding rows as columns of numbers, from the scheduler to the streams: nobody can tell."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import write_tiny_model

from engine_core import EngineConfig, SamplingParams
from engine_core.configs import GuidedParams
from engine_core.engine import AsyncEngine, Engine, async_engine
from engine_core.engine.frontend import Frontend, State
from engine_core.engine.process import Decoder, _Links, encode
from engine_core.inputs import ProcessedPrompt
from engine_core.scheduler import Scheduler
from engine_core.steps import (
    EngineStats,
    NewSequence,
    PlanRows,
    RequestOutput,
    TokenColumns,
    TokenUpdate,
    TokenUpdates,
)

NEVER = 10**6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("columns") / "tiny")


def no_multiples_of_three(output: list[int], logits: Any) -> Any:
    logits[::3] = float("-inf")
    return logits


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": False, "stop": ("e", " t"), "min_tokens": 3},
    {"n": 3, "temperature": 0.9},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"stop_token_ids": tuple(range(3, 80, 8)), "min_tokens": 5},
    {"temperature": 1.0, "stop_token_ids": tuple(range(3, 80, 16)), "stop": ("qu",)},
    {"logits_processors": [no_multiples_of_three], "include_stop_str_in_output": True},
    {"guided": GuidedParams(regex="(yes|no|perhaps)+"), "ignore_eos": False},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
)


def requests(
    count: int, kinds: Sequence[dict[str, Any]], lengths: Sequence[int] = (5, 6, 17, 40)
) -> list[tuple[list[int], Any, int]]:
    draw = random.Random(count)
    return [
        (
            [draw.randrange(3, 320) for _ in range(draw.choice((1, 7, 16, 33)))],
            SamplingParams(
                **{
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "max_tokens": draw.choice(lengths),
                    "seed": index,
                    **kinds[index % len(kinds)],
                }
            ),
            draw.choice((0, 1, 2)),
        )
        for index in range(count)
    ]


def seen(output: RequestOutput) -> tuple[Any, ...]:
    completions = [
        (c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs
    ]
    return completions, output.prompt_logprobs, output.metrics.first_token_time is not None


def run(
    model: Path, given: list[tuple[list[int], Any, int]], **options: Any
) -> tuple[list[tuple[Any, ...]], int, int]:
    """Each request's output, the preemptions, and the plans with columns."""
    engine = Engine(str(model), EngineConfig(max_model_len=256, **options))
    plans = 0
    submit = engine.core.executor.submit

    def counted(plan: Any) -> Any:
        nonlocal plans
        plans += isinstance(plan.rows, PlanRows)
        return submit(plan)

    engine.core.executor.submit = counted  # type: ignore[method-assign]
    found = {}
    arriving = iter(enumerate(given))
    while len(found) < len(given) or engine.has_unfinished:
        for index, (prompt, sampling, priority) in islice(arriving, 1):
            engine.add_request(prompt, sampling, request_id=str(index), priority=priority)
        for output in engine.step():
            found[int(output.request_id)] = seen(output)
    engine.core.scheduler.check()
    preemptions = engine.core.stats().num_preemptions
    engine.close()
    return [found[index] for index in range(len(given))], preemptions, plans


@pytest.mark.parametrize(("swap_space", "least"), [(0, 1), (2**20, 3)], ids=["recompute", "swap"])
def test_columns_change_no_output(
    model: Path, swap_space: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of request, in a cache too small for them, with columns or without."""
    given = requests(2 * len(KINDS), KINDS)
    options = {"max_num_seqs": 12, "kv_cache_memory": 110 * 2**10, "swap_space": swap_space}
    outcomes = []
    for lockstep_from in (least, NEVER):
        monkeypatch.setattr(Scheduler, "lockstep_from", lockstep_from)
        found, preemptions, plans = run(model, given, **options)
        assert preemptions > 0
        assert (plans > 20) == (lockstep_from != NEVER)
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]


def test_streams_of_more_rows_than_columns_begin_with(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own the engine sends columns; some readers leave in the middle."""
    # Log-probabilities depend on who else is in the step, in their last digits.
    streamed = [k for k in KINDS if not k.keys() & {"logits_processors", "logprobs"}]
    # They are to meet, however long the busy machine takes to send them all.
    given = requests(140, streamed, lengths=(40, 60))
    options: dict[str, Any] = {"max_num_seqs": 160, "kv_cache_memory": 16 * 2**20}
    monkeypatch.setattr(Scheduler, "lockstep_from", NEVER)
    expected, _, _ = run(model, given, **options)

    async def read(engine: AsyncEngine, index: int) -> tuple[Any, ...] | None:
        prompt, sampling, priority = given[index]
        stream = await engine.add_request(prompt, sampling, priority=priority)
        whole: list[tuple[list[str], list[int], list[Any]]]
        whole = [([], [], []) for _ in range(sampling.n)]
        taken = 0
        async for output in stream:
            for c in output.outputs:
                text, tokens, end = whole[c.index]
                text.append(c.text)
                tokens.extend(c.token_ids)
                end[:] = [c.finish_reason, c.stop_reason]
            taken += 1
            if index % 10 == 9 and taken == 5:
                await stream.aclose()
                return None
        return [("".join(text), tokens, *end, None) for text, tokens, end in whole], None, True

    widest = 0

    class Counted(Frontend):
        def apply(self, updates: Any, numbers: Any = (), tokens: Any = ()) -> Iterator[State]:
            nonlocal widest
            widest = max(widest, len(numbers))
            return super().apply(updates, numbers, tokens)

    monkeypatch.setattr(async_engine, "Frontend", Counted)

    async def read_all() -> list[tuple[Any, ...] | None]:
        config = EngineConfig(max_model_len=256, **options)
        engine = await AsyncEngine.start(str(model), config)
        try:
            return await asyncio.gather(*(read(engine, index) for index in range(len(given))))
        finally:
            await engine.close()

    found = asyncio.run(read_all())
    assert found.count(None) > 5
    assert widest >= 60
    for index, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own is None or own == other, index


def test_each_frontend_gets_its_own_columns(tmp_path: Path) -> None:
    """Numbers of several frontends are the same; who is gone gets nothing."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "gate"))
    listener.listen()
    first, theirs = socket.socketpair()
    links = _Links(theirs, listener)
    links.accept()
    ends = [first]
    for _ in range(2):
        ends.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        ends[-1].connect(str(tmp_path / "gate"))
    prompt = ProcessedPrompt((1, 2))
    added: list[list[NewSequence]] = []
    for place, end in enumerate(ends):
        new = [
            NewSequence(f"{place}-{number}", prompt, SamplingParams(), 0.0, number=number)
            for number in range(3)
        ]
        end.sendall(encode(("add", new)))
        commands: list[Any] = []
        while not commands:
            commands = links.receive(0.01)
        added.append(commands[0][1])
    numbers = [one.number for one in added[2] + added[0] + added[1]]
    assert len(set(numbers)) == 9

    def columns(numbers: list[int]) -> TokenColumns:
        zeros = np.zeros(len(numbers), dtype=np.int64)
        tokens = np.arange(len(numbers)) + 100
        return TokenColumns(np.array(numbers), tokens, zeros.astype(object), zeros, zeros)

    def received(end: socket.socket) -> tuple[Any, ...]:
        *_, (others, numbers, tokens, stats) = Decoder().feed(end.recv(1 << 16))
        pairs = zip(memoryview(numbers).cast("q"), memoryview(tokens).cast("q"), strict=True)
        return list(pairs), [TokenUpdate._make(other) for other in others], stats.added

    last = added[1][2]
    end = TokenUpdate(last.sequence_id, (5,), finish_reason="stop", number=last.number)
    links.send(TokenUpdates([end], columns(numbers[:-1])), EngineStats())
    assert received(ends[2]) == ([(0, 100), (1, 101), (2, 102)], [], 3)
    assert received(ends[0]) == ([(0, 103), (1, 104), (2, 105)], [], 3)
    assert received(ends[1]) == ([(0, 106), (1, 107)], [end._replace(number=2)], 3)

    ends[1].close()
    commands = []
    while not commands:
        commands = links.receive(0.01)
    assert [(name, sorted(ids)) for name, ids in commands] == [("abort", ["1-0", "1-1"])]
    links.send(TokenUpdates([], columns(numbers)), EngineStats())
    assert received(ends[0])[0] == [(0, 103), (1, 104), (2, 105)]
    assert received(ends[2])[0] == [(0, 100), (1, 101), (2, 102)]
    for one in (*ends, listener, *(channel.end for channel in links._channels.values())):
        one.close()
