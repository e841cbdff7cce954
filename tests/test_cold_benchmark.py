"""The benchmark of an engine's cold start runs, on a CPU with a tiny model, and sees what fails."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import forkserver
import pytest

from benchmarks.cold import LONGEST, Request, Seen, drawn, send
from engine_core import SamplingParams

ROOT = Path(__file__).parents[1]


def test_requests_of_all_kinds_end_as_they_are_to() -> None:
    command = [sys.executable, "benchmarks/cold.py", "qwen2_0_5b", "--tiny", "--layers", "1"]
    command += ["--seconds", "2"]
    done = forkserver.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| 0 ")]
    assert [int(cell) for cell in rows[0][1:2]] == [40]
    assert int(rows[0][2]) > 0
    assert " done" in lines[-1]


def test_draws_have_every_kind_and_as_many_bad_ones() -> None:
    draw = random.Random(0)
    requests = [drawn(draw, 100) for _ in range(2000)]
    bad = [request for request in requests if request.bad]
    assert 60 < len(bad) < 140
    for request in requests:
        fits = 0 < len(request.prompt) < LONGEST and max(request.prompt) < 100
        assert fits is not request.bad
    assert {request.params.n for request in requests} == {1, 3}
    assert {request.params.logprobs for request in requests} == {None, 3}


class Outputs:
    """An engine, and the stream of each of its requests: one output with so many tokens."""

    def __init__(self, tokens: list[int]) -> None:
        completion = type("Completion", (), {"index": 0, "token_ids": tokens})
        self.outputs = [type("Output", (), {"outputs": [completion]})]

    async def add_request(self, prompt: list[int], params: SamplingParams) -> Outputs:
        return self

    async def __aenter__(self) -> Outputs:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> Any:
        for output in self.outputs:
            yield output


@pytest.mark.parametrize(
    ("tokens", "bad", "why"),
    [
        ([1, 2, 3], False, None),
        ([1, 2], False, "2} tokens, not"),
        ([1, 2, 100], False, "no token"),
        ([1, 2, 3], True, "not refused"),
    ],
)
def test_what_is_not_as_asked_is_a_failure(tokens: list[int], bad: bool, why: str | None) -> None:
    seen, engine = Seen(), Outputs(tokens)
    request = Request([1], SamplingParams(max_tokens=3), bad, leaves=False)
    asyncio.run(send(engine, request, 100, 0.0, seen))  # type: ignore[arg-type]
    assert [why in each for each in seen.failures if why] == ([] if why is None else [True])
    assert seen.ends["done"] == (why is None)
