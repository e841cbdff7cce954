"""Every endpoint, as the official client sees it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel
from serving import ServerProcess
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from engine_core import LLM, SamplingParams

pytestmark = pytest.mark.slow

MODEL = "tiny"
HELLO: list[Any] = [{"role": "user", "content": "What is an engine?"}]
PROMPTS = ["The quick brown fox", "What is", "as fast as it can. " * 20]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), max_model_len=1024, kv_cache_memory=2**24) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def post(server: ServerProcess) -> Any:
    with httpx.Client(base_url=server.url, timeout=60) as session:
        yield lambda path, body: session.post(path, json=body)


def _ids(choice: Any) -> list[int]:
    return list(choice.model_extra["token_ids"])


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    found = client.models.retrieve(MODEL)
    assert found == listed[0]
    assert found.model_extra == {"max_model_len": 1024, "input_modalities": ["text"]}
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; there is 'tiny'"):
        client.models.retrieve("other")


def test_completions_are_those_of_the_offline_engine(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, top_k=50, seed=7, n=3, max_tokens=24)
    expected = llm.generate(PROMPTS, params)
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPTS,
        n=3,
        seed=7,
        temperature=0.8,
        max_tokens=24,
        extra_body={"top_k": 50, "return_token_ids": True},
    )
    assert [choice.index for choice in answer.choices] == list(range(9))
    outputs = [output for result in expected for output in result.outputs]
    assert [_ids(choice) for choice in answer.choices] == [item.token_ids for item in outputs]
    assert [choice.text for choice in answer.choices] == [item.text for item in outputs]
    assert [choice.finish_reason for choice in answer.choices] == [
        item.finish_reason for item in outputs
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(result.prompt_token_ids) for result in expected)
    assert answer.usage.completion_tokens == sum(len(item.token_ids) for item in outputs)


def test_a_stream_has_the_same_text_as_a_whole_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "prompt": PROMPTS, "n": 2, "temperature": 1, "seed": 3}
    whole = client.completions.create(**options)
    texts = [""] * 6
    reasons: list[Any] = [None] * 6
    usage = None
    chunks = client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "nothing comes after the end"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_is_answered_as_offline(client: openai.OpenAI, llm: LLM) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is"}],
        },
        {"role": "assistant", "content": "An engine"},
        {"role": "user", "content": "it?"},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What\nis"},
        {"role": "assistant", "content": "An engine"},
        {"role": "user", "content": "it?"},
    ]
    (expected,) = llm.chat(plain, SamplingParams(temperature=0, max_tokens=24))
    options: dict[str, Any] = {**GREEDY, "messages": messages}
    extra = {"return_token_ids": True}
    answer = client.chat.completions.create(**options, extra_body=extra)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.outputs[0].text
    assert _ids(choice) == expected.outputs[0].token_ids
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == expected.prompt_token_ids

    streamed: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
    )
    assert streamed[0].choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for chunk in streamed for c in chunk.choices)
    assert text == choice.message.content
    assert [i for chunk in streamed for c in chunk.choices for i in _ids(c)] == _ids(choice)
    assert [chunk.usage for chunk in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].choices == []
    assert streamed[-1].usage is not None
    assert streamed[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in streamed}) == 1


def test_a_prompt_that_was_seen_comes_from_the_cache(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "prompt": "seen twice, " * 20, "max_tokens": 1}
    first = client.completions.create(**options).usage
    second = client.completions.create(**options).usage
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = second.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert first.prompt_tokens - 16 <= cached < first.prompt_tokens


def test_answers_and_chunks_keep_to_the_document(server: ServerProcess, post: Any) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()

    def check(value: Any, name: str) -> None:
        jsonschema.validate(value, {**document, "$ref": f"#/components/schemas/{name}"})

    chat = {**GREEDY, "messages": HELLO, "logprobs": True, "top_logprobs": 2, "n": 2}
    text = {**GREEDY, "prompt": ["a", "b"], "logprobs": 2, "echo": True, "return_token_ids": True}
    check(post("/v1/chat/completions", chat).json(), "ChatCompletionAnswer")
    check(post("/v1/completions", {**text, "prompt_logprobs": 1}).json(), "CompletionAnswer")
    more = {"stream": True, "stream_options": {"include_usage": True}}
    for event in _events(post("/v1/chat/completions", {**chat, **more}).text):
        check(event, "ChatChunkAnswer")
    for event in _events(post("/v1/completions", {**text, **more}).text):
        check(event, "CompletionChunkAnswer")
    check(post("/v1/completions", {**text, "n": 0}).json(), "ErrorAnswer")


def test_chat_logprobs_are_those_of_the_offline_engine(
    client: openai.OpenAI, llm: LLM, tokenizer: Tokenizer
) -> None:
    (expected,) = llm.chat(HELLO, SamplingParams(temperature=0, max_tokens=24, logprobs=3))
    answer = client.chat.completions.create(**GREEDY, messages=HELLO, logprobs=True, top_logprobs=3)
    reported = answer.choices[0].logprobs
    assert reported is not None
    assert reported.content is not None
    assert len(reported.content) == 24
    output = expected.outputs[0]
    assert output.logprobs is not None
    for token, entries, item in zip(
        output.token_ids, output.logprobs, reported.content, strict=True
    ):
        assert item.logprob == pytest.approx(entries[token].logprob, abs=1e-4)
        best = sorted(entries.values(), key=lambda entry: entry.rank)[:3]
        assert [top.logprob for top in item.top_logprobs] == pytest.approx(
            [entry.logprob for entry in best], abs=1e-4
        )
        assert item.bytes is not None
        assert bytes(item.bytes).decode(errors="replace") == tokenizer.decode(
            [token], skip_special_tokens=False
        )
    # Together the bytes are the text, characters of several tokens included.
    special = set(tokenizer.get_added_tokens_decoder())
    together = b"".join(
        bytes(item.bytes or ())
        for token, item in zip(output.token_ids, reported.content, strict=True)
        if token not in special
    )
    assert together.decode(errors="replace") == answer.choices[0].message.content


def test_echo_scores_the_prompt(client: openai.OpenAI, llm: LLM) -> None:
    prompt = PROMPTS[0]
    (expected,) = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=2)
    )
    answer = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, max_tokens=0, logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text == prompt
    assert choice.finish_reason == "length"
    reported = choice.logprobs
    assert reported is not None
    assert reported.tokens is not None
    assert reported.token_logprobs is not None
    assert "".join(reported.tokens) == prompt
    assert reported.text_offset == [
        len("".join(reported.tokens[:index])) for index in range(len(reported.tokens))
    ]
    assert reported.token_logprobs[0] is None
    assert expected.prompt_logprobs is not None
    scores = [
        entries[token].logprob
        for token, entries in zip(expected.prompt_token_ids, expected.prompt_logprobs, strict=True)
        if entries is not None
    ]
    assert reported.token_logprobs[1:] == pytest.approx(scores, abs=1e-4)
    streamed = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, max_tokens=2, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text.startswith(prompt)


EMOJI = "Emoji 🦀𓀀 crab ok"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_stand_where_their_text_does(
    client: openai.OpenAI, tokenizer: Tokenizer, stream: bool
) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": EMOJI, "echo": True, "logprobs": 0}
    options |= {"seed": 1, "max_tokens": 20, "extra_body": {"guided_choice": [" and 𓀀 crab"]}}
    if stream:
        chunks = list(client.completions.create(**options, stream=True))
        pieces = [chunk.choices[0] for chunk in chunks]
    else:
        pieces = client.completions.create(**options).choices
    text = EMOJI + " and 𓀀 crab"
    assert "".join(piece.text for piece in pieces) == text
    reported = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    tokens = [token for item in reported for token in item.tokens or ()]
    offsets = [offset for item in reported for offset in item.text_offset or ()]
    # The tokenizer's own offsets: each byte of a character stands where the character does.
    prompt, completion = tokenizer.encode(EMOJI), tokenizer.encode(" and 𓀀 crab")
    expected = [start for start, _ in prompt.offsets]
    expected += [len(EMOJI) + start for start, _ in completion.offsets]
    assert tokens[-1] == "<|im_end|>"
    assert offsets == [*expected, len(text)]
    assert offsets[tokens.index("bytes:\\x80") + 1] == 7
    crab = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x80"]
    begin = tokens.index(crab[0])
    assert tokens[begin : begin + 4] == crab
    assert "".join(tokens[:begin]) == "Emoji "


def test_top_logprobs_lose_no_token_and_have_the_chosen_one(
    client: openai.OpenAI, llm: LLM
) -> None:
    params = SamplingParams(seed=5, max_tokens=24, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    (expected,) = llm.generate(EMOJI, params)
    options: dict[str, Any] = {"model": MODEL, "prompt": EMOJI, "echo": True, "seed": 5}
    options |= {"max_tokens": 24, "extra_body": {"ignore_eos": True}}
    reported = client.completions.create(**options, logprobs=5).choices[0].logprobs
    assert expected.prompt_logprobs is not None
    output = expected.outputs[0]
    entries = [*expected.prompt_logprobs[1:], *(output.logprobs or ())]
    assert reported is not None
    assert reported.top_logprobs is not None
    assert reported.tokens is not None
    assert reported.token_logprobs is not None
    assert reported.top_logprobs[0] is None
    sizes = set()
    for top, tokens, name, value in zip(
        reported.top_logprobs[1:],
        entries,
        reported.tokens[1:],
        reported.token_logprobs[1:],
        strict=True,
    ):
        assert tokens is not None
        assert sorted(top.values()) == pytest.approx(
            sorted(entry.logprob for entry in tokens.values()), abs=1e-4
        )
        assert top[name] == value
        assert "\ufffd" not in "".join(top)
        sizes.add(len(top))
    assert sizes == {5, 6}, "the token that came is sometimes among the most probable"
    assert any(name.startswith("bytes:") for top in reported.top_logprobs[1:] for name in top)
    alone = client.completions.create(**options, logprobs=0).choices[0].logprobs
    assert alone is not None
    assert alone.top_logprobs is not None
    assert [list(top) for top in alone.top_logprobs[1:]] == [[name] for name in alone.tokens[1:]]


@pytest.fixture(scope="module")
def spaced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A server whose tokenizer is in the layout of Llama 2's: a beginning-of-sequence token, words
    that begin with their space, and a decoder that drops the first one.
    """
    special = ["<unk>", "<s>", "</s>"]
    parts = [*"▁thefox", "th", "the", "▁the", "fo", "fox", "▁fox"]
    vocabulary = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(parts)]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
    backend = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(vocabulary)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path_factory.mktemp("spaced")
    backend.save(str(folder / "tokenizer.json"))
    template = "<s>{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "eos_token": "</s>", "chat_template": template})
    )
    options = ["--kv-cache-memory", "16MiB", "--served-model-name", MODEL]
    with (
        ServerProcess(tiny_model, *options, "--tokenizer", str(folder)).wait_ready() as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_tokens_of_a_sentencepiece_layout_have_their_spaces(spaced: openai.OpenAI) -> None:
    def scored(prompt: Any) -> tuple[str, Any]:
        (choice,) = spaced.completions.create(
            model=MODEL,
            prompt=prompt,
            echo=True,
            logprobs=0,
            max_tokens=2,
            extra_body={"allowed_token_ids": [fox], "prompt_logprobs": 0},
        ).choices
        assert choice.logprobs is not None
        return choice.text, choice

    ids = httpx.post(
        str(spaced.base_url.join("../tokenize")), json={"model": MODEL, "prompt": "the fox  the"}
    ).json()["tokens"]
    beginning, the, fox, space, _ = ids
    text, choice = scored("the fox  the")
    assert text == "the fox  the fox fox"
    names = ["<s>", " the", " fox", " ", " the", " fox", " fox"]
    assert choice.logprobs.tokens == names
    # The beginning of the sequence is not in the text.
    assert choice.logprobs.text_offset == [0, 0, 3, 7, 8, 12, 16]
    of_prompt = choice.model_extra["prompt_logprobs"][1:]
    assert [next(iter(at.values()))["decoded_token"] for at in of_prompt] == names[1:5]
    # Here it is: the text of token ids is theirs.
    text, choice = scored([beginning, the, space, fox])
    assert text == "<s> the  fox fox fox"
    assert choice.logprobs.tokens == ["<s>", " the", " ", " fox", " fox", " fox"]
    assert choice.logprobs.text_offset == [0, 3, 7, 8, 12, 16]
    # It was written.
    text, choice = scored("<s>the")
    assert choice.logprobs.tokens[:2] == ["<s>", "<s>"]
    assert choice.logprobs.text_offset[:3] == [0, 0, 3]
    assert text.startswith("<s>the")
    # Without its prompt a text begins with its first token.
    (choice,) = spaced.completions.create(
        model=MODEL,
        prompt="the",
        logprobs=0,
        max_tokens=2,
        extra_body={"allowed_token_ids": [fox]},
    ).choices
    assert choice.text == " fox fox"
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 4]

    (answer,) = spaced.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        logprobs=True,
        top_logprobs=1,
        max_tokens=1,
        extra_body={"allowed_token_ids": [fox]},
    ).choices
    assert answer.logprobs is not None
    assert answer.logprobs.content is not None
    (item,) = answer.logprobs.content
    assert (item.token, item.bytes) == (" fox", list(b" fox"))
    assert len(item.top_logprobs) == 1


