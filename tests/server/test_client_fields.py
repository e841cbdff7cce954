"""Fields that clients send beside OpenAI's first ones: what each does, or that it does nothing."""

from __future__ import annotations

import json
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import ServerProcess, write_certificate
from tokenizers import Tokenizer, processors

from engine_core.configs import EngineConfig
from engine_core.errors import ConfigError
from engine_core.server import run_server
from engine_core.server.settings import ServerSettings

pytestmark = pytest.mark.slow

MODEL = "tiny"
HELLO: list[Any] = [{"role": "user", "content": "What is an engine?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
TURN = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def post(server: ServerProcess) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, timeout=60) as session:

        def send(path: str, **body: Any) -> dict[str, Any]:
            response = session.post(path, json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        yield send


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> str:
    """The answer to the conversation without any further field."""
    text = client.chat.completions.create(**GREEDY, messages=HELLO).choices[0].message.content
    assert text
    return text


def _prompt(post: Any, tokenizer: Tokenizer, messages: list[Any], **more: Any) -> str:
    """The prompt that a chat is answered to."""
    more = {"max_tokens": 1, "return_token_ids": True, **more}
    ids = post("/v1/chat/completions", messages=messages, **more)["prompt_token_ids"]
    return tokenizer.decode(ids, skip_special_tokens=False)


LABELS: dict[str, Any] = {
    "metadata": {"run": "7"},
    "store": True,
    "user": "somebody",
    "safety_identifier": "a",
    "service_tier": "flex",
    "prompt_cache_key": "b",
    "prompt_cache_retention": "24h",
    "session_id": "c",
    "stream_interval": 4,
    "guided_decoding_backend": "auto",
    # What vLLM's own client classes send if nothing is asked for.
    "spaces_between_special_tokens": True,
    "length_penalty": 1.0,
    "early_stopping": False,
    "truncation_side": "left",
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs", "request_id", "logprob_token_ids")),
}


def test_bookkeeping_changes_nothing(client: openai.OpenAI, plain: str) -> None:
    chat: dict[str, Any] = {"verbosity": "low", "reasoning_effort": "low"}
    answer = client.chat.completions.create(**GREEDY, messages=HELLO, **chat, extra_body=LABELS)
    assert answer.choices[0].message.content == plain
    text = client.completions.create(**GREEDY, prompt="What is").choices[0].text
    labelled = client.completions.create(**GREEDY, prompt="What is", extra_body=LABELS)
    assert labelled.choices[0].text == text


@pytest.mark.parametrize(
    "more",
    [
        {"spaces_between_special_tokens": False},
        {"length_penalty": 1.5},
        {"early_stopping": True},
        {"truncation_side": "right"},
        {"logprob_token_ids": [1]},
        {"thinking_token_budget": 5},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
        {"kv_transfer_params": {"do_remote_decode": True}},
        {"vllm_xargs": {"a": 1}},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_refused(server: ServerProcess, more: Any) -> None:
    (field,) = more
    for path, body in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": HELLO}),
    ):
        response = httpx.post(f"{server.url}/v1/{path}", json={**body, **more}, timeout=60)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"].split(".")[0]) == ("invalid_value", field)


def test_messages_may_have_further_fields(post: Any, tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bare: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    control = {"type": "ephemeral"}
    # What LiteLLM, OpenRouter's clients and Anthropic's habits add.
    dressed: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": control}],
        },
        {
            **bare[1],
            "tool_calls": [],
            "provider_specific_fields": {"refusal": None},
            "annotations": [{"type": "url_citation"}],
            "reasoning_details": [{}],
        },
        {**bare[2], "tool_calls": [{**call, "index": 0, "provider_specific_fields": None}]},
        {**bare[3], "cache_control": control},
        {**bare[4], "id": "5"},
    ]
    assert _prompt(post, tokenizer, dressed) == _prompt(post, tokenizer, bare)


def test_seed_minus_one_is_none(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 24, "seed": -1}
    texts = {client.completions.create(**options).choices[0].text for _ in range(4)}
    assert len(texts) > 1, "each draws a seed of its own"


def test_top_p_of_zero_is_greedy(client: openai.OpenAI, plain: str) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, temperature=5, top_p=0, seed=seed
        )
        assert answer.choices[0].message.content == plain


def test_the_model_need_not_be_named(post: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}),
    ):
        assert post(path, **body)["model"] == MODEL
    tokens = post("/tokenize", prompt="a")["tokens"]
    assert post("/detokenize", tokens=tokens)["prompt"] == "a"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"choice": ["left"]}, "left"),
        ({"regex": "[a]{3}"}, "aaa"),
        ({"regex": "b", "disable_any_whitespace": False, "whitespace_pattern": None}, "b"),
        ({"json": {"const": "x"}}, '"x"'),
        ({"grammar": 'start: "so"'}, "so"),
        ({"json_object": False}, None),
    ],
)
def test_structured_outputs_are_guided(
    client: openai.OpenAI, plain: str, asked: Any, text: str | None
) -> None:
    answer = client.chat.completions.create(
        **GREEDY, messages=HELLO, extra_body={"structured_outputs": asked}
    )
    assert answer.choices[0].message.content == (plain if text is None else text)


