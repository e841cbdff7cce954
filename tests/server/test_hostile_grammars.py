"""Grammars made to harm a server: each is served or refused by name, and nobody else notices."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
from attacking import Clock, wait_until
from random_examples import FULL
from serving import ServerProcess
from slow_llama import OPTIONS as SLOW

pytestmark = pytest.mark.slow

DEPTH = 2750


def chain(link: str, names: int) -> str:
    links = "\n".join(link.format(i, i + 1) for i in range(names))
    return f"start: {link[0]}0\n{links}\n{link[0]}{names}: "


def keys(count: int) -> list[str]:
    return [f"k{i}" for i in range(count)]


def references(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    definitions[f"d{count}"] = {"type": "integer"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "string"}]}
    return schema


def multiple(of: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": of}


def integers(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": "integer"} for key in keys(count)}}


def required(count: int) -> dict[str, Any]:
    return {"type": "object", "required": keys(count)}


def lark(text: str) -> dict[str, Any]:
    return {"guided_grammar": text}


def regex(text: str) -> dict[str, Any]:
    return {"guided_regex": text}


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"guided_json": value}


STACK = r"needs more than 1024 KiB of stack \(the grammar's compiler ended by SIGSEGV\)"
# A busy machine may come to the end of the time first.
MEMORY = r"needs more than 128 MiB of memory|took more than 6 s"
# The next two are the library's own limits.
EXPRESSIONS = "lexer error: too many"
ROW = "items; max is 2000"

# Pattern of what each is refused for; None if it may be served, as its size bounds what it costs.
ATTACKS: dict[str, tuple[dict[str, Any], str | None]] = {
    "a chain of rules": (lark(chain("r{}: r{}", DEPTH) + '"a"'), STACK),
    "a chain of references": (schema(references(DEPTH)), STACK),
    "27,500 required names": (schema(required(27_500)), STACK),
    "20,000 required names": (schema(required(20_000)), STACK),
    "5,000 properties": (schema(integers(5_000)), STACK),
    "1,000 properties": (schema(integers(1_000)), ROW),
    "1,000 required names": (schema(required(1_000)), None),
    "common multiples": (schema({"allOf": [multiple(9973), multiple(9967)]}), MEMORY),
    "deep alternatives": (schema(nested(28)), None),
    "a repeated repetition": (regex("(a{1000}){1000}|z"), EXPRESSIONS),
    "repetitions of anything": (regex("(.*a.{200}){20}"), None),
    "an automaton of 2**500 states": (regex("(a|b)*a(a|b){500}"), None),
    "5,000 groups": (regex("(" * 5000 + "a" + ")" * 5000), "nest"),
    "classes of Unicode": (regex(r"(\p{L}\p{N}\p{Greek}){500}"), None),
    "a rule of itself": (lark('start: start start | "a" | '), None),
    "intersections": (
        lark("start: T\nT: " + " & ".join(f"/.*{a}{b}.*/" for a in "abcdefgh" for b in "xyz")),
        EXPRESSIONS,
    ),
    "patterns of names": (
        schema({"type": "object", "patternProperties": {f"^.*{k}.*$": {} for k in keys(200)}}),
        "not disjoint",
    ),
    "patterns of one text": (
        schema({"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefgh"]}),
        None,
    ),
    "50,000 values": (schema({"enum": [f"value {i} {i * 7919}" for i in range(50_000)]}), None),
    "a text of a million characters": (
        schema({"type": "string", "minLength": 10**6, "maxLength": 10**6 + 5}),
        None,
    ),
    "100,000 items": (
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**5}),
        None,
    ),
    "a cycle of references": (
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        "no text satisfies it",
    ),
    "formats": (
        schema({"anyOf": [{"type": "string", "format": f} for f in ("email", "uri", "ipv6")] * 40}),
        None,
    ),
}

# One of each refusal and of each kind of grammar; the others are for ``make soak``.
if FULL not in os.environ:
    for name in (
        *("27,500 required names", "20,000 required names", "5,000 properties"),
        *("1,000 required names", "repetitions of anything", "classes of Unicode"),
        *("intersections", "patterns of one text", "a text of a million characters"),
        *("100,000 items", "formats"),
    ):
        del ATTACKS[name]


class Healthy(threading.Thread):
    """A client that streams one answer after the other, and notes what it sees.

    Attributes:
        answers: the different texts that came.
        gap: the longest time between two pieces so far.
    """

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self.answers: set[str] = set()
        self.gap = 0.0
        self.count = 0
        self._url = server.url
        self._clock = Clock(server)
        self._left = threading.Event()

    def run(self) -> None:
        """Stream until it is told to leave."""
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 30, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._left.is_set():
                pieces = []
                with client.stream("POST", "/v1/completions", json=body) as response:
                    self._clock.lap()
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            self.gap = max(self.gap, self._clock.lap())
                            pieces.append(json.loads(line[6:])["choices"][0]["text"])
                self.answers.add("".join(pieces))
                self.count += 1

    def wait_for(self, count: int) -> None:
        """Wait until so many more answers are complete."""
        until = self.count + count
        while self.count < until:
            assert self.is_alive()
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self.join()


@pytest.fixture(scope="module")
def attacked(tiny_model: Path) -> Iterator[ServerProcess]:
    options = ("--served-model-name", "tiny", "--guided-compile-timeout", "6")
    with ServerProcess(tiny_model, *options, *SLOW) as server:
        yield server.wait_ready()
        assert server.process.poll() is None, server.log
        assert "Traceback" not in server.log, server.log


def ask(server: ServerProcess, guided: dict[str, Any]) -> httpx.Response:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 8, "temperature": 1, "seed": 0, **guided}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def processes(server: ServerProcess) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def test_nobody_notices(attacked: ServerProcess) -> None:
    with Healthy(attacked) as healthy:
        healthy.wait_for(2)
        usual = healthy.gap
        assert ask(attacked, regex("a")).status_code == 200  # what compiles is there from here on
        before = {process.pid for process in processes(attacked)}
        for name, (guided, limit) in ATTACKS.items():
            healthy.gap = 0.0
            response = ask(attacked, guided)
            assert healthy.gap < usual + 1.5, name
            if response.status_code == 200 and limit is None:
                continue
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            assert (error["param"] or "").startswith(next(iter(guided))), (name, error)
            # On a slow machine time may be up before memory or the stack is full.
            late = "took more than 6 s|a token's mask took"
            stopped = re.search(f"{limit or ''}|{late}", error["message"])
            assert stopped, (name, error["message"][-300:])
        healthy.wait_for(1)
    assert len(healthy.answers) == 1
    assert {process.pid for process in processes(attacked)} == before


def test_a_refusal_is_remembered(attacked: ServerProcess) -> None:
    guided, limit = ATTACKS["a chain of rules"]
    assert limit is not None
    messages = {ask(attacked, guided).json()["error"]["message"] for _ in range(3)}
    assert len(messages) == 1
    assert re.search(f"{limit}|took more than 6 s", messages.pop())


def test_a_signal_ends_everything(tiny_model: Path) -> None:
    options = ("--served-model-name", "tiny", "--guided-compile-timeout", "600")
    statuses = []
    with ServerProcess(tiny_model, *options) as server:
        server.wait_ready()
        started = {process.pid for process in processes(server)}

        def attack(factor: int) -> None:
            both = {"allOf": [multiple(9973), multiple(factor)]}
            statuses.append(ask(server, schema(both)).status_code)

        # More than are tried at once.
        attacks = [threading.Thread(target=attack, args=(9967 - i,)) for i in range(6)]
        for thread in attacks:
            thread.start()
        # Of those that were there some end by themselves, such as what makes tries of a vocabulary.
        wait_until(lambda: sum(p.pid not in started for p in processes(server)) >= 2)
        everything = processes(server)
        server.terminate()
        assert server.wait() == 0, server.log
        for thread in attacks:
            thread.join()
        psutil.wait_procs(everything, timeout=60)
        assert not [process for process in everything if process.is_running()]
        assert "Traceback" not in server.log, server.log
    # Those that were tried first may have been refused before.
    assert set(statuses) <= {503, 400}
    assert 503 in statuses
