"""Clients that send without end, or nothing, beside one that is served as without them."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import forkserver
import httpx
import pytest
from attacking import (
    Healthy,
    connect,
    is_closed,
    memory_of,
    read_all,
    send,
    status_of,
    wait_until,
)
from serving import ServerProcess

from engine_core.errors import ConfigError
from engine_core.server.connections import network_of
from engine_core.server.settings import ServerSettings

pytestmark = pytest.mark.slow

CONNECTIONS = 80
OPTIONS = (
    *("--max-num-seqs", "4", "--max-model-len", "1024", "--kv-cache-memory", "16MiB"),
    *("--served-model-name", "tiny", "--header-timeout", "3", "--idle-timeout", "3"),
    *("--max-connections", str(CONNECTIONS), "--max-connections-per-address", "70"),
    *("--trusted-proxies", "127.0.0.64/26"),
    *("--api-key", "key"),
)
TEMPLATE = (
    "{% if attack == 'loops' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif attack == 'text' %}{{ 'a' * 10**9 }}{% elif attack == 'calls' %}"
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    "{% elif attack == 'lists' %}{% set ns = namespace(x=(1,)) %}"
    "{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}"
    "{% elif attack == 'recursion' %}{% macro r() %}{{ r() }}{% endmacro %}{{ r() }}{% endif %}"
    "{{ messages[0].content }}"
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
KEY = {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that may have few files open, and whose chat template can be told to attack."""
    model = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("model") / "hostile"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with ServerProcess(model, *OPTIONS) as process:
        yield process.wait_ready()
        assert process.process.poll() is None, process.log
        assert "Traceback" not in process.log


@pytest.fixture(scope="module")
def healthy(server: ServerProcess) -> Iterator[Healthy]:
    client = Healthy(server, KEY)
    yield client
    client.session.close()


