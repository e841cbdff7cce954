"""Whose requests share cached beginnings of prompts: ``cached_tokens`` tells of nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import ServerProcess

pytestmark = pytest.mark.slow

OPTIONS = ("--max-num-seqs", "4", "--max-model-len", "512", "--kv-cache-memory", "16MiB")
# A block has 16 tokens; the last token of a prompt is always computed.
LENGTH, CACHED = 40, 32
_FIRST_TOKEN = count(3)


@pytest.fixture(scope="module")
def keyed(tiny_model: Path) -> Iterator[ServerProcess]:
    options = (*OPTIONS, "--served-model-name", "tiny", "--api-key", "one", "--api-key", "two")
    with ServerProcess(tiny_model, *options) as process:
        yield process.wait_ready()


@pytest.fixture
def prompt() -> list[int]:
    """One that no request has had before."""
    return [next(_FIRST_TOKEN)] * LENGTH


def _post(server: ServerProcess, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "tiny", "max_tokens": 2, "temperature": 0, **body}
    return httpx.post(f"{server.url}/v1/{path}", headers=headers, json=body, timeout=60)


def _cached(server: ServerProcess, key: str, prompt: list[int], **fields: Any) -> tuple[int, str]:
    """Tokens of the prompt that were cached, and the answer."""
    answer = _post(server, key, "completions", {"prompt": prompt, **fields}).json()
    details = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], answer["choices"][0]["text"]


def test_a_key_does_not_see_what_another_has_sent(keyed: ServerProcess, prompt: list[int]) -> None:
    first = _cached(keyed, "one", prompt)
    other = _cached(keyed, "two", prompt)
    assert first[0] == other[0] == 0
    again = _cached(keyed, "one", prompt), _cached(keyed, "two", prompt)
    assert [cached for cached, _ in again] == [CACHED, CACHED]
    assert {text for _, text in (first, other, *again)} == {first[1]}


def test_a_key_is_the_same_however_it_is_written(keyed: ServerProcess, prompt: list[int]) -> None:
    body = {"model": "tiny", "max_tokens": 1, "prompt": prompt}
    cached = []
    for header in ("Bearer one", "bearer   one", "BEARER one"):
        headers = {"Authorization": header}
        answer = httpx.post(f"{keyed.url}/v1/completions", headers=headers, json=body).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, CACHED, CACHED]


def test_a_salt_divides_the_requests_of_a_key(keyed: ServerProcess, prompt: list[int]) -> None:
    assert _cached(keyed, "one", prompt)[0] == 0
    assert _cached(keyed, "one", prompt, cache_salt="a")[0] == 0
    assert _cached(keyed, "one", prompt, cache_salt="b")[0] == 0
    assert _cached(keyed, "one", prompt, cache_salt="a")[0] == CACHED
    # Another key's salt of the same name is another salt.
    assert _cached(keyed, "two", prompt, cache_salt="a")[0] == 0
    # Nor does it help to write what comes of both into one of them.
    assert _cached(keyed, "two", prompt, cache_salt="onea")[0] == 0


def test_choices_and_prompts_of_a_request_share(keyed: ServerProcess, prompt: list[int]) -> None:
    assert _cached(keyed, "one", prompt, cache_salt="x")[0] == 0
    both: Any = [prompt, prompt]
    assert _cached(keyed, "one", both, cache_salt="x", n=2)[0] == 2 * CACHED


def test_chats_are_divided_too(keyed: ServerProcess) -> None:
    messages = [{"role": "user", "content": "What is an inference engine? " * 4}]

    def cached(key: str, **fields: Any) -> int:
        answer = _post(keyed, key, "chat/completions", {"messages": messages, **fields}).json()
        number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return number

    assert [cached("one"), cached("two"), cached("one", cache_salt="s")] == [0, 0, 0]
    assert cached("one") == cached("two") == cached("one", cache_salt="s") > 0


@pytest.mark.parametrize("salt", ["", 5, ["a"], {}])
def test_a_salt_is_a_text(keyed: ServerProcess, salt: Any) -> None:
    refused = _post(keyed, "one", "completions", {"prompt": "a", "cache_salt": salt})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"


def test_a_long_salt_costs_no_more_than_a_short_one(
    keyed: ServerProcess, prompt: list[int]
) -> None:
    salts = ["s" * 1_000_000, "s" * 999_999 + "t"]
    cached = [_cached(keyed, "one", prompt, cache_salt=salt)[0] for salt in (*salts, *salts)]
    assert cached == [0, 0, CACHED, CACHED]


def test_all_keys_may_share(tiny_model: Path, prompt: list[int]) -> None:
    options = (*OPTIONS, "--served-model-name", "tiny", "--api-key", "one", "--api-key", "two")
    with ServerProcess(tiny_model, *options, "--prefix-cache-sharing", "all") as process:
        server = process.wait_ready()
        assert _cached(server, "one", prompt)[0] == 0
        assert _cached(server, "two", prompt)[0] == CACHED
        assert _cached(server, "two", prompt, cache_salt="a")[0] == 0
        assert _cached(server, "one", prompt, cache_salt="a")[0] == CACHED
