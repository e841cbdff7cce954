"""Errors as programs read them: their codes, and the fields at fault."""

from __future__ import annotations

import pickle

import pytest

from engine_core.configs import SamplingParams
from engine_core.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    ErrorCode,
    OptionError,
    QueueFullError,
    RequestError,
    WeightsMismatchError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("no"), ErrorCode.ENGINE),
        (OptionError("no"), ErrorCode.OPTION),
        (WeightsMismatchError("no", missing=("a",)), CheckpointError.code),
        (QueueFullError("no", param="n"), ErrorCode.QUEUE_FULL),
        (RequestError("no", param="n", code=ErrorCode.CHAT_TEMPLATE), ErrorCode.CHAT_TEMPLATE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_has_a_code_which_survives_being_sent(error: EngineError, code: ErrorCode) -> None:
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), sent.code) == (type(error), "no", code)
    assert vars(sent) == vars(error)


def test_a_config_error_names_the_fields_at_fault() -> None:
    with pytest.raises(ConfigError) as refused:
        SamplingParams(top_p=2, max_tokens=0)
    error = pickle.loads(pickle.dumps(refused.value))
    assert {fault.field for fault in error.faults} == {"top_p", "max_tokens"}
    assert "SamplingParams.top_p: " in str(error)
    assert "--top_p: " in error.named(lambda place: f"--{place}")
    with pytest.raises(ConfigError) as refused:
        SamplingParams(min_tokens=5, max_tokens=3)
    (fault,) = refused.value.faults
    assert (fault.place, fault.field) == ("", "min_tokens")
    assert refused.value.named(str) == fault.message == "min_tokens (5) is above max_tokens (3)"