@contextlib.contextmanager
def _crowd(server: ServerProcess, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections from addresses of their own, which have sent ``first``."""
    with contextlib.ExitStack() as stack:
        crowd = []
        for index in range(count):
            crowd.append(stack.enter_context(connect(server, f"127.0.1.{1 + index % 20}")))
            send(crowd[-1], first)
        yield crowd


LINE = b"GET /health HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
# What is sent first, what then again and again, and the status of the answer.
ENDLESS = {
    "headers": (LINE, b"a: bbbbbbbb\r\n" * 1000, 431),
    "a header's name": (LINE, b"a" * 16_000, 431),
    "a header's value": (LINE + b"a: ", b"b" * 16_000, 431),
    "a folded value": (LINE + b"a: b", b"\r\n b" * 4000, 400),
    "spaces": (LINE + b"a:", b" " * 16_000, 431),
    "an address": (b"GET /", b"a" * 16_000, 431),
    "a question": (b"GET /health?", b"a" * 16_000, 431),
    "a method": (b"", b"A" * 16_000, 400),
    "empty lines": (b"", b"\r\n" * 8000, 431),
    "a chunk's extension": (POST + b"1;", b"a" * 16_000, 431),
    "trailers": (POST + b"1\r\na\r\n0\r\n", b"a: b\r\n" * 2000, 431),
    "a trailer's value": (POST + b"1\r\na\r\n0\r\na: ", b"b" * 16_000, 431),
    "requests": (b"", HEALTH * 1000, 200),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_cut_off(server: ServerProcess, healthy: Healthy, name: str) -> None:
    first, again, status = ENDLESS[name]
    before = memory_of(server)
    with healthy.beside(), connect(server) as connection:
        send(connection, first)
        sent = 0
        while sent < 64 * 2**20 and send(connection, again):
            sent += len(again)
            if name == "requests" and sent > 2**20:
                break
        assert sent < 16 * 2**20
        answer = b""
        with contextlib.suppress(OSError):
            answer = connection.recv(65536)
        # The answer is lost if the server closes before it has read what was on the way.
        assert not answer or status_of(answer) in (status, 401)
    assert memory_of(server) - before < 16 * 2**20


CODES = {400: "invalid_http", 431: "headers_too_large", 501: "unsupported_transfer_encoding"}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"a: " + b"b" * 33_000 + b"\r\n", 431),
        (b"a: b\r\n" * 101, 431),
        (b"a: b\r\n" * 100, 200),
        (b"a: " + b"b" * 32_000 + b"\r\n", 200),
        (b"a b\r\n", 400),
        (b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Transfer-Encoding: gzip, chunked\r\n", 501),
        (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", 501),
        (b"Transfer-Encoding: chunked, chunked\r\n", 400),
        (b"Transfer-Encoding: gzip\r\n", 501),
        (b"Transfer-Encoding: Chunked\r\n", 200),
        (b"Connection: Upgrade\r\nUpgrade: websocket\r\n", 200),
        (b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n", 200),
    ],
)
def test_a_head_is_answered_by_its_size(server: ServerProcess, head: bytes, status: int) -> None:
    with connect(server) as connection:
        connection.sendall(LINE + head + b"\r\n")
        answer = connection.recv(65536)
        assert status_of(answer) == status
        if status != 200:
            answer += read_all(connection)
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == CODES[status]
            assert b"connection: close" in answer


def test_requests_one_after_another_are_no_endless_head(server: ServerProcess) -> None:
    padded = HEALTH[:-2] + b"a:" + b" " * 9000 + b"b\r\n\r\n"
    body = b"1\r\n \r\n" * 20_000
    with connect(server) as connection:
        for _ in range(12):
            connection.sendall(padded)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.read()) == (200, b'{"status":"ready"}')
        connection.sendall(padded * 6)
        answers = b""
        while answers.count(b'{"status":"ready"}') < 6:
            piece = connection.recv(65536)
            assert piece
            answers += piece
        head = POST.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer key\r\n\r\n")
        head = head.replace(b"Host", b"Content-Type: application/json\r\nHost")
        connection.sendall(head + body + b"0\r\n\r\n")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert b"invalid_json" in answer.read()


SLOW = {
    "nothing": (b"", b""),
    "a head byte by byte": (LINE, b"a"),
    "a head after an answer": (HEALTH + LINE, b"a"),
    "a body after its answer": (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999\r\n\r\n",
        b"a",
    ),
    "nothing after an answer": (HEALTH, b""),
    "empty lines": (b"", b"\r\n"),
    "a chunk's extension after its answer": (POST + b"1;", b"a"),
}


def test_whoever_is_slow_is_cut_off(server: ServerProcess, healthy: Healthy) -> None:
    with healthy.beside(), contextlib.ExitStack() as stack:
        slow = {name: stack.enter_context(connect(server)) for name in SLOW}
        for name, connection in slow.items():
            connection.sendall(SLOW[name][0])
        closed: dict[str, float] = {}
        start = time.monotonic()
        while len(closed) < len(slow) and time.monotonic() < start + 60:
            for name, connection in slow.items():
                if name not in closed and (
                    not send(connection, SLOW[name][1]) or is_closed(connection)
                ):
                    closed[name] = time.monotonic() - start
            time.sleep(0.05)
        assert set(closed) == set(slow)
        assert min(closed.values()) > 0.5


def test_a_late_head_is_told_why(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(LINE)
        answer = read_all(connection)
    assert status_of(answer) == 408
    assert b"the headers were not complete after 3 seconds" in answer


@pytest.mark.parametrize("first", [b"", LINE, HEALTH])
def test_a_crowd_that_waits_makes_room(
    server: ServerProcess, healthy: Healthy, first: bytes
) -> None:
    dropped = server.metric("engine_core_refused_connections_total", reason="dropped")
    # Who has said nothing goes first. Where all have had an answer, the healthy client's connection
    # is one of those that wait while it is between two: a burst of new ones may take its place, and
    # when it comes again it takes that of another, who may have said nothing yet.
    answered = first == HEALTH
    with healthy.beside(refused=answered), _crowd(server, 4 * CONNECTIONS, first):
        for path in ("/health", "/metrics", "/version", "/v1/models"):
            if answered:
                wait_until(partial(_is_served, server, path))
            else:
                assert httpx.get(server.url + path, headers=KEY).status_code == 200
    now = server.metric("engine_core_refused_connections_total", reason="dropped")
    assert now - dropped >= 3 * CONNECTIONS


def _body(size: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer key\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n{" % size
    )


def test_health_is_answered_when_all_are_busy(server: ServerProcess, healthy: Healthy) -> None:
    with healthy.beside(refused=True), _crowd(server, CONNECTIONS + 30, _body(99)):
        # While it still takes in the crowd, it may drop who has said nothing yet.
        wait_until(lambda: sum(_is_served(server, "/health") for _ in range(5)) == 5)
        for _ in range(8):
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert httpx.get(f"{server.url}/metrics").status_code == 200
        # Whoever comes while the one who is served is between two requests gets its place.
        answers: list[httpx.Response] = []

        def is_refused() -> bool:
            answers.append(httpx.get(f"{server.url}/v1/models", headers=KEY))
            return answers[-1].status_code == 503

        wait_until(is_refused)
        refused = answers[-1]
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
    wait_until(lambda: httpx.get(f"{server.url}/v1/models", headers=KEY).status_code == 200)


def _is_served(server: ServerProcess, path: str) -> bool:
    """Whether a new connection gets an answer, and is not broken off before it has asked."""
    try:
        return httpx.get(server.url + path, headers=KEY).status_code == 200
    except httpx.TransportError:
        return False


def test_an_address_has_its_share(server: ServerProcess, healthy: Healthy) -> None:
    with healthy.beside(), contextlib.ExitStack() as stack:
        for _ in range(70):
            send(stack.enter_context(connect(server, "127.0.2.1")), _body(99))

        def ask(source: str, path: bytes) -> int:
            with connect(server, source) as connection:
                connection.sendall(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path)
                return status_of(connection.recv(65536))

        wait_until(lambda: ask("127.0.2.1", b"/version") == 429)
        assert ask("127.0.2.1", b"/health") == 200
        assert ask("127.0.2.2", b"/version") == 200


def test_a_proxys_clients_have_shares_of_their_own(server: ServerProcess, healthy: Healthy) -> None:
    def forwarded(source: str, hosts: str, path: str = "/version") -> int:
        with connect(server, source) as connection:
            head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Forwarded-For: {hosts}\r\n\r\n"
            connection.sendall(head.encode())
            return status_of(connection.recv(65536))

    hostile = b"X-Forwarded-For: 9.9.9.9, 203.0.113.7\r\nContent-Type"
    with healthy.beside(), contextlib.ExitStack() as stack:
        for _ in range(72):
            connection = stack.enter_context(connect(server, "127.0.0.65"))
            send(connection, _body(99).replace(b"Content-Type", hostile))
        wait_until(lambda: forwarded("127.0.0.66", "203.0.113.7") == 429)
        assert forwarded("127.0.0.66", "203.0.113.7:4711, 127.0.0.70") == 429
        assert forwarded("127.0.0.66", "203.0.113.7", "/health") == 200
        # What a client says before its proxy adds to it is not believed.
        assert forwarded("127.0.0.66", "203.0.113.7, 203.0.113.8") == 200
        # Nor is one that is no proxy.
        assert forwarded("127.0.3.1", "203.0.113.7") == 200
        # Nor does the proxy itself have a share.
        assert forwarded("127.0.0.65", "203.0.113.9") == 200


@pytest.mark.parametrize("attack", ["loops", "text", "calls", "lists", "recursion"])
def test_a_template_without_end_stops_nobody(
    server: ServerProcess, healthy: Healthy, attack: str
) -> None:
    before = memory_of(server)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    url = f"{server.url}/v1/chat/completions"
    with healthy.beside():
        hostile = {**body, "chat_template_kwargs": {"attack": attack}}
        response = httpx.post(url, json=hostile, headers=KEY)
        assert response.status_code == 400
        assert "the chat template" in response.json()["error"]["message"]
        assert httpx.post(url, json=body, headers=KEY).status_code == 200
    assert memory_of(server) - before < 32 * 2**20


def test_the_limit_follows_the_open_files_allowed() -> None:
    code = """
import os, resource
from engine_core.errors import ConfigError
from engine_core.server.connections import allow_connections
for soft, hard, wanted in (
    (1024, 1024, None), (256, 1024, 500), (256, 1024, 40), (100, 100, None), (256, 1024, 900)
):
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        try:
            print(*allow_connections(wanted), *resource.getrlimit(resource.RLIMIT_NOFILE))
        except ConfigError as error:
            print(error)
        break
    os.wait()
"""
    command = [sys.executable, "-c", code]
    done = forkserver.run(command, capture_output=True, text=True, check=True)
    *limits, refused = done.stdout.splitlines()
    assert limits == ["560 128 1024 1024", "500 128 1024 1024", "40 128 1024 1024", "1 12 100 100"]
    assert "max_connections is 900, and this process may have 1024 files" in refused
    assert "enough for 560 connections" in refused


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1:80", "192.0.2.1"),
        ("2001:db8:0:1:2::3", "2001:db8:0:1::/64"),
        ("[2001:db8:0:1:ffff::]:80", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("_hidden", "_hidden"),
        ("x" * 10_000, "x" * 64),
    ],
)
def test_addresses_of_one_client_count_as_one(host: str, counted: str) -> None:
    assert network_of(host) == counted


@pytest.mark.parametrize("text", ["proxy", "10.0.0.0/33", "10.0.0.1/8", "", "*"])
def test_a_proxy_is_an_address(text: str) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        ServerSettings(trusted_proxies=(text,))
