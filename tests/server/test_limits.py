"""Refusals: limits, keys, hostile bodies, deadlines, and clients that leave."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import ServerProcess
from slow_llama import OPTIONS as SLOW
from tokenizers import Tokenizer

from engine_core.errors import ConfigError
from engine_core.server.errors import ApiError
from engine_core.server.middleware import names_of
from engine_core.server.settings import ServerSettings

pytestmark = pytest.mark.slow

KEYS = ("first-key", "schlüssel")
LONG: dict[str, Any] = {"model": "tiny", "prompt": "long", "max_tokens": 1000, "ignore_eos": True}
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def strict(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with every limit set low, with keys, and with a log of JSON lines."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# who may\n{KEYS[1]}\n\n", encoding="utf-8")
    options = [
        *SLOW,
        *("--max-num-seqs", "2", "--max-queued-requests", "3", "--max-model-len", "1024"),
        *("--max-body-size", "20kB", "--max-prompt-tokens", "100", "--max-prompts", "4"),
        *("--request-timeout", "60", "--kv-cache-memory", "16MiB", "--max-n", "2"),
        *("--api-key-file", str(keys), "--log-format", "json", "--served-model-name", "tiny"),
        *("--served-model-name", "other", "--allow-origin", "https://page.example"),
        *("--allowed-hosts", "llm.example"),
    ]
    environment = {"ENGINE_CORE_API_KEY": KEYS[0]}
    with ServerProcess(tiny_model, *options, environment=environment) as process:
        yield process.wait_ready()


@pytest.fixture
def session(strict: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.Client(base_url=strict.url, headers=headers, timeout=60) as session:
        yield session


def _error(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, error["code"], error["param"]


def test_only_keys_let_in(strict: ServerProcess) -> None:
    for key in KEYS:
        raw = {"Authorization": f"Bearer {key}".encode()}
        assert httpx.get(f"{strict.url}/v1/models", headers=raw).status_code == 200
    for value in (
        "",
        "Bearer",
        "Bearer first-ke",
        "Bearer first-key1",
        "Basic first-key",
    ):
        headers = {"Authorization": value} if value else {}
        response = httpx.post(f"{strict.url}/v1/completions", headers=headers, json=SHORT)
        assert _error(response) == (401, "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
    refused = {"path": "/tokenize", "status": "401"}
    before = strict.metric("engine_core_http_requests_total", **refused)
    assert httpx.post(f"{strict.url}/tokenize", json={}).status_code == 401
    strict.wait_for("engine_core_http_requests_total", before + 1, **refused)
    for path in ("/health", "/health/live", "/metrics", "/", "/openapi.json", "/version"):
        assert httpx.get(strict.url + path).status_code == 200, path
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_only_named_origins_may_call(strict: ServerProcess, session: httpx.Client) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{strict.url}/v1/completions", headers=headers)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(
        f"{strict.url}/v1/completions", headers={**headers, "Origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in other.headers
    plain = session.get("/v1/models", headers={"Origin": "https://page.example"})
    assert plain.headers["access-control-allow-origin"] == "https://page.example"


def test_a_page_whose_name_is_resolved_to_the_server_reads_nothing(
    strict: ServerProcess, session: httpx.Client
) -> None:
    port = strict.url.rpartition(":")[2]
    for name in ("llm.example", "localhost", "here.localhost", "127.0.0.1", "192.0.2.7", "[::1]"):
        for host in (name, f"{name}:{port}"):
            assert session.get("/v1/models", headers={"Host": host}).status_code == 200, host
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    for host in ("evil.example", f"evil.example:{port}", "llm.example.evil.example", "", "127.0.0"):
        for path in ("/", "/health", "/v1/models", "/nothing"):
            assert _error(session.get(path, headers={"Host": host})) == (421, "unknown_host", None)
        preflight = session.options("/v1/completions", headers={"Host": host, **ask})
        assert preflight.status_code == 421
        assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"localhost", "127.0.0.1"}),
        ({"host": "::1"}, {"localhost", "::1"}),
        ({"host": "localhost"}, {"localhost"}),
        ({"host": "0.0.0.0"}, None),
        ({"host": "::"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": ["llm.example"]}, {"localhost", "0.0.0.0"}),
        ({"allowed_hosts": ["*"]}, None),
    ],
)
def test_who_listens_on_this_machine_alone_has_local_names(
    settings: dict[str, Any], names: set[str] | None
) -> None:
    given = set(settings.get("allowed_hosts", ()))
    assert names_of(ServerSettings(**settings)) == (names if names is None else names | given)


@pytest.mark.parametrize("name", ["", "https://llm.example", "llm.example:8000", "LLM.example"])
def test_a_host_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerSettings(allowed_hosts=(name,))


def test_head_is_get_without_a_body(session: httpx.Client) -> None:
    for path in ("/", "/health", "/health/live", "/ping", "/metrics", "/version", "/v1/models"):
        head, whole = session.head(path), session.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert path == "/metrics" or head.headers["content-length"] == str(len(whole.content))
    assert session.head("/v1/models/nobody").status_code == 404
    assert session.head("/v1/completions").status_code == 405
    assert httpx.head(str(session.base_url.join("/v1/models"))).status_code == 401
    # The connection is as it was.
    assert session.get("/health").json() == {"status": "ready"}


def test_every_name_serves_the_same_model(session: httpx.Client) -> None:
    names = [model["id"] for model in session.get("/v1/models").json()["data"]]
    assert names == ["tiny", "other"]
    answer = session.post("/v1/completions", json={**SHORT, "model": "other"}).json()
    assert answer["model"] == "other"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({**SHORT, "n": 3}, 400, "invalid_value", "n"),
        ({**SHORT, "prompt": ["a"] * 5}, 400, "invalid_value", "prompt"),
        # Two run and three wait: six never can.
        ({**SHORT, "prompt": ["a"] * 3, "n": 2}, 400, "invalid_value", "n"),
        ({**SHORT, "prompt": "word " * 200}, 400, "context_length_exceeded", "prompt"),
        ({**SHORT, "prompt": "word " * 5000}, 413, "body_too_large", None),
        ({**SHORT, "model": "nobody"}, 404, "model_not_found", "model"),
        ({**SHORT, "suffix": "x"}, 400, "invalid_value", "suffix"),
        ({**SHORT, "best_of": 2}, 400, "invalid_value", "best_of"),
        ({**SHORT, "colour": 1, "size": 2}, 400, "unknown_field", "colour"),
        ({**SHORT, "temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({**SHORT, "max_tokens": True}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": 1.5}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": 10**30}, 400, "invalid_value", "max_tokens"),
        ({**SHORT, "max_tokens": 0}, 400, "conflicting_fields", "max_tokens"),
        ({**SHORT, "min_tokens": 5}, 400, "conflicting_fields", "min_tokens"),
        ({**SHORT, "prompt": [1, "a"]}, 400, "invalid_value", "prompt"),
        ({**SHORT, "prompt": [[1], []]}, 400, "invalid_value", "prompt"),
        ({**SHORT, "prompt": ""}, 400, "invalid_value", "prompt"),
        ({**SHORT, "logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias.x"),
        ({**SHORT, "stop": ["a", ""]}, 400, "invalid_value", "stop.1"),
        ({**SHORT, "stream_options": {}}, 400, "conflicting_fields", "stream_options"),
        ({"model": "tiny"}, 400, "missing_field", "prompt"),
        ([], 400, "invalid_value", None),
    ],
)
def test_a_body_is_refused_by_field(
    session: httpx.Client, body: Any, status: int, code: str, param: str | None
) -> None:
    found = _error(session.post("/v1/completions", json=body))
    assert found[:2] == (status, code)
    assert (found[2] or "").split(".")[0] == (param or "").split(".")[0]


CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: this field is required"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role: .*'bot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.image_url: there is no image; give one, or the uuid of one",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png"}}],
                    }
                ]
            },
            "messages.0.content.0.image_url has 'image', and SlowLlama takes text alone",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "uuid": "a"}]}]},
            "messages.0.content.0.input_audio has 'audio', and SlowLlama takes text alone",
        ),
        *(
            (
                {
                    "messages": [
                        {
                            "role": role,
                            "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                            **({"tool_call_id": "a"} if role == "tool" else {}),
                        }
                    ]
                },
                "messages.0.content.0: 'image_url' is a part of a user's message alone; move",
            )
            for role in ("system", "assistant", "tool")
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "/a.png"}]}]},
            "messages.0.content.0.type: Input should be 'text'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a", "image_url": {"url": "data:"}}],
                    }
                ]
            },
            "messages.0.content.0.image_url: unknown field; give what it shows a part of its own",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]},
            "messages.0.images: unknown field; give what it shows a part of its own",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": kind, kind: shown}]}]},
                f"messages.0.content.0.{kind}.{field}: unknown field",
            )
            for kind, field, shown in (
                ("image_url", "max_dynamic_patch", {"url": "data:", "max_dynamic_patch": 2}),
                ("video_url", "num_frames", {"url": "data:", "num_frames": 2}),
                ("input_audio", "uuid", {"data": "AA==", "format": "wav", "uuid": "a"}),
            )
        ),
        ({"mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs are for what the mess"),
        ({"use_beam_search": True}, "use_beam_search: only false is supported"),
        (
            {"messages": [{"role": "assistant", "content": "a", "prefix": True}]},
            "messages.0.prefix: only false is supported",
        ),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not streamed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: .*got 0"),
        ({"reasoning_effort": "huge"}, "reasoning_effort: .*'huge'"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag: not supported here",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex and structured_outputs.choice each say",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats needs include_usage",
        ),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message continues the last message",
        ),
        (
            {
                "continue_final_message": True,
                "messages": [*CHAT["messages"], {"role": "assistant"}],
            },
            "continue_final_message needs a last message whose content is text",
        ),
        ({"functions": []}, "functions: not supported here, got"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"max_completion_tokens": 2}, "max_tokens and max_completion_tokens differ"),
        ({"tool_choice": "required"}, "needs tools"),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type: .*'json_schema', got 'yaml'",
        ),
        ({"response_format": {}}, "response_format.type: this field is required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "^response_format.json_schema.schema: this field is required$",
        ),
        ({"seed": -2}, "seed: Input should be greater than or equal to -1, got -2"),
        ({"chat_template": "{{ x }}"}, "chat_template: not supported here"),
    ],
)
def test_a_chat_is_refused_with_a_reason(
    session: httpx.Client, change: dict[str, Any], says: str
) -> None:
    response = session.post("/v1/chat/completions", json={**CHAT, **change})
    assert _error(response)[0] == 400
    assert re.search(says, response.json()["error"]["message"])


ITEM: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "strin"}}}
WRONG_SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": ITEM}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "right"}},
    {"type": "function", "function": {"name": "wrong", "parameters": ITEM}},
]
WRONG_TOOL = {"type": "function", "function": {"name": "wrong"}}


def _calling(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        *(
            ({"chat_template_kwargs": {name: False}}, f"chat_template_kwargs.{name}", None)
            for name in (
                *("add_generation_prompt", "continue_final_message"),
                *("messages", "tools", "chat_template", "self"),
            )
        ),
        *(
            (_calling(arguments), "messages.1.tool_calls.0.function.arguments", "invalid_value")
            for arguments in (
                '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
                '{"a":' * 900 + "1" + "}" * 900,
                '{"a":' * 65 + "1" + "}" * 65,
            )
        ),
        ({"guided_json": ITEM}, "guided_json.properties.a", None),
        ({"structured_outputs": {"json": ITEM}}, "structured_outputs.json.properties.a", None),
        ({"guided_regex": "("}, "guided_regex", None),
        ({"guided_grammar": "start: b"}, "guided_grammar", None),
        (
            {"response_format": WRONG_SCHEMA},
            "response_format.json_schema.schema.properties.a",
            None,
        ),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            "tools.1.function.parameters.properties.a",
            None,
        ),
        (
            {"tools": TOOLS, "tool_choice": WRONG_TOOL},
            "tools.1.function.parameters.properties.a",
            None,
        ),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": TOOLS[:1], "tool_choice": WRONG_TOOL}, "tool_choice", None),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.function.name", None),
        ({"logit_bias": {"320": 1}}, "logit_bias", None),
        ({"allowed_token_ids": [1, 320]}, "allowed_token_ids", None),
        ({"stop_token_ids": [320]}, "stop_token_ids", None),
        ({"min_tokens": 2}, "min_tokens", "conflicting_fields"),
        # Only when it is followed do these turn out to be beyond what a grammar may be.
        ({"guided_grammar": 'start: "a"{100000}', "max_tokens": 9}, "guided_grammar", None),
        ({"guided_json": {"enum": ["a" * 1_000_000]}, "max_tokens": 9}, "guided_json", None),
    ],
)
def test_a_refusal_names_the_field(
    server: ServerProcess, change: dict[str, Any], param: str | None, code: str | None
) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, **change}, timeout=60)
    assert _error(response) == (400, code or "invalid_request", param)
    if param is not None and "." in param:
        assert response.json()["error"]["message"].startswith((f"{param}: ", "tools[1]: "))


def test_other_endpoints_name_the_field_too(server: ServerProcess) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": CHAT["messages"]}
    body["chat_template_kwargs"] = {"self": 1}
    response = httpx.post(f"{server.url}/tokenize", json=body)
    assert _error(response) == (400, "invalid_request", "chat_template_kwargs.self")
    response = httpx.post(f"{server.url}/detokenize", json={"model": "tiny", "tokens": [1, 320]})
    assert _error(response) == (400, "invalid_request", "tokens")
    assert "token 320 at position 1 of the tokens" in response.json()["error"]["message"]
    response = httpx.post(f"{server.url}/v1/completions", json={**SHORT, "prompt": [1, 320]})
    assert _error(response) == (400, "invalid_request", "prompt")


WORDS = "abc d " * 1_200_000
LARGE: dict[str, tuple[str, dict[str, Any], str, str | None, str]] = {
    "wrong tokens": (
        "/v1/completions",
        {"prompt": [-1] * 1_000_000},
        "invalid_value",
        "prompt.0",
        "prompt.0: Input should be greater than or equal to 0, got -1",
    ),
    "tokens": (
        "/v1/completions",
        {"prompt": [1] * 1_100_000},
        "invalid_value",
        "prompt",
        "prompt: must have 1048576 entries or fewer, and has 1100000, got [1, 1, ",
    ),
    "lists of tokens": (
        "/v1/completions",
        {"prompt": [[1]] * 100_000},
        "invalid_value",
        "prompt",
        "prompt: must have 65536 entries or fewer, and has 100000, got [[1], [1], ",
    ),
    "mixed prompts": (
        "/v1/completions",
        {"prompt": ["a", *range(50_000)]},
        "invalid_value",
        "prompt.1",
        "prompt.1: Input should be a valid string, got 0",
    ),
    "no messages": (
        "/v1/chat/completions",
        {"messages": [1] * 10_000},
        "invalid_value",
        "messages.0",
        "messages.0: must be an object, got 1",
    ),
    "messages": (
        "/v1/chat/completions",
        {"messages": CHAT["messages"] * 20_000},
        "invalid_value",
        "messages",
        "messages: must have 16384 entries or fewer, and has 20000, got [{'role': 'user', ",
    ),
    "role": (
        "/v1/chat/completions",
        {"messages": [{"role": "x" * 1_000_000}]},
        "invalid_value",
        "messages.0.role",
        "messages.0.role: must be one of ",
    ),
    "unknown fields": (
        "/v1/completions",
        {"prompt": "a", **{f"field_{number}": 1 for number in range(100_000)}},
        "unknown_field",
        "field_0",
        "field_0: unknown field; leave it out. field_1: unknown field; leave it out. ",
    ),
    "a long field": (
        "/v1/completions",
        {"prompt": "a", "x" * 1_000_000: 1},
        "unknown_field",
        "x" * 80,
        "xxxx",
    ),
    "biases": (
        "/v1/completions",
        {"prompt": "a", "logit_bias": {f"x{number}": 1 for number in range(70_000)}},
        "invalid_value",
        "logit_bias",
        "logit_bias: must have 65536 entries or fewer, and has 70000, ",
    ),
    "allowed tokens": (
        "/v1/completions",
        {"prompt": "a", "allowed_token_ids": [1] * 300_000},
        "invalid_value",
        "allowed_token_ids",
        "allowed_token_ids: must have 262144 entries or fewer, and has 300000, ",
    ),
    "stop strings": (
        "/v1/completions",
        {"prompt": "a", "stop": ["a" * 100_000] * 64},
        "invalid_value",
        "stop.0",
        "stop.0: String should have at most ",
    ),
    "bad words": (
        "/v1/completions",
        {"prompt": "a", "bad_words": ["abc d " * 1000] * 1024},
        "invalid_value",
        "bad_words.0",
        "bad_words.0: String should have at most 128 characters, got 'abc d",
    ),
    "arrays": (
        "/v1/completions",
        {"prompt": [[]] * 300_000},
        "invalid_json",
        None,
        "the body has more than 262144 arrays and objects",
    ),
    "keys": (
        "/v1/chat/completions",
        {**CHAT, "metadata": {f"{number:x}": 0 for number in range(140_000)}},
        "invalid_json",
        None,
        "the body has more than 131072 keys",
    ),
    "values": (
        "/v1/completions",
        {"prompt": [[1] * 33] * 2**16},
        "invalid_json",
        None,
        "the body has more than 2097152 values",
    ),
    "texts": (
        "/v1/chat/completions",
        {**CHAT, "metadata": {"a": [""] * 300_000}},
        "invalid_json",
        None,
        "the body has more than 262144 texts",
    ),
    "large numbers": (
        "/v1/completions",
        {"prompt": [10**1000 - 1, *[10**3000] * 2_000]},
        "invalid_json",
        None,
        "the body has an integer that is far too large",
    ),
    "a large schema": (
        "/v1/completions",
        {"prompt": "a", "guided_json": {"enum": [str(number) for number in range(140_000)]}},
        "invalid_request",
        "guided_json",
        "guided_json: it has more than 131072 keys and values; make it smaller",
    ),
    "tokens to text": (
        "/detokenize",
        {"tokens": [1] * 1_100_000},
        "invalid_value",
        "tokens",
        "tokens: must have 1048576 entries or fewer, and has 1100000, got [1, 1, ",
    ),
    **{
        f"text to {path}": (
            path,
            body,
            "context_length_exceeded",
            next(iter(body)),
            f"the prompt is too long: it has {size} bytes of text, and the longest taken here has "
            "1023 tokens of at most 12 bytes each; this model's maximum context length is 1024",
        )
        for path, body, size in (
            ("/v1/completions", {"prompt": WORDS}, 7_200_000),
            ("/tokenize", {"prompt": WORDS}, 7_200_000),
            # As the template of the tests writes it.
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": WORDS}]},
                7_200_000 + len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"),
            ),
        )
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_is_refused_without_looking_at_all_of_it(
    server: ServerProcess, name: str
) -> None:
    path, body, code, param, says = LARGE[name]
    response = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=60)
    assert _error(response) == (400, code, param)
    message = response.json()["error"]["message"]
    assert message.startswith(says)
    # What is quoted of the body is short, and of a list it is the first mistake only.
    assert len(response.content) < 1000
    if re.search(r"\.\d+$", param or ""):
        assert len(re.findall(r"(?:^|\. )[a-z_]+\.\d+: ", message)) == 1


def test_brackets_in_a_text_are_not_arrays(server: ServerProcess, tiny_model: Path) -> None:
    text = '["[{\\"' * 120_000
    body = {"model": "tiny", "prompt": text}
    response = httpx.post(f"{server.url}/tokenize", json=body, timeout=60)
    assert _error(response)[:2] == (400, "context_length_exceeded")


def test_a_text_is_tokenised_if_it_may_fit(server: ServerProcess, tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    text = ("abc d " * 3000)[: 1023 * 12]
    ids = tokenizer.encode(text).ids
    answer = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "prompt": text}).json()
    assert answer["tokens"] == ids
    response = httpx.post(f"{server.url}/v1/completions", json={**SHORT, "prompt": text})
    assert _error(response) == (400, "context_length_exceeded", "prompt")
    # Clients tell this error from others by its beginning or its end.
    assert response.json()["error"]["message"] == (
        f"the prompt is too long: it has {len(ids)} tokens, and the longest taken here has 1023; "
        "this model's maximum context length is 1024 tokens"
    )
    body = {"model": "tiny", "prompt": f"{text}a"}
    response = httpx.post(f"{server.url}/tokenize", json=body)
    assert _error(response) == (400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"temperature": 1e999}', "beyond the range"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "far too large"),
        (b'{"model": "tiny", "model": "other"}', "'model' is given twice"),
        (b'{"prompt": "\\ud800"}', "lone surrogate U\\+D800"),
        (b"[" * 9000, "not JSON|deeper"),
        (b"[" * 9000 + b"]" * 9000, "deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than 64"),
        ('{"model": "tiny"}'.encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_what_is_not_json_is_refused(session: httpx.Client, raw: bytes, says: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = session.post(path, content=raw, headers={"Content-Type": "application/json"})
        assert _error(response) == (400, "invalid_json", None)
        assert re.search(says, response.json()["error"]["message"])


def test_other_media_types_and_methods_are_refused(session: httpx.Client) -> None:
    content = json.dumps(SHORT).encode()
    for kind in ("text/plain", "", "application/json; charset=latin-1", "application/x-ndjson"):
        response = session.post("/v1/completions", content=content, headers={"Content-Type": kind})
        assert _error(response)[:2] == (415, "unsupported_media_type"), kind
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert session.post("/v1/completions", content=content, headers=packed).status_code == 415
    plain = {"Content-Type": 'Application/JSON; charset="UTF-8"'}
    assert session.post("/v1/completions", content=content, headers=plain).status_code == 200
    wrong = session.get("/v1/completions")
    assert _error(wrong)[:2] == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert _error(session.delete("/v1/models"))[0] == 405
    assert _error(session.get("/v1/nothing"))[:2] == (404, "unknown_path")


def test_a_body_without_a_length_is_measured(session: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    response = session.post("/v1/completions", content=chunks(), headers=headers)
    assert _error(response)[:2] == (413, "body_too_large")


def _idle(server: ServerProcess) -> None:
    for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio"):
        server.wait_for(f"engine_core_{name}", 0)


def test_too_many_are_told_to_come_again(strict: ServerProcess, session: httpx.Client) -> None:
    with ThreadPoolExecutor(12) as pool:
        body = {**LONG, "max_tokens": 30}
        responses = list(pool.map(lambda _: session.post("/v1/completions", json=body), range(12)))
    statuses = [response.status_code for response in responses]
    assert statuses.count(200) >= 5
    refused = [response for response in responses if response.status_code != 200]
    assert refused
    for response in refused:
        assert _error(response)[:2] == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
    _idle(strict)


def test_a_client_that_leaves_is_noticed_at_once(
    strict: ServerProcess, session: httpx.Client
) -> None:
    for stream in (True, False):
        before = strict.metric("engine_core_generation_tokens_total")
        aborted = strict.metric("engine_core_aborted_sequences_total")
        content = json.dumps({**LONG, "stream": stream, "n": 2}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        address = strict.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head.encode() + content)
            deadline = time.monotonic() + 60
            while strict.metric("engine_core_generation_tokens_total") < before + 20:
                assert time.monotonic() < deadline
        _idle(strict)
        # It had 2000 tokens to go.
        assert strict.metric("engine_core_generation_tokens_total") < before + 1900
        assert strict.metric("engine_core_aborted_sequences_total") == aborted + 2


def test_the_log_is_json_without_prompts(strict: ServerProcess, session: httpx.Client) -> None:
    secret = "xylophone"
    headers = {"X-Request-Id": "logged-1"}
    session.post("/v1/completions", json={**SHORT, "prompt": secret}, headers=headers)
    long = "/a%0a%1b[31m" + "a" * 20_000
    assert session.get(long, headers={"X-Request-Id": "logged-0"}).status_code == 404
    for name in ("logged-0", "logged-1"):
        strict.wait_for_log(f'"request_id":"{name}"')
    lines = [json.loads(line) for line in strict.log.splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "logged-1"]
    assert line["status"] == 200
    assert line["completion_tokens"] == 1
    assert line["finish_reasons"] == ["length"]
    assert line["seconds"] > 0
    (line,) = [line for line in lines if line.get("request_id") == "logged-0"]
    assert line["path"].startswith("/a\n\x1b[31m")
    assert len(line["path"]) == 200
    wrong: list[Any] = [{"role": "user", "content": [{"type": "text", "text": [secret]}]}]
    headers = {"X-Request-Id": "logged-2"}
    refused = session.post(
        "/v1/chat/completions", json={**CHAT, "messages": wrong}, headers=headers
    )
    assert secret in refused.json()["error"]["message"]
    strict.wait_for_log('"request_id":"logged-2"')
    lines = [json.loads(line) for line in strict.log.splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "logged-2"]
    assert (line["error"], line["param"]) == ("invalid_value", "messages.0.content.0.text")
    assert secret not in strict.log
    assert not any(key in strict.log for key in KEYS)


def test_a_message_shows_only_the_beginning_of_what_was_sent() -> None:
    error = ApiError(400, "x" * 10_000, param="prompt").body()["error"]
    assert error["message"] == "x" * 2000 + " ... " + "x" * 2000
