"""Several replicas of one model behind an ``AsyncEngine``."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from concurrent.futures import Future
from typing import Any

import psutil
import pytest
from golden_fixtures import GOLDEN, golden_prompts
from replicas import tokens_of, until
from slow_llama import SETTINGS as SLOW

from engine_core import AsyncEngine, EngineConfig, SamplingParams
from engine_core.engine import RequestStream, async_engine, replica
from engine_core.engine.autoscale import ScaleRule, follow_queue
from engine_core.errors import ConfigError, EngineDeadError, OptionError, QueueFullError

MODEL = str(GOLDEN / "llama-gqa")
PROMPTS = golden_prompts("llama-gqa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
CONFIG = EngineConfig(
    device="cpu", skip_tokenizer_init=True, max_num_seqs=2, kv_cache_memory=8 * 2**20, **SLOW
)


def refuse_once(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let the system refuse the next process; the event is set when it has."""
    refused, open_ = asyncio.Event(), replica.ProcessReplica.open

    async def open_late(*values: Any) -> replica.ProcessReplica:
        if not refused.is_set():
            refused.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await open_(*values)

    monkeypatch.setattr(replica.ProcessReplica, "open", open_late)
    return refused


@pytest.mark.slow
def test_tokens_limits_death_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_FIRST_DELAY", 0.05)
    monkeypatch.setattr(replica, "_LAST_WORDS_SECONDS", 1.0)
    see_it_end = replica.ProcessReplica._see_it_end

    async def see_it_end_late(self: replica.ProcessReplica) -> None:
        await asyncio.sleep(0.5)
        await see_it_end(self)

    monkeypatch.setattr(replica.ProcessReplica, "_see_it_end", see_it_end_late)

    async def begin(engine: AsyncEngine, *, params: SamplingParams = LONG) -> RequestStream:
        return await engine.add_request(PROMPTS[3].input_ids, params)

    def requests(engine: AsyncEngine) -> list[int]:
        return [status.stats.running + status.stats.waiting for status in engine.replicas]

    async def scene() -> None:
        engine = await AsyncEngine.start(
            MODEL, CONFIG, replicas=2, max_queued_requests=1, max_restarts=2
        )
        assert [status.phase for status in engine.replicas] == ["ready"] * 2
        assert engine.num_rows == 4
        # The cores are divided, and no thread is left without one.
        cores = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        for status in engine.replicas:
            environment = psutil.Process(status.pid).environ()
            assert environment["OMP_NUM_THREADS"] == str(max(1, cores // 2))
        # Two run on each, and one may wait for either.
        streams = [await begin(engine) for _ in range(4)]
        await until(lambda: requests(engine) == [2, 2])
        streams.append(await begin(engine))
        await until(lambda: sum(requests(engine)) == 5)
        with pytest.raises(QueueFullError, match="1 sequences wait already"):
            await begin(engine)
        with pytest.raises(ConfigError, match="there are 2 replicas"):
            engine.start_trace()
        await streams.pop().aclose()
        await until(lambda: requests(engine) == [2, 2])

        # One dies: its requests end with the cause, the others have their tokens.
        victim = engine.replicas[0].pid
        assert victim is not None
        refused = refuse_once(monkeypatch)
        os.kill(victim, signal.SIGKILL)
        # What comes before its end is understood goes to the other one.
        await until(lambda: engine.replicas[0].phase == "dead")
        assert await tokens_of(await begin(engine, params=GREEDY)) == PROMPTS[3].new_tokens[:16]
        ends = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        failed = [end for end in ends if isinstance(end, EngineDeadError)]
        whole = [end for end in ends if isinstance(end, list)]
        assert len(failed) == len(whole) == 2
        assert all("replica 0: the engine process" in str(end) for end in failed)
        assert all("SIGKILL" in str(end) for end in failed)
        assert [len(tokens) for tokens in whole] == [150] * 2
        assert all(tokens[:16] == PROMPTS[3].new_tokens[:16] for tokens in whole)
        assert engine.dead is None
        await until(lambda: engine.replicas[0].phase == "ready")
        assert engine.replicas[0].restarts == 1
        assert refused.is_set()
        assert "replica 0: it cannot be started: OSError" in str(engine.replicas[0].error)
        # Counts go on, and both work again.
        counts = engine.replicas[0].stats
        assert (counts.running, counts.generated_tokens > 0) == (0, True)
        again = [await begin(engine, params=GREEDY) for _ in range(4)]
        for tokens in await asyncio.gather(*map(tokens_of, again)):
            assert tokens == PROMPTS[3].new_tokens[:16]
        assert engine.stats().generated_tokens >= counts.generated_tokens + 150 * 2 + 16 * 4

        # A replica that is to end answers what it has, and takes no more.
        streams = [await begin(engine, params=GREEDY) for _ in range(4)]
        await until(lambda: requests(engine) == [2, 2])
        before = engine.stats().prompt_tokens
        scaling = asyncio.create_task(engine.scale(1))
        await until(lambda: engine.replicas[1].phase == "draining")
        later = await begin(engine, params=GREEDY)
        for tokens in await asyncio.gather(*map(tokens_of, [*streams, later])):
            assert tokens == PROMPTS[3].new_tokens[:16]
        await scaling
        assert [status.index for status in engine.replicas] == [0]
        assert engine.stats().prompt_tokens == before + len(PROMPTS[3].input_ids)
        await engine.scale(2)
        assert [status.phase for status in engine.replicas] == ["ready"] * 2
        with pytest.raises(ConfigError, match=r"from 1 to 2, .* got 3"):
            await engine.scale(3)

        # One that hangs is sent nothing more while it writes its stacks.
        hung = engine._members[1].replica
        assert hung is not None
        os.kill(engine._members[1].pid, signal.SIGSTOP)
        hung.give_up("it hangs")
        assert [status.phase for status in engine.replicas] == ["ready", "dead"]
        for tokens in [await tokens_of(await begin(engine, params=GREEDY)) for _ in range(2)]:
            assert tokens == PROMPTS[3].new_tokens[:16]
        await until(lambda: engine.replicas[1].phase == "ready")
        assert engine.replicas[1].error == "replica 1: it hangs"

        # The last one that lives takes the engine with it.
        monkeypatch.setattr(engine, "_max_restarts", 0)
        for status in engine.replicas:
            assert status.pid is not None
            os.kill(status.pid, signal.SIGKILL)
        assert "SIGKILL" in str(await engine.wait_dead())
        with pytest.raises(EngineDeadError, match=r"replica [01]: the engine process"):
            await begin(engine)
        await engine.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_replicas_follow_the_queue() -> None:
    async def scene() -> None:
        engine = await AsyncEngine.start(MODEL, CONFIG, max_replicas=2)
        rule = ScaleRule(least=1, most=2, rows=2, up_delay=0.1, down_delay=0.2)
        following = asyncio.create_task(follow_queue(engine, rule))

        def phases() -> list[str]:
            return [status.phase for status in engine.replicas]

        async def begin() -> RequestStream:
            return await engine.add_request(PROMPTS[3].input_ids, LONG)

        # Two run and one waits: there are rows for all.
        streams = [await begin() for _ in range(3)]
        await until(lambda: phases() == ["ready", "ready"])
        streams += [await begin() for _ in range(2)]
        # Whatever ran at the first one ends, and the other is too many.
        for stream in [*streams]:
            ticket = stream._state.ticket
            assert ticket is not None
            if ticket.replica == 0:
                streams.remove(stream)
                await stream.aclose()
        assert streams, "the second one has got some"
        for stream in streams[1:]:
            await stream.aclose()
        kept = streams[0]
        second = engine.replicas[1].pid
        await until(lambda: phases() == ["ready", "draining"])
        # It takes requests again before it has ended, and has its own still.
        more = [await begin() for _ in range(3)]
        await until(lambda: phases() == ["ready", "ready"])
        assert engine.replicas[1].pid == second
        for tokens in await asyncio.gather(*map(tokens_of, [kept, *more])):
            assert len(tokens) == 150
            assert tokens[:16] == PROMPTS[3].new_tokens[:16]
        await until(lambda: phases() == ["ready"])
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await engine.close()

    asyncio.run(scene())


def _environments(
    monkeypatch: pytest.MonkeyPatch, gpus: int, replicas: int, **settings: Any
) -> list[dict[str, str]]:
    """Those of replicas on a machine with so many GPUs."""

    class Elsewhere:
        def __init__(self, *_: Any) -> None:
            pass

        def __enter__(self) -> Elsewhere:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, *_: Any) -> Future[int]:
            future: Future[int] = Future()
            future.set_result(gpus)
            return future

    monkeypatch.setattr(replica, "ProcessPoolExecutor", Elsewhere)
    return asyncio.run(replica.environments(EngineConfig(**settings), replicas))


def test_each_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = [each["CUDA_VISIBLE_DEVICES"] for each in _environments(monkeypatch, 4, 3)]
    assert names == ["0", "1", "2"]
    pairs = _environments(monkeypatch, 4, 2, device="cuda", tensor_parallel_size=2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in pairs] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-ab,7")
    names = [each["CUDA_VISIBLE_DEVICES"] for each in _environments(monkeypatch, 3, 2)]
    assert names == ["5", "GPU-ab"]


@pytest.mark.parametrize(
    ("given", "threads"), [("6", 3), (" 6,2", 3), ("1", 1), ("0", 4), ("-2", 4), ("many", 4)]
)
def test_threads_are_divided_as_openmp_would_take_them(
    monkeypatch: pytest.MonkeyPatch, given: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(replica.own_process, "count_cores", lambda: 8)
    each = _environments(monkeypatch, 0, 2, device="cpu")
    assert [one["OMP_NUM_THREADS"] for one in each] == [str(threads)] * 2


@pytest.mark.parametrize(
    ("gpus", "replicas", "settings", "message"),
    [
        (2, 3, {}, "replicas is 3.* they take 3 GPUs, but torch sees 2; .* at most 2 replicas"),
        (
            3,
            2,
            {"tensor_parallel_size": 2},
            "they take 4 .* torch sees 3; leave replicas out",
        ),
        (0, 2, {"device": "cuda"}, "torch sees 0"),
        (4, 2, {"device": "cuda:1"}, "device is 'cuda:1'; leave it out"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    replicas: int,
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(OptionError, match=message):
        _environments(monkeypatch, gpus, replicas, **settings)
