"""Hooks for schemathesis beside the OpenAPI document; loaded by its ``SCHEMATHESIS_HOOKS``."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import schemathesis
from jsonschema import Draft202012Validator
from schemathesis import Case, CheckContext, HookContext, Response

VOCABULARY = 320
# What a schema cannot say: fields that are right one by one but not together, and what only the
# model and its template know. Everything else that the schema allows must be answered.
BEYOND_SCHEMA = {"conflicting_fields", "context_length_exceeded", "invalid_request"}
# Of services whose streams do not end with a word.
LAST_EVENTS = {
    "/v1/messages": {"message_stop", "error"},
    "/v1/responses": {"response.completed", "response.incomplete", "response.failed"},
}

# Valid bodies differ in one field, or in which fields they have. One of so many is sent if only few
# are wanted.
EVERY = {"valid_object": 2, "object_required_and_optional": 4}
FEW = "ENGINE_CORE_TEST_SCHEMA_FEW" in os.environ
_seen: Counter[tuple[str, ...]] = Counter()


def _is_positive(case: Case) -> bool:
    return case.meta is not None and case.meta.generation.mode.is_positive


def _within_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_within_vocabulary(item) for item in value]
    return int(value) % VOCABULARY if isinstance(value, int | float) else value


@schemathesis.hook
def filter_case(context: HookContext, case: Case) -> bool:
    """If few are wanted, send one wrong type for each place and some of the valid bodies.

    A million tokens where fewer are taken are sent by ``test_limits.py``.
    """
    if not FEW or case.meta is None or case.meta.phase.name != "coverage":
        return True
    if case.path == "/detokenize":  # which has one field
        return True
    data: Any = case.meta.phase.data
    values = case.body.values() if isinstance(case.body, dict) else ()
    if any(isinstance(value, list) and len(value) > 2**16 for value in values):
        return False
    kind = (case.method, case.path, data.scenario, data.location or "")
    before = _seen[kind]
    _seen[kind] += 1
    if data.scenario == "incorrect_type":
        return before == 0
    return before % EVERY.get(data.scenario, 1) == 0


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Of the many bodies that the schema allows, make one that gets as far as the model."""
    body = case.body
    if not _is_positive(case) or not isinstance(body, dict):
        return
    for name in ("input", "prompt", "tokens", "stop_token_ids", "allowed_token_ids"):
        if isinstance(body.get(name), list):
            body[name] = _within_vocabulary(body[name])
    if isinstance(body.get("logit_bias"), dict):
        bias = body["logit_bias"].items()
        body["logit_bias"] = {str(int(token) % VOCABULARY): value for token, value in bias}
    for name in ("min_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int | float):
            body[name] = min(body[name], 4)
    body.pop("previous_response_id", None)
    if isinstance(body.get("timeout"), int | float):
        body["timeout"] = max(60, body["timeout"])
    if "messages" in body and not body.get("max_tokens") and "/chat/" in case.path:
        body["max_tokens"] = body.get("max_completion_tokens") or 4
    if "/responses" in case.path and not body.get("max_output_tokens"):
        body["max_output_tokens"] = 4


@schemathesis.check
def what_the_schema_allows_is_answered(ctx: CheckContext, response: Response, case: Case) -> None:
    """Unless it is refused for a reason that no schema can express."""
    if _is_positive(case) and response.status_code == 400:
        code = response.json()["error"]["code"]
        assert code in BEYOND_SCHEMA, response.text


@schemathesis.check
def what_the_schema_forbids_is_refused(ctx: CheckContext, response: Response, case: Case) -> None:
    """In place of schemathesis' own check, whose violated enum may hold the value after all."""
    if _is_positive(case) or response.status_code >= 400 or not isinstance(case.body, dict | list):
        return
    document = case.operation.schema.raw_schema
    operation = document["paths"][case.path][case.method.lower()]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    assert Draft202012Validator(whole).is_valid(case.body), f"accepted: {case.body!r}"


@schemathesis.check
def streams_are_whole(ctx: CheckContext, response: Response, case: Case) -> None:
    """A stream's events are JSON, and it ends as streams do."""
    if not response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    *events, last, nothing = response.text.split("\n\n")
    assert nothing == ""
    if case.path in LAST_EVENTS:
        events.append(last)
        assert json.loads(_data(last))["type"] in LAST_EVENTS[case.path], last
    else:
        assert last == "data: [DONE]"
    for event in events:
        value = json.loads(_data(event))
        error = value.get("error") or value.get("response", {}).get("error")
        assert error is None or error["code"] in {*BEYOND_SCHEMA, "invalid_prompt"}, event


def _data(event: str) -> str:
    return event.split("\n")[-1].removeprefix("data: ")