def test_nothing_is_completed_where_a_prompt_is_scored(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[:2], "echo": True, "logprobs": 1}
    options |= {"max_tokens": 0, "extra_body": {"return_token_ids": True}}
    answer = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    count = sum(len(tokenizer.encode(prompt).ids) for prompt in PROMPTS[:2])
    for usage in (answer.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (count, 0)
        assert usage.total_tokens == count
    assert [_ids(choice) for choice in answer.choices] == [[], []]


def test_a_stream_tells_the_prompts_token_ids_once(
    client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    options: dict[str, Any] = {**GREEDY, "prompt": PROMPTS[:2], "n": 2}
    found: dict[int, list[list[int]]] = {}
    for chunk in client.completions.create(
        **options, stream=True, extra_body={"return_token_ids": True}
    ):
        for choice in chunk.choices:
            extra = choice.model_extra or {}
            found.setdefault(choice.index, []).append(extra.get("prompt_token_ids"))
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS[:2]]
    for index, pieces in found.items():
        assert pieces == [ids[index // 2], *[None] * (len(pieces) - 1)]
    assert len(found) == 4


def test_token_ids_are_prompts_too(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[0]).ids
    text = client.completions.create(**GREEDY, prompt=PROMPTS[0])
    tokens = client.completions.create(**GREEDY, prompt=ids)
    several = client.completions.create(**GREEDY, prompt=[ids, ids[:3]], echo=True)
    assert tokens.choices[0].text == text.choices[0].text
    assert several.choices[0].text == PROMPTS[0] + text.choices[0].text
    with pytest.raises(openai.BadRequestError, match=r"320 at position 1 .* vocabulary of 320"):
        client.completions.create(**GREEDY, prompt=[1, 320])


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    full = client.completions.create(**GREEDY, prompt=PROMPTS[0]).choices[0].text
    stop = full[8:10]
    answer = client.completions.create(**GREEDY, prompt=PROMPTS[0], stop=[stop, "never there"])
    (choice,) = answer.choices
    assert choice.text == full[: full.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra == {"stop_reason": stop}


def test_biases_and_penalties_reach_the_sampler(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=16, logit_bias={65: 100.0}, frequency_penalty=2.0, min_p=0.1
    )
    (expected,) = llm.generate(PROMPTS[1], params)
    answer = client.completions.create(
        model=MODEL,
        prompt=PROMPTS[1],
        temperature=0,
        max_tokens=16,
        logit_bias={"65": 100},
        frequency_penalty=2,
        extra_body={"min_p": 0.1, "return_token_ids": True},
    )
    assert _ids(answer.choices[0]) == expected.outputs[0].token_ids
    only = client.completions.create(
        **GREEDY, prompt="a", extra_body={"allowed_token_ids": [70], "return_token_ids": True}
    )
    assert set(_ids(only.choices[0])) == {70}


def test_a_seed_repeats_what_comes(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 16}
    answers = [
        client.chat.completions.create(**options, seed=seed).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_chat_without_max_tokens_may_fill_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_the_checkpoints_own_minimum_gives_way_to_what_a_request_says(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Nearly every token ends a sequence, so that one ends as soon as it may."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    ends = [*range(2, 320)]
    recommended = {"do_sample": False, "min_new_tokens": 20, "eos_token_id": ends}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    options = ["--max-num-seqs", "4", "--kv-cache-memory", "16MiB", "--served-model-name", MODEL]
    wanted: list[tuple[dict[str, Any], int, str]] = [
        ({"max_tokens": 30}, 21, "stop"),
        ({"max_tokens": 3}, 3, "length"),
        ({}, 16, "length"),
        ({"min_tokens": 0}, 1, "stop"),
        ({"min_tokens": 5}, 6, "stop"),
    ]
    with (
        ServerProcess(folder, *options).wait_ready() as server,
        httpx.Client(base_url=server.url, timeout=60) as session,
    ):
        for fields, count, reason in wanted:
            body = {"model": MODEL, "prompt": "What is", **fields}
            answer = session.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == count
            assert answer["choices"][0]["finish_reason"] == reason
        body = {"model": MODEL, "messages": HELLO}
        answer = session.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 21
        body = {"model": MODEL, "prompt": "What is", "max_tokens": 3, "min_tokens": 4}
        refused = session.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert "min_tokens (4) is above max_tokens (3)" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "maximum": 99, "minimum": 0},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 200,
        "seed": 1,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": schema},
        },
    }
    if stream:
        chunks = client.chat.completions.create(**options, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        text = client.chat.completions.create(**options).choices[0].message.content or ""
    jsonschema.validate(json.loads(text), schema)


def test_texts_are_guided_by_vllms_names(client: openai.OpenAI) -> None:
    def text(**guide: Any) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="a", max_tokens=64, seed=1, extra_body=guide
        )
        return answer.choices[0].text

    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert text(guided_regex="[0-9]{3}-[a-c]{2}").replace("-", "")[:3].isdigit()
    assert text(guided_grammar='start: "x" ("y" | "z")') in ("xy", "xz")
    assert json.loads(text(guided_json={"enum": [1, "two"]})) in (1, "two")
    with pytest.raises(openai.BadRequestError, match="guided_regex"):
        text(guided_regex="a", guided_choice=["b"])
    with pytest.raises(openai.BadRequestError, match="regex"):
        text(guided_regex="(")


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_a_request_has_a_time_limit_of_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(
            model=MODEL,
            prompt="a",
            max_tokens=1000,
            extra_body={"ignore_eos": True, "timeout": 0.01},
        )
    assert refused.value.status_code == 408
    assert refused.value.code == "timeout"
    assert "ended after 0.01 s, its limit" in refused.value.message


def test_min_tokens_that_cannot_be_kept_are_refused_before_anything_runs(
    server: ServerProcess, client: openai.OpenAI, tokenizer: Tokenizer
) -> None:
    prompts = ["a", PROMPTS[2]]
    most = 1024 - len(tokenizer.encode(PROMPTS[2]).ids)
    server.wait_for("engine_core_requests_running", 0)
    aborted = server.metric("engine_core_aborted_sequences_total")
    options: dict[str, Any] = {**GREEDY, "max_tokens": 2000}
    with pytest.raises(openai.BadRequestError, match=f"min_tokens {most + 1} cannot be kept") as no:
        client.completions.create(**options, prompt=prompts, extra_body={"min_tokens": most + 1})
    assert no.value.param == "min_tokens"
    answer = client.completions.create(
        **options, prompt=prompts, extra_body={"min_tokens": most, "return_token_ids": True}
    )
    first, second = answer.choices
    assert len(_ids(first)) >= most
    assert (len(_ids(second)), second.finish_reason) == (most, "length")
    assert server.metric("engine_core_aborted_sequences_total") == aborted


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_tool_that_must_be_called_is(client: openai.OpenAI, choice: Any) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 4,
    }
    answer = client.chat.completions.create(**options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])

    name, arguments, last = "", "", None
    for chunk in client.chat.completions.create(**options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.index == 0
            assert piece.function is not None
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
        last = chunk.choices[0].finish_reason
    assert (name, last) == ("get_weather", "tool_calls")
    assert json.loads(arguments) == json.loads(call.function.arguments)

    said: list[Any] = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    again = client.chat.completions.create(
        **GREEDY, messages=said, tools=[WEATHER], tool_choice="none"
    )
    assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_that_a_stop_string_cut_off_is_not_to_be_run(
    client: openai.OpenAI, choice: Any, stream: bool
) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 300, "seed": 4}
    options |= {"tools": [WEATHER], "tool_choice": choice, "stop": ["city"]}
    if stream:
        last = list(client.chat.completions.create(**options, stream=True))[-1].choices[0]
    else:
        last = client.chat.completions.create(**options).choices[0]
    assert last.finish_reason == "stop"
    assert last.model_extra == {"stop_reason": "city"}


def test_tools_that_must_not_be_called_leave_room_for_json(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 64, "seed": 1}
    options |= {"tools": [WEATHER], "tool_choice": "none"}
    schema = {"enum": ["sun", "rain"]}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    (choice,) = client.chat.completions.create(**options, response_format=form).choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content or "") in ("sun", "rain")