@pytest.mark.parametrize("end", ["An engine", "An engine is  "])
def test_a_last_message_is_continued(
    client: openai.OpenAI, post: Any, tokenizer: Tokenizer, end: str
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": end}]
    prompt = f"<|im_start|>user\nWhat is an engine?<|im_end|>\n{TURN}{end}"
    more: dict[str, Any] = {"continue_final_message": True}
    assert _prompt(post, tokenizer, messages, **more) == prompt
    # As vLLM's clients must say it.
    assert _prompt(post, tokenizer, messages, **more, add_generation_prompt=False) == prompt
    tokens = post("/tokenize", messages=messages, **more)["tokens"]
    assert tokens == tokenizer.encode(prompt, add_special_tokens=False).ids
    expected = client.completions.create(**GREEDY, prompt=tokens).choices[0].text
    options: dict[str, Any] = {**GREEDY, "messages": messages}
    more["echo"] = True
    whole = client.chat.completions.create(**options, extra_body=more)
    assert whole.choices[0].message.content == end + expected
    chunks = list(client.chat.completions.create(**options, extra_body=more, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == end + expected


def test_only_the_models_own_message_is_echoed(client: openai.OpenAI, plain: str) -> None:
    answer = client.chat.completions.create(**GREEDY, messages=HELLO, extra_body={"echo": True})
    assert answer.choices[0].message.content == plain


@pytest.mark.parametrize("n", [1, 2])
def test_usage_goes_on_with_each_chunk(client: openai.OpenAI, n: int) -> None:
    more: Any = {"include_usage": True, "continuous_usage_stats": True}
    prompt = {"completions": {"prompt": "What is"}, "chat.completions": {"messages": HELLO}}
    for name, body in prompt.items():
        create: Any = client.completions if name == "completions" else client.chat.completions
        options = {**GREEDY, **body, "n": n, "seed": 1, "temperature": 1}
        chunks = list(create.create(**options, stream=True, stream_options=more))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert 0 < counts[0] < counts[-1] == 8 * n
        (total,) = {chunk.usage.prompt_tokens for chunk in chunks}
        assert total == create.create(**options).usage.prompt_tokens


def test_a_chats_prompt_is_scored_as_a_text_is(client: openai.OpenAI, post: Any) -> None:
    tokens = post("/tokenize", messages=HELLO)["tokens"]
    text = post("/v1/completions", prompt=tokens, max_tokens=1, prompt_logprobs=2)
    chat = client.chat.completions.create(
        **GREEDY, messages=HELLO, extra_body={"prompt_logprobs": 2}
    )
    assert chat.model_extra is not None
    found = chat.model_extra["prompt_logprobs"]
    assert [None if at is None else set(at) for at in found] == [
        None if at is None else set(at) for at in text["choices"][0]["prompt_logprobs"]
    ]
    assert [str(token) in at for token, at in zip(tokens[1:], found[1:], strict=True)] == [True] * (
        len(tokens) - 1
    )


def test_a_prompt_is_cut_to_its_end(post: Any) -> None:
    tokens = post("/tokenize", messages=HELLO)["tokens"]
    more = {"max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 5}
    chat = post("/v1/chat/completions", messages=HELLO, **more)
    assert chat["prompt_token_ids"] == tokens[-5:]
    for prompt in (tokens, "The quick brown fox"):
        ids = tokens if prompt is tokens else post("/tokenize", prompt=prompt)["tokens"]
        (text,) = post("/v1/completions", prompt=prompt, echo=True, **more)["choices"]
        assert text["prompt_token_ids"] == ids[-5:]
        echoed = post("/detokenize", tokens=ids[-5:])["prompt"]
        assert text["text"].startswith(echoed)
    more["truncate_prompt_tokens"] = -1
    (text,) = post("/v1/completions", prompt=[1] * 5000 + [2], **more)["choices"]
    # All but one token of the model's length.
    assert text["prompt_token_ids"] == [1] * 1022 + [2]


def test_tokens_are_named_by_their_ids(client: openai.OpenAI) -> None:
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    chat = client.chat.completions.create(
        **GREEDY, messages=HELLO, logprobs=True, top_logprobs=2, extra_body=more
    ).choices[0]
    assert chat.model_extra is not None
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    names = [f"token_id:{token}" for token in chat.model_extra["token_ids"]]
    assert [item.token for item in chat.logprobs.content] == names
    assert all(item.top_logprobs[0].token == item.token for item in chat.logprobs.content)
    text = client.completions.create(**GREEDY, prompt="a", logprobs=1, extra_body=more).choices[0]
    assert text.model_extra is not None
    assert text.logprobs is not None
    names = [f"token_id:{token}" for token in text.model_extra["token_ids"]]
    assert text.logprobs.tokens == names
    assert text.logprobs.top_logprobs is not None
    assert [list(top) for top in text.logprobs.top_logprobs] == [[name] for name in names]


def test_paths_may_end_with_a_slash(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as session:
        body = {"prompt": "a", "max_tokens": 1}
        assert session.post("/v1/completions/", json=body).status_code == 200
        for path in ("/v1/models/", "/health/", "/tokenizer_info/", "/ping/"):
            assert session.get(path).json() == session.get(path.rstrip("/")).json()


def test_load_and_ping(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as session:
        assert session.get("/ping").json() == {"status": "ready"}
        assert session.get("/docs").status_code == 404
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8}

        def load() -> int:
            with session.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                next(answer.iter_bytes())
                found: int = session.get("/load").json()["server_load"]
                return found

        # On a busy machine it may be complete before it is asked for.
        assert 1 in (load() for _ in range(10))


def test_the_tokenizer_is_described(server: ServerProcess, tiny_model: Path) -> None:
    given = json.loads((tiny_model / "tokenizer_config.json").read_text())
    assert httpx.get(f"{server.url}/tokenizer_info").json() == {
        "eos_token": given["eos_token"],
        "chat_template": given["chat_template"],
        "vocab_size": 320,
        "model_max_length": 1024,
    }


# A template with every switch, and one that trims what is said.
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}|{% endfor %}"
    "{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }},{{ verbosity }}"
)


@pytest.fixture(scope="module")
def special(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a template of its own, that adds a token before a text, over HTTPS."""
    folder = tmp_path_factory.mktemp("special")
    model = shutil.copytree(tiny_model, folder / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 0)]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    (folder / "template.jinja").write_text(TEMPLATE)
    certificate, key = write_certificate(folder)
    options = ["--max-model-len", "1024", "--kv-cache-memory", "16MiB", "--api-docs"]
    options += ["--chat-template", str(folder / "template.jinja")]
    options += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with ServerProcess(model, *options) as process:
        process.verify = ssl.create_default_context(cafile=certificate)
        yield process.wait_ready()


@pytest.fixture(scope="module")
def secure(special: ServerProcess) -> Iterator[httpx.Client]:
    assert special.url.startswith("https://")
    with httpx.Client(base_url=special.url, verify=special.verify, timeout=60) as session:
        yield session


def test_https_answers_whole_and_in_a_stream(secure: httpx.Client) -> None:
    client = openai.OpenAI(
        base_url=f"{secure.base_url}/v1", api_key="none", max_retries=0, http_client=secure
    )
    options: dict[str, Any] = {"model": "model", "prompt": "What", "max_tokens": 40}
    whole = client.completions.create(**options, temperature=0).choices[0].text
    chunks = client.completions.create(**options, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    with pytest.raises(openai.BadRequestError, match="stream_options needs stream"):
        client.completions.create(**options, stream_options={})


@pytest.mark.parametrize(
    ("fields", "switches"),
    [
        ({}, ",,,"),
        ({"reasoning_effort": "high"}, "high,True,True,"),
        ({"reasoning_effort": "max"}, "max,True,True,"),
        ({"reasoning_effort": "none", "verbosity": "low"}, "none,False,False,low"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            "none,False,True,",
        ),
    ],
)
def test_effort_is_a_switch_of_the_template(
    secure: httpx.Client, fields: dict[str, Any], switches: str
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": " so ", "reasoning": "why"}]
    chat = {"messages": messages, **fields}
    tokens = secure.post("/tokenize", json=chat).json()["tokens"]
    text = secure.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == f"[user] What is an engine?|[assistant] so(why)|{switches}"
    body = {**chat, "max_tokens": 1, "return_token_ids": True}
    answer = secure.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == tokens


def test_other_services_hand_thoughts_and_switches_on(secure: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "so", "reasoning": "why"}, *HELLO]
    chat = {"messages": messages, "reasoning_effort": "high", "verbosity": "low"}
    expected = secure.post("/tokenize", json=chat).json()["count"]
    thoughts: Any = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}]}]
    response = {
        "input": [*HELLO, *thoughts, {"role": "assistant", "content": "so"}, *HELLO],
        "reasoning": {"effort": "high"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 1,
    }
    usage = secure.post("/v1/responses", json=response).json()["usage"]
    assert usage["input_tokens"] == expected
    blocks = [{"type": "thinking", "thinking": "why", "signature": ""}]
    message = {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [*blocks, {"type": "text", "text": "so"}]},
            *HELLO,
        ],
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "high"},
        "chat_template_kwargs": {"verbosity": "low"},
    }
    counted = secure.post("/v1/messages/count_tokens", json=message).json()
    assert counted == {"input_tokens": expected}


def test_a_template_that_trims_what_is_continued(secure: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": " so  "}]
    chat = {"messages": messages, "continue_final_message": True}
    tokens = secure.post("/tokenize", json=chat).json()["tokens"]
    text = secure.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "[user] What is an engine?|[assistant] so"


def test_special_tokens_of_the_tokenizer_are_added_as_asked(secure: httpx.Client) -> None:
    more = {"max_tokens": 1, "return_token_ids": True}
    for asked, begins in ((None, False), (False, False), (True, True)):
        chat = {"messages": HELLO, "add_special_tokens": asked}
        tokens = secure.post("/tokenize", json=chat).json()["tokens"]
        answer = secure.post("/v1/chat/completions", json={**chat, **more}).json()
        assert answer["prompt_token_ids"] == tokens
        assert (tokens[0] == 0) == begins
    for asked, begins in ((None, True), (False, False), (True, True)):
        text = {"prompt": "What", "add_special_tokens": asked}
        tokens = secure.post("/tokenize", json=text).json()["tokens"]
        (choice,) = secure.post("/v1/completions", json={**text, **more}).json()["choices"]
        assert choice["prompt_token_ids"] == tokens
        assert (tokens[0] == 0) == begins


def test_docs_and_the_own_template_are_shown(secure: httpx.Client) -> None:
    assert secure.get("/tokenizer_info").json()["chat_template"] == TEMPLATE
    assert "/openapi.json" in secure.get("/docs").text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chat_template": "nowhere.jinja"}, "nowhere.jinja is no template, and no file"),
        ({"chat_template": "{% for x in"}, "chat_template: .*not valid jinja"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile is of no use without ssl_certfile"),
        ({"ssl_certfile": __file__}, "cannot be used: .*PEM"),
    ],
)
def test_options_are_refused_before_the_model_is_loaded(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_server("no-model", EngineConfig(), ServerSettings(**options))
