"""Requests that come while most kernels of a start are still to be compiled, without a GPU.

A stand-in says which kernels are there, and captures steps as a GPU does: a replay runs the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from golden_fixtures import golden_llm, golden_prompts
from replaying import Replaying

from engine_core import LLM, SamplingParams
from engine_core.engine import engine
from engine_core.engine.timings import Timings
from engine_core.runtime.compiles import QUICK, Compiles
from engine_core.runtime.step_batch import GraphKey

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


class Coming(Compiles):
    """Quick steps have their kernels, and others when a test says so; to wait for one is wrong."""

    capturer = Replaying
    under_way = True

    def __init__(self) -> None:
        self.compiled: set[Any] = {QUICK}

    def ready(self, step: Any, seconds: float = 0.0) -> bool:
        del seconds
        quick = isinstance(step, GraphKey) and bool(step.quick)
        return quick or step in self.compiled or not self.under_way

    def wait(self, step: Any) -> None:
        assert self.ready(step), f"a request waits for {step}"


@contextmanager
def started(
    monkeypatch: pytest.MonkeyPatch, name: str, **settings: Any
) -> Iterator[tuple[LLM, Coming]]:
    coming = Coming()
    monkeypatch.setattr(engine, "compile_beside", lambda opened, begun: coming)
    with golden_llm(name, **settings) as llm:
        yield llm, coming


def ways(llm: LLM) -> dict[str, int]:
    return Timings(llm.engine.core.stats().timings).steps()


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-swa"])
def test_requests_start_with_quick_kernels_and_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Several prompts, chunks of them beside rows that decode, and one alone; nobody waits."""
    golden = golden_prompts(name)
    with started(monkeypatch, name, max_num_seqs=20, max_num_batched_tokens=16) as (llm, coming):
        for some in (golden * 2, golden[:1]):
            outputs = llm.generate([prompt.input_ids for prompt in some], GREEDY)
            assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in some]
        before = ways(llm)
        assert before["eager"] > 0
        # What is compiled takes the place at once.
        coming.under_way = False
        outputs = llm.generate([prompt.input_ids for prompt in golden], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [p.new_tokens for p in golden]
        after = ways(llm)
        assert (after["eager"], after["graph"] > before["graph"]) == (before["eager"], True)