class Forecast(BaseModel):
    sunny: bool


CALLED: dict[str, Any] = {
    "tools": [openai.pydantic_function_tool(Forecast)],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
# A text that ends: the client raises on one that its limit cuts off.
YES: dict[str, Any] = {"extra_body": {"guided_choice": ["yes"]}}


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
@pytest.mark.parametrize("way", ["create", "parse", "stream"])
@pytest.mark.parametrize("asked", [YES, CALLED, {"response_format": Forecast}])
def test_a_message_as_the_client_dumps_it_can_be_sent_back(
    client: openai.OpenAI, way: str, asked: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 300, "seed": 4}
    completions: Any = client.chat.completions
    if way == "create":
        if "response_format" in asked:
            schema = {"name": "forecast", "schema": Forecast.model_json_schema()}
            asked = {"response_format": {"type": "json_schema", "json_schema": schema}}
        answer = completions.create(**options, **asked)
    elif way == "parse":
        answer = completions.parse(**options, **asked)
    else:
        with completions.stream(**options, **asked) as stream:
            answer = stream.get_final_completion()
    message = answer.choices[0].message
    assert message.content or message.tool_calls
    bare: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        bare["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    prompts = []
    for said in (bare, message.model_dump(), message.to_dict(), message):
        again = completions.create(
            model=MODEL,
            messages=[*HELLO, said, *HELLO],
            max_tokens=1,
            extra_body={"return_token_ids": True},
        )
        prompts.append(again.model_extra["prompt_token_ids"])
    assert prompts == [prompts[0]] * 4


def test_tokenize_and_detokenize(post: Any, tokenizer: Tokenizer) -> None:
    text = "The quick <|im_end|> dög"
    ids = tokenizer.encode(text).ids
    answer = post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert answer == {
        "count": len(ids),
        "max_model_len": 1024,
        "tokens": ids,
        "token_strs": [tokenizer.id_to_token(token) for token in ids],
    }
    assert post("/detokenize", {"model": MODEL, "tokens": ids}).json() == {"prompt": text}
    chat = post("/tokenize", {"model": MODEL, "messages": HELLO}).json()["tokens"]
    assert tokenizer.decode(chat, skip_special_tokens=False) == (
        "<|im_start|>user\nWhat is an engine?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert post("/detokenize", {"model": MODEL, "tokens": [999]}).status_code == 400


def test_requests_together_are_the_same_as_alone(client: openai.OpenAI) -> None:
    def ask(index: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=f"number {index}", seed=index, max_tokens=20
        )
        return answer.choices[0].text

    alone = [ask(index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_the_page_and_its_headers(server: ServerProcess) -> None:
    page = httpx.get(server.url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["x-frame-options"] == "DENY"
    script = httpx.get(f"{server.url}/app.js")
    assert script.headers["content-type"].startswith("text/javascript")
    again = httpx.get(f"{server.url}/app.js", headers={"If-None-Match": script.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{server.url}/docs").status_code == 404
    assert httpx.get(f"{server.url}/../pages.py").status_code == 404


def test_metrics_count_what_was_done(server: ServerProcess, client: openai.OpenAI) -> None:
    requests = {"path": "/v1/completions", "status": "200"}

    def figures() -> list[float]:
        return [
            server.metric("engine_core_finished_sequences_total", finish_reason="length"),
            server.metric("engine_core_time_to_first_token_seconds_count"),
            server.metric("engine_core_inter_token_latency_seconds_count"),
            server.metric("engine_core_generation_tokens_total"),
            server.metric("engine_core_http_requests_total", **requests),
        ]

    before = figures()
    client.completions.create(**GREEDY, prompt=PROMPTS[0], n=2, extra_body={"ignore_eos": True})
    server.wait_for("engine_core_requests_running", 0)
    # The request is counted when its handler has ended, after its answer.
    server.wait_for("engine_core_http_requests_total", before[-1] + 1, **requests)
    assert [after - was for after, was in zip(figures(), before, strict=True)] == [2, 1, 46, 48, 1]


def test_requests_are_counted_by_their_route(server: ServerProcess) -> None:
    def counted(path: str, status: int) -> float:
        return server.metric("engine_core_http_requests_total", path=path, status=str(status))

    asked = [
        ("GET", "/", "/", 200),
        ("GET", "/app.js", "/", 200),
        ("GET", "/openapi.json", "/openapi.json", 200),
        ("GET", "/v1/models/a/b", "/v1/models/{model}", 404),
        ("GET", "/v1/completions", "/v1/completions", 405),
        ("GET", "/nothing", "unknown", 404),
    ]
    for method, url, path, status in asked:
        before = counted(path, status)
        assert httpx.request(method, server.url + url).status_code == status
        server.wait_for(
            "engine_core_http_requests_total", before + 1, path=path, status=str(status)
        )


def test_a_request_is_known_by_its_id(server: ServerProcess) -> None:
    given = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "abc-123"})
    assert given.headers["x-request-id"] == "abc-123"
    server.wait_for_log('request_id="abc-123"')
    odd = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "a b\tc"})
    assert len(odd.headers["x-request-id"]) == 32
