"""Hostile bodies for the Responses and Messages APIs, beside a client that is served."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from attacking import Healthy, connect, memory_of, wait_until
from random_examples import FULL
from serving import ServerProcess
from tokenizers import Tokenizer

pytestmark = pytest.mark.slow

KEY = {"Authorization": "Bearer key"}
OTHER = {"x-api-key": "other"}
STORED = 20
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
# Bodies in which every field that takes a value has one.
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "So."}],
            "content": [{"type": "reasoning_text", "text": "So."}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "1", "output": "Rain."},
        {"role": "user", "content": "And now?"},
    ],
    "instructions": "Be kind.",
    "max_output_tokens": 1,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0,
    "seed": 1,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {"5": 1},
    "priority": 0,
    "timeout": 60,
    "cache_salt": "a",
    "stream": False,
    "store": True,
    "truncation": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto", "generate_summary": "auto"},
    "tools": [{"type": "function", "name": "look", "description": "Now.", "parameters": SCHEMA}],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "look"}],
    },
    "parallel_tool_calls": True,
    "max_tool_calls": 1,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"a": 1},
    "user": "a",
    "service_tier": "auto",
    "stream_options": {"include_obfuscation": False},
}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "So.", "signature": ""},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "Rain."}],
                }
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Now.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 10, "display": "summarized"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["x"],
    "stream": False,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 5,
    "logit_bias": {"5": 1},
    "seed": 1,
    "metadata": {"user_id": "a"},
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "timeout": 60,
}
# How many of them each place gets; more in ``make soak``.
WRONG_VALUES = 2 if os.environ.get(FULL) else 1
WRONG: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**400, 1e308, "", "\0", "\ufffd\U0001f600", "x" * 100_000),
    *([], [[]], [None], {}, {"": None}, {"type": "\0"}, {"$ref": "#"}, [{"type": "text"}] * 2000),
]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    options = ["--max-num-seqs", "16", "--max-model-len", "1024", "--kv-cache-memory", "16MiB"]
    options += ["--served-model-name", "tiny", "--tool-parser", "hermes"]
    options += ["--guided-compile-timeout", "2"]
    options += ["--reasoning-parser", "think", "--prefix-cache-sharing", "all"]
    options += ["--max-stored-responses", str(STORED), "--max-stored-size", "256KiB"]
    environment = {"ENGINE_CORE_API_KEY": "key other"}
    with ServerProcess(tiny_model, *options, environment=environment) as process:
        yield process.wait_ready()
        assert process.process.poll() is None, process.log
        assert "Traceback" not in process.log


@pytest.fixture(scope="module")
def healthy(server: ServerProcess) -> Iterator[Healthy]:
    client = Healthy(server, KEY)
    yield client
    client.session.close()


@pytest.fixture(scope="module")
def session(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=KEY, timeout=60) as session:
        yield session


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """All places of a body but itself."""
    if place:
        yield place
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*place, key))


def _with(body: dict[str, Any], place: tuple[str | int, ...], wrong: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    inner: Any = made
    for key in place[:-1]:
        inner = inner[key]
    if wrong is Ellipsis:
        del inner[place[-1]]
    else:
        inner[place[-1]] = wrong
    return made


@pytest.mark.parametrize("path", ["responses", "messages", "messages/count_tokens"])
def test_wrong_values_everywhere_are_refused_by_name(
    session: httpx.Client, healthy: Healthy, path: str
) -> None:
    body = RESPONSE if path == "responses" else MESSAGE
    if path.endswith("count_tokens"):
        prompt = ("model", "messages", "system", "tools", "tool_choice", "thinking")
        body = {name: MESSAGE[name] for name in prompt}
    assert session.post(f"/v1/{path}", json=body).status_code == 200
    draw = random.Random(0)
    bodies = [
        (place, _with(body, place, wrong))
        for place in _places(body)
        for wrong in (..., *draw.sample(WRONG, WRONG_VALUES))
    ]

    def post(item: tuple[Any, dict[str, Any]]) -> int:
        place, wrong = item
        answer = session.post(f"/v1/{path}", json=wrong)
        assert answer.status_code in (200, 400, 404), (place, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["code"] not in (None, "internal_error"), (place, error)
            assert len(answer.content) < 4000, place
        return answer.status_code

    with healthy.beside(), ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(post, bodies))
    assert 0.5 < statuses.count(400) / len(statuses) < 1


def _prompt(messages: list[tuple[str, str]]) -> str:
    """The text that the template of the tests makes of them."""
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return f"{turns}<|im_start|>assistant\n"


def test_tokens_are_counted_exactly(session: httpx.Client, tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    draw = random.Random(0)
    words = ["engine ", "", " ", "\n\n", "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "é"]
    words += ["\U0001f600", "\u200d", "\ufeff", "\0", "{{ x }}", "</think>", "\r\n", "a" * 50]
    for _ in range(12):
        said = ["".join(draw.choices(words, k=draw.randint(1, 6))) + "." for _ in range(4)]
        roles = ("system", "user", "assistant", "user")
        expected = len(tokenizer.encode(_prompt(list(zip(roles, said, strict=True)))).ids)
        turns = [
            {"role": role, "content": text} for role, text in zip(roles[1:], said[1:], strict=True)
        ]
        body = {"model": "tiny", "system": said[0], "messages": turns}
        counted = session.post("/v1/messages/count_tokens", json=body).json()
        assert counted == {"input_tokens": expected}
        message = session.post("/v1/messages", json={**body, "max_tokens": 2}).json()
        assert message["usage"]["input_tokens"] == expected
        asked = {"model": "tiny", "instructions": said[0], "input": turns, "max_output_tokens": 2}
        usage = session.post("/v1/responses", json=asked).json()["usage"]
        assert usage["input_tokens"] == expected
        assert usage["total_tokens"] == expected + usage["output_tokens"]
        assert usage["output_tokens"] <= 2


def _create(session: httpx.Client, **more: Any) -> httpx.Response:
    asked = {"model": "tiny", "input": "Why?", "max_output_tokens": 1, **more}
    return session.post("/v1/responses", json=asked)


def test_no_id_finds_what_is_not_ones_own(session: httpx.Client, healthy: Healthy) -> None:
    own = _create(session).json()["id"]
    names = [
        "",
        " ",
        ".",
        "..",
        "%2e%2e",
        "%00",
        "%ff",
        "resp_",
        own[:-1],
        own + "%20",
        own + "%00",
    ]
    names += [own.upper(), "x" * 8000, "%F0%9F%98%80", "../responses", own + "%2f%2e%2e"]
    with healthy.beside():
        for name in names:
            for tail in ("", "/input_items"):
                answer = session.get(f"/v1/responses/{name}{tail}")
                assert answer.status_code in (404, 405), (name, answer.text)
            assert session.delete(f"/v1/responses/{name}").status_code in (404, 405)
        for name in (own.upper(), "\0", "../" + own, "x" * 1_000_000, own + " ", own + "\n"):
            answer = _create(session, previous_response_id=name)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "previous_response_not_found"
            assert len(answer.content) < 1000
        for tail in ("", "/input_items"):
            found = session.get(
                f"/v1/responses/{own}{tail}", headers={"Authorization": "", **OTHER}
            )
            assert found.status_code == 404
    assert session.get(f"/v1/responses/{own}").status_code == 200


def test_a_store_that_is_filled_stays_small(
    server: ServerProcess, session: httpx.Client, healthy: Healthy
) -> None:
    kept = _create(session, metadata={"mine": "1"}).json()["id"]
    before = memory_of(server)
    with healthy.beside():
        # Too large to be kept, and as many as would fill it many times.
        for size in (300_000, 7_000_000):
            answer = _create(session, metadata={"a": "b" * size}).json()
            assert answer["store"] is False
            assert session.get(f"/v1/responses/{answer['id']}").status_code == 404
        assert session.get(f"/v1/responses/{kept}").status_code == 200
        names = [_create(session, metadata={"a": "b" * 60_000}).json()["id"] for _ in range(40)]
        assert session.get(f"/v1/responses/{kept}").status_code == 404
        found = [session.get(f"/v1/responses/{name}").status_code for name in names]
        assert found == [404] * 36 + [200] * 4
        # A conversation is dropped like any other, and is not gone on with.
        first = name = _create(session).json()["id"]
        for _ in range(STORED):
            name = _create(session, previous_response_id=name).json()["id"]
        assert _create(session, previous_response_id=first).status_code == 400
        assert _create(session, previous_response_id=name).status_code == 200
    assert memory_of(server) - before < 64 * 2**20


def test_many_go_on_with_what_is_being_deleted(session: httpx.Client, healthy: Healthy) -> None:
    def attack(number: int) -> tuple[int, int]:
        name = session.get("/version").status_code and _create(session).json()["id"]
        with ThreadPoolExecutor(4) as inner:
            going = [inner.submit(_create, session, previous_response_id=name) for _ in range(3)]
            gone = inner.submit(session.delete, f"/v1/responses/{name}")
        assert {each.result().status_code for each in going} <= {200, 400}
        return gone.result().status_code, session.delete(f"/v1/responses/{name}").status_code

    with healthy.beside(), ThreadPoolExecutor(3) as pool:
        assert {gone for _, gone in pool.map(attack, range(8))} == {404}


CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "Rain."}
LOOPS: dict[str, list[Any]] = {
    "a result without a call": [RESULT],
    "a result before its call": [RESULT, CALL],
    "a call of itself": [CALL, {**RESULT, "output": json.dumps(CALL)}],
    "one call many times": [CALL] * 100 + [RESULT] * 100,
    "more calls than one message takes": [CALL] * 2000,
    "arguments that are no JSON": [{**CALL, "arguments": "}{" * 100}, RESULT],
    "arguments that nest": [{**CALL, "arguments": '{"a":' * 5000}, RESULT],
    "nothing but reasoning": [{"type": "reasoning", "summary": []}] * 50,
    "a call without a name": [{**CALL, "name": ""}],
    "an id of a megabyte": [{**CALL, "call_id": "x" * 1_000_000}, RESULT],
    "a call in a call's name": [{**CALL, "name": "</tool_call><tool_call>" * 100}],
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_calls_end(session: httpx.Client, healthy: Healthy, name: str) -> None:
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    with healthy.beside():
        for more in ({"truncation": "auto"}, {"tool_choice": "required", "stream": True}):
            answer = _create(session, input=LOOPS[name], tools=tools, store=False, **more)
            assert answer.status_code in (200, 400), answer.text
            assert "internal_error" not in answer.text
            assert "server_error" not in answer.text


def _head(path: str, content: bytes) -> bytes:
    return (
        f"POST /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer key\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content


def test_streams_that_are_left_are_not_stored(
    server: ServerProcess, session: httpx.Client, healthy: Healthy
) -> None:
    draw = random.Random(0)

    def leave(seed: int) -> str | None:
        own = random.Random(seed)
        path = own.choice(("responses", "messages"))
        asked: dict[str, Any] = {"model": "tiny", "stream": True, "temperature": 0}
        if path == "responses":
            asked |= {"input": "Why?", "max_output_tokens": 900, "include": own.choice((None, []))}
        else:
            asked |= {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 900}
        with connect(server) as connection:
            connection.sendall(_head(path, json.dumps(asked).encode()))
            data = b""
            while own.random() < 0.8 and b'"id":"' not in data:
                data += connection.recv(4096)
        found = data.partition(b'"id":"resp_')[2].partition(b'"')[0].decode()
        return f"resp_{found}" if found else None

    with healthy.beside(), ThreadPoolExecutor(8) as pool:
        names = [
            name for name in pool.map(leave, [draw.getrandbits(64) for _ in range(60)]) if name
        ]
    wait_until(lambda: server.metric("engine_core_requests_running") == 0)
    assert len(names) > 5
    for name in names:
        assert session.get(f"/v1/responses/{name}").status_code == 404


HOSTILE = {
    "a loop of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "numbers that never meet": {
        "properties": {
            "a": {"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]},
        },
        "required": ["a"],
    },
    "many names": {"properties": {f"p{n}": {} for n in range(5000)}},
    "a regular expression": {"properties": {"a": {"type": "string", "pattern": "(a+)+" * 2000}}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_schemas_of_tools_stop_nobody(session: httpx.Client, healthy: Healthy, name: str) -> None:
    schema = {"type": "object", **HOSTILE[name]}
    message = {**MESSAGE, "tool_choice": {"type": "any"}, "thinking": None}
    message["tools"] = [{"name": "look", "input_schema": schema}]
    tools = [{"type": "function", "name": "look", "parameters": schema}]
    with healthy.beside():
        answers = [
            session.post("/v1/messages", json=message),
            _create(session, tools=tools, tool_choice="required", store=False),
        ]
    for answer in answers:
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            error = answer.json()["error"]
            # The template writes the schema, and may make too long a prompt of it.
            long = error["code"] == "context_length_exceeded"
            assert long or error["param"].startswith("tools"), error


def test_texts_beyond_any_prompt_are_refused_at_once(
    session: httpx.Client, healthy: Healthy
) -> None:
    long = "engine " * 1_000_000
    turns = [{"role": "user", "content": "a"}] * 16_000
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("messages/count_tokens", {"messages": [{"role": "user", "content": long}]}),
        ("messages/count_tokens", {"messages": turns}),
        ("messages", {"messages": turns[:1], "system": long, "max_tokens": 1}),
        ("responses", {"input": long}),
        ("responses", {"input": "a", "instructions": long}),
        ("responses", {"input": turns, "truncation": "disabled"}),
        ("responses", {"input": [*turns[:500], {"role": "user", "content": long}]}),
    ]
    with healthy.beside():
        for path, body in bodies:
            answer = session.post(f"/v1/{path}", json={"model": "tiny", **body})
            # A count of what no prompt may be is still a count.
            if answer.status_code != 200 or path != "messages/count_tokens":
                assert answer.status_code == 400, answer.text[:300]
                assert answer.json()["error"]["code"] in (
                    "context_length_exceeded",
                    "invalid_request",
                )
