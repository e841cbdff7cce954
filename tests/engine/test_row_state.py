"""Row and token state of an input processor, from the prompt to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_fixtures import check_output, golden_llm, golden_prompts, greedy_params

from engine_core import LLM
from engine_core.errors import RequestError
from engine_core.inputs import ProcessedPrompt
from engine_core_chatglm.inputs import BidirectionalContextProcessor

NAME = "chatglm1-tiny"


def add_row_state(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Sequence[int], dict[str, Any]], None]
) -> None:
    """Have the family's processor change what it keeps, which it does not declare."""
    process = BidirectionalContextProcessor.process

    def changed(self: BidirectionalContextProcessor, token_ids: Sequence[int]) -> ProcessedPrompt:
        processed = process(self, token_ids)
        state = dict(processed.row_state)
        change(token_ids, state)
        return replace(processed, row_state=state)

    monkeypatch.setattr(BidirectionalContextProcessor, "process", changed)
    monkeypatch.setattr(BidirectionalContextProcessor, "prompt_state", None)


def check_all(llm: LLM) -> None:
    """Requests that are admitted together give what the original code gives."""
    prompts = golden_prompts(NAME)
    outputs = llm.generate([prompt.input_ids for prompt in prompts], greedy_params(NAME))
    for output, expected in zip(outputs, prompts, strict=True):
        check_output(output, expected)


DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.float64]


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        pytest.param(dtype, (place + other) % 2, marks=[pytest.mark.long] * other)
        for other in (0, 1)
        for place, dtype in enumerate(DTYPES)
    ],
)
def test_numbers_of_every_kind(dtype: type, dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(token_ids: Sequence[int], state: dict[str, Any]) -> None:
        state["unused"] = np.full([3] * dims, len(token_ids), dtype=dtype)

    add_row_state(monkeypatch, change)
    with golden_llm(NAME) as llm:
        check_all(llm)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (1, float("nan"), "int64 of shape () as in every request: Cannot cast"),
        (1, 0.5, "int64 of shape () as in every request: Cannot cast"),
        (
            np.int8(1),
            300,
            "int8 of shape () as in every request: it does not fit int8",
        ),
        (
            [1, 2],
            [1, 2, 3],
            "int64 of shape (2,) as in every request: operands could not",
        ),
        (1, "one", "int64 of shape () as in every request: <U3 are no numbers"),
        (
            1,
            2**70,
            "int64 of shape () as in every request: object are no numbers",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_the_first_request_is_refused_and_the_others_go_on(
    first: Any, second: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([first, second])

    def change(token_ids: Sequence[int], state: dict[str, Any]) -> None:
        state["mark"] = next(given, first)

    add_row_state(monkeypatch, change)
    prompt = golden_prompts(NAME)[0]
    with golden_llm(NAME) as llm:
        (output,) = llm.generate(prompt.input_ids, greedy_params(NAME))
        check_output(output, prompt)
        with pytest.raises(RequestError) as refused:
            llm.generate(prompt.input_ids, greedy_params(NAME))
        assert "row state 'mark'" in str(refused.value)
        assert message in str(refused.value)
        check_all(llm)
