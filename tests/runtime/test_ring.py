"""The ring of messages: what is read is what was written, by every reader and in order."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections import deque

import pytest
from golden_fixtures import GOLDEN, golden_prompts
from spawned import echo

from engine_core import LLM, EngineConfig, SamplingParams
from engine_core.runtime import rank_processes
from engine_core.runtime.ring import NOTICE_BYTES, MessageRing


def packed(message: object) -> memoryview:
    return memoryview(pickle.dumps(message))


def test_readers_of_different_speed_read_all_in_order() -> None:
    generator = random.Random(0)
    ring = MessageRing(3, size=1000)
    waiting: list[deque[tuple[bytes, bytes]]] = [deque() for _ in range(3)]
    refused = 0
    for number in range(3000):
        message = generator.randbytes(generator.choice([0, 1, 30, 250, 700]))
        notice = ring.write(packed(message))
        if notice is None:
            refused += 1
        else:
            assert len(notice) == NOTICE_BYTES
            for queue in waiting:
                queue.append((notice, message))
        for reader, queue in enumerate(waiting):
            while queue and (generator.random() < 0.3 + 0.2 * reader or number == 2999):
                told, expected = queue.popleft()
                assert ring.read(told, reader) == expected
    assert 0 < refused < 2900


def test_nothing_is_written_over_that_one_reader_has_not_read() -> None:
    ring = MessageRing(2, size=100)
    first = ring.write(packed(b"a" * 60))
    assert first is not None
    assert ring.write(packed(b"b" * 60)) is None
    ring.read(first, 0)
    assert ring.write(packed(b"b" * 60)) is None
    assert ring.read(first, 1) == b"a" * 60
    second = ring.write(packed(b"b" * 60))
    assert second is not None
    assert ring.read(second, 0) == b"b" * 60
    assert ring.write(packed(b"c" * 101)) is None


def test_a_spawned_process_reads_the_same_memory() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ring = MessageRing(1, size=4096)
    process = context.Process(target=echo, args=(ring, theirs))
    process.start()
    theirs.close()  # so that a process that dies ends the wait for it
    for message in [*({"step": i, "rows": [i] * 100} for i in range(40)), None]:
        notice = ring.write(packed(message))
        assert notice is not None
        ours.send_bytes(notice)
        assert ours.recv() == message
    process.join()
    assert process.exitcode == 0


def test_what_has_no_room_goes_by_the_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admissions do not fit, decode steps do; their order is kept."""
    monkeypatch.setattr(rank_processes, "MessageRing", lambda size: MessageRing(size, size=1100))
    prompts = golden_prompts("llama-gqa")
    two = EngineConfig(skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=160)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(str(GOLDEN / "llama-gqa"), two) as llm:
        outputs = llm.generate([prompt.input_ids for prompt in prompts], params)
    assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in prompts]
