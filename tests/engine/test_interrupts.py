"""Ctrl-C while an engine of this process works: it ends the call, and nothing else."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from golden_fixtures import GOLDEN, golden_prompts

from engine_core import LLM, SamplingParams
from engine_core.errors import EngineDeadError
from engine_core.runtime.worker import Worker

PROMPTS = golden_prompts("llama-gqa")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(str(GOLDEN / "llama-gqa"), skip_tokenizer_init=True) as llm:
        yield llm


def at_token(count: int, act: Callable[[], object]) -> SamplingParams:
    """Parameters with which ``act`` is called once, within the step of token ``count``."""
    called: list[int] = []

    def processor(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == count and not called:
            called.append(count)
            act()
        return logits

    return GREEDY.replace(logits_processors=(processor,))


def test_an_interrupted_call_leaves_the_engine_and_the_others_as_they_were(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[2].input_ids, GREEDY)
    next(stream)
    for count in (1, 4, 5):
        with pytest.raises(KeyboardInterrupt):
            llm.generate(
                [PROMPTS[1].input_ids, PROMPTS[3].input_ids],
                at_token(count, lambda: signal.raise_signal(signal.SIGINT)),
            )
    (output,) = llm.generate(PROMPTS[3].input_ids, GREEDY)
    assert list(output.outputs[0].token_ids) == PROMPTS[3].new_tokens
    *_, last = stream
    assert list(last.outputs[0].token_ids) == PROMPTS[2].new_tokens
    assert not llm.engine.has_unfinished


def test_a_second_interrupt_does_not_wait_and_stops_the_engine(llm: LLM) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[3].input_ids, at_token(4, twice))
    with pytest.raises(EngineDeadError, match="a step was interrupted by KeyboardInterrupt"):
        llm.generate(PROMPTS[3].input_ids, GREEDY)


def let_captures(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], object]) -> list[int]:
    """Have the device capture a step for each of ``acts``, which is called within it.

    Returns:
        The numbers of those that are done.
    """
    done: list[int] = []

    def capture_next(self: Worker, *, part: bool = False) -> bool:
        del self, part
        if len(done) == len(acts):
            return False
        acts[len(done)]()
        done.append(len(done))
        return True

    monkeypatch.setattr(Worker, "capture_next", capture_next)
    return done


def test_an_interrupted_warmup_ends_between_captures_and_may_be_taken_up_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = let_captures(
        monkeypatch, lambda: None, lambda: signal.raise_signal(signal.SIGINT), lambda: None
    )
    with pytest.raises(KeyboardInterrupt):
        llm.warmup()
    assert done == [0, 1]
    (output,) = llm.generate(PROMPTS[3].input_ids, GREEDY)
    assert list(output.outputs[0].token_ids) == PROMPTS[3].new_tokens
    assert done == [0, 1]
    llm.warmup()
    assert done == [0, 1, 2]


def test_a_second_interrupt_of_a_warmup_stops_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    let_captures(monkeypatch, twice)
    with pytest.raises(KeyboardInterrupt):
        llm.warmup()
    with pytest.raises(EngineDeadError, match="a capture was interrupted by KeyboardInterrupt"):
        llm.warmup()
