"""Random requests whose answers are known before a server or an engine is put under load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core import LLM, EngineConfig, SamplingParams

VOCABULARY = 320


@dataclass(frozen=True)
class Job:
    """A request and what an engine that has nothing else to do answers.

    Attributes:
        prompt: token ids.
        sampling: fields that ``SamplingParams`` and a body of ``/v1/completions`` both know.
        priority: lower runs first.
        answers: the tokens of each of its completions.
    """

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    priority: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def body(self) -> dict[str, Any]:
        """The body of a completions request that returns tokens."""
        return {
            "model": "tiny",
            "prompt": list(self.prompt),
            "priority": self.priority,
            "return_token_ids": True,
            **self.sampling,
        }


def _sampling(draw: random.Random, longest_answer: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_tokens": draw.randint(1, longest_answer),
        "seed": draw.randrange(2**31),
        "ignore_eos": draw.random() < 0.7,
        "temperature": draw.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
        "n": draw.choice((1, 1, 1, 2, 3)),
    }
    if sampling["temperature"]:
        limits = ({}, {"top_k": draw.randint(1, 50)}, {"top_p": 0.9}, {"min_p": 0.1})
        sampling |= draw.choice(limits)
    if draw.random() < 0.3:
        sampling |= draw.choice(
            (
                {"repetition_penalty": 1.2},
                {"presence_penalty": 0.5, "frequency_penalty": 0.5},
                {"logit_bias": {str(draw.randrange(3, VOCABULARY)): 5.0}},
                {"stop_token_ids": draw.sample(range(3, VOCABULARY), 8)},
            )
        )
    return sampling


def known_jobs(
    model: Path, count: int, seed: int, longest_prompt: int = 200, longest_answer: int = 40
) -> list[Job]:
    """``count`` jobs for a tiny model; some share the beginnings of their prompts.

    The answers come of an engine that runs one at a time, without prefix caching, in a cache where
    everything has room: what other requests, full caches and lost clients may not change.
    """
    draw = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, VOCABULARY) for _ in range(length))

    beginnings = [tokens(draw.randint(20, longest_prompt // 2)) for _ in range(4)]
    given = []
    for _ in range(count):
        beginning = draw.choice(beginnings) if draw.random() < 0.5 else ()
        prompt = beginning + tokens(draw.randint(1, longest_prompt // 2))
        given.append((prompt, _sampling(draw, longest_answer), draw.choice((0, 0, 0, 1, 5))))
    config = EngineConfig(max_num_seqs=1, enable_prefix_caching=False, max_model_len=512)
    jobs = []
    with LLM(str(model), config) as llm:
        for prompt, sampling, priority in given:
            (output,) = llm.generate([list(prompt)], SamplingParams(**sampling))
            answers = tuple(tuple(completion.token_ids) for completion in output.outputs)
            jobs.append(Job(prompt, sampling, priority, answers))
    return jobs


def answered(choices: Sequence[dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """The tokens of a whole answer's choices, in order."""
    ordered = sorted(choices, key=lambda choice: choice["index"])
    return tuple(tuple(choice["token_ids"]) for choice in ordered)
