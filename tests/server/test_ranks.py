"""``serve`` with a model that several processes share."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from serving import COMPLETION, ServerProcess

OPTIONS = ("--device", "cpu", "--max-model-len", "512", "--kv-cache-memory", "16MiB")
OPTIONS += ("--served-model-name", "tiny")


def test_two_ranks_become_ready_and_obey_a_grammar(tiny_model: Path) -> None:
    """At the start they read the vocabulary for grammars, and are heard only if they are asked."""
    with ServerProcess(tiny_model, *OPTIONS, "--tensor-parallel-size", "2") as server:
        server.wait_ready()
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [True]}}}
        body = {**COMPLETION, "messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
        body |= {"response_format": wanted, "ignore_eos": False}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) is True
        server.terminate()
        assert server.wait() == 0, server.log
