"""Requests as nobody should write them and clients that behave badly, beside one that is served."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from attacking import Healthy, connect, is_closed, memory_of, read_all, send, status_of, wait_until
from serving import ServerProcess

pytestmark = pytest.mark.slow

KEY = {"Authorization": "Bearer key"}
ASKED: dict[str, Any] = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "temperature": 0}
BODY = json.dumps(ASKED).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    options = ["--max-num-seqs", "16", "--max-model-len", "1024", "--kv-cache-memory", "16MiB"]
    options += ["--served-model-name", "tiny", "--header-timeout", "5", "--idle-timeout", "5"]
    options += ["--api-key", "key"]
    with ServerProcess(tiny_model, *options) as process:
        yield process.wait_ready()
        assert process.process.poll() is None, process.log
        assert "Traceback" not in process.log


@pytest.fixture(scope="module")
def healthy(server: ServerProcess) -> Iterator[Healthy]:
    client = Healthy(server, KEY)
    yield client
    client.session.close()


def _get(line: bytes, headers: bytes = b"Host: 127.0.0.1\r\n") -> bytes:
    return b"%b\r\n%b\r\n" % (line, headers)


def _post(headers: bytes, body: bytes, version: bytes = b"1.1", key: bytes = b"key") -> bytes:
    return (
        b"POST /v1/completions HTTP/%b\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %b\r\n%b\r\n%b" % (version, key, headers, body)
    )


CHUNKED = b"Transfer-Encoding: chunked\r\n"
ODD = {
    "an absolute address": (_get(b"GET http://evil.example/health HTTP/1.1"), 200),
    "an absolute address without a path": (_get(b"GET http://evil.example HTTP/1.1"), 400),
    "an authority": (_get(b"CONNECT evil.example:443 HTTP/1.1"), 400),
    "an asterisk": (_get(b"OPTIONS * HTTP/1.1"), 404),
    "another's name": (_get(b"GET /health HTTP/1.1", b"Host: evil.example:8000\r\n"), 421),
    "a name that begins as its own": (
        _get(b"GET / HTTP/1.1", b"Host: localhost.evil.example\r\n"),
        421,
    ),
    "another's name behind its own": (
        _get(b"GET /metrics HTTP/1.1", b"Host: localhost\r\nHost: evil.example\r\n"),
        421,
    ),
    "its own name": (_get(b"GET /health HTTP/1.1", b"Host: LOCALHOST.:8000\r\n"), 200),
    "its own address": (_get(b"HEAD /health HTTP/1.1", b"Host: [::1]:8000\r\n"), 200),
    "no name": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "no slash": (_get(b"GET health HTTP/1.1"), 400),
    "two slashes": (_get(b"GET //v1/models HTTP/1.1"), 404),
    "a key's path by its dots": (_get(b"GET /x/../v1/models HTTP/1.1"), 404),
    "a key's path in percents": (_get(b"GET /%76%31%2fmodels HTTP/1.1"), 401),
    "a key's path in capitals": (_get(b"GET /V1/models HTTP/1.1"), 404),
    "a key's path and a slash": (_get(b"GET /v1/models/ HTTP/1.1"), 401),
    "a file": (_get(b"GET /..%2f..%2f..%2f..%2fetc%2fpasswd HTTP/1.1"), 404),
    "a zero in a path": (_get(b"GET /health%00 HTTP/1.1"), 404),
    "no text in a path": (_get(b"GET /%ff%fe%zz HTTP/1.1"), 404),
    "a long question": (_get(b"GET /health?" + b"a=b&" * 7500 + b" HTTP/1.1"), 200),
    "another version": (_get(b"GET /health HTTP/9.9"), 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", 400),
    "an unknown method": (_get(b"BREW /health HTTP/1.1"), 400),
    "a trace": (_get(b"TRACE /health HTTP/1.1"), 405),
    "a header with a zero": (_get(b"GET /health HTTP/1.1", b"a: \x00\r\n"), 400),
    "a header with a return": (_get(b"GET /health HTTP/1.1", b"a: b\rc: d\r\n"), 400),
    "lines without returns": (b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n", 400),
    "a header that is folded": (_get(b"GET /health HTTP/1.1", b"a: b\r\n c\r\n"), 400),
    "no letters in a name": (_get(b"GET /health HTTP/1.1", b"\xff: b\r\n"), 400),
    "a key in Latin-1": (_get(b"GET /v1/models HTTP/1.1", b"Authorization: Bearer \xff\r\n"), 401),
    "one length twice": (_post(LENGTH * 2, BODY), 400),
    "two lengths": (_post(LENGTH + b"Content-Length: 3\r\n", BODY), 400),
    "a list of lengths": (_post(b"Content-Length: 3, 3\r\n", BODY), 400),
    "a length below none": (_post(b"Content-Length: -1\r\n", BODY), 400),
    "a length with a sign": (_post(b"Content-Length: +5\r\n", BODY), 400),
    "a length in hex": (_post(b"Content-Length: 0x10\r\n", BODY), 400),
    "a length beyond 64 bits": (_post(b"Content-Length: 99999999999999999999\r\n", BODY), 400),
    "an empty length": (_post(b"Content-Length:\r\n", BODY), 400),
    "a space before a colon": (_post(b"Content-Length : 5\r\n", BODY), 400),
    "a length and chunks": (_post(LENGTH + CHUNKED, CHUNK + b"0\r\n\r\n"), 400),
    "chunks with a tab": (_post(b"Transfer-Encoding: \x0bchunked\r\n", CHUNK), 400),
    "other chunks": (_post(b"Transfer-Encoding: xchunked\r\n", CHUNK), 501),
    "no length": (_post(b"", BODY), 400),
    "a chunk beyond 64 bits": (_post(CHUNKED, b"FFFFFFFFFFFFFFFFF\r\n"), 400),
    "a chunk below none": (_post(CHUNKED, b"-1\r\n"), 400),
    "a chunk with 0x": (_post(CHUNKED, b"0x5\r\naaaaa\r\n"), 400),
    "chunks without returns": (_post(CHUNKED, b"5\naaaaa\n0\n\n"), 400),
    "chunks": (_post(CHUNKED, CHUNK + b"0\r\n\r\n"), 200),
    "a key in a trailer": (
        _post(CHUNKED, CHUNK + b"0\r\nAuthorization: Bearer key\r\n\r\n", key=b"wrong"),
        401,
    ),
    "a wrong key expects to be let in": (
        _post(LENGTH + b"Expect: 100-continue\r\n", b"", key=b""),
        401,
    ),
    "an upgrade": (
        _get(b"GET /health HTTP/1.1", b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
        + _get(b"GET /version HTTP/1.1"),
        200,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_request_has_its_answer(server: ServerProcess, name: str) -> None:
    sent, status = ODD[name]
    with connect(server) as connection:
        connection.sendall(sent)
        answer = http.client.HTTPResponse(
            connection, method=sent.partition(b" ")[0].decode("latin-1")
        )
        answer.begin()
        content = answer.read()
        assert answer.status == status, content
        if status >= 400:
            assert json.loads(content)["error"]["message"]
        if status in (400, 501) or name == "an upgrade":
            # Whatever follows would be read in another way than by a proxy.
            assert read_all(connection) == b""


def test_mutations_of_a_request_stop_nobody(server: ServerProcess, healthy: Healthy) -> None:
    draw = random.Random(0)
    whole = [sent for sent, _ in ODD.values()]
    pieces = [
        b"\r\n",
        b"\r",
        b"\n",
        b"\0",
        b" ",
        b":",
        b";",
        b",",
        b"\xff",
        b"0",
        b"HTTP/1.1",
        b"%",
    ]
    statuses = {200, 400, 401, 404, 405, 408, 413, 415, 421, 431, 501}
    before = memory_of(server)

    def attack(seed: int) -> None:
        own = random.Random(seed)
        sent = bytearray(own.choice(whole))
        for _ in range(own.randint(1, 6)):
            place = own.randrange(len(sent) + 1)
            sent[place : place + own.choice((0, 0, 1, 9))] = own.choice(pieces) * own.choice(
                (1, 1, 40)
            )
        with connect(server) as connection:
            send(connection, bytes(sent))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
            assert not answer or answer.startswith(b"HTTP/1.1 "), answer
            assert not answer or status_of(answer) in {*statuses, 100}, answer

    with healthy.beside(), ThreadPoolExecutor(8) as pool:
        list(pool.map(attack, [draw.getrandbits(64) for _ in range(400)]))
    assert memory_of(server) - before < 32 * 2**20


def _events(data: bytes) -> list[int]:
    lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
    return [
        token
        for line in lines
        for choice in json.loads(line.removeprefix("data: "))["choices"]
        for token in choice["token_ids"]
    ]


def test_a_client_of_http_1_0_gets_no_chunks(server: ServerProcess) -> None:
    asked = {**ASKED, "stream": True, "return_token_ids": True, "max_tokens": 20}
    content = json.dumps(asked).encode()
    with connect(server) as connection:
        connection.sendall(_post(b"Content-Length: %d\r\n" % len(content), content, version=b"1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert status_of(head) == 200
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")
    whole = httpx.post(f"{server.url}/v1/completions", json={**asked, "stream": False}, headers=KEY)
    assert _events(body) == whole.json()["choices"][0]["token_ids"]
    with connect(server) as connection:
        connection.sendall(_post(LENGTH, BODY, version=b"1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()


def test_requests_in_one_piece_have_their_answers_in_order(
    server: ServerProcess, healthy: Healthy
) -> None:
    def asked(length: int) -> bytes:
        content = json.dumps({**ASKED, "max_tokens": length}).encode()
        return _post(b"Content-Length: %d\r\n" % len(content), content)

    lengths = [40, 1, 30, 2, 20, 3, 10, 4]
    with healthy.beside(), connect(server) as connection:
        connection.sendall(b"".join(map(asked, lengths)))
        data = b""
        while data.count(b'"completion_tokens":') < len(lengths):
            piece = connection.recv(65536)
            assert piece, data
            data += piece
    found = [int(part.split(b",")[0]) for part in data.split(b'"completion_tokens":')[1:]]
    assert found == lengths


def test_what_follows_a_request_does_not_take_its_answer(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(_post(LENGTH, BODY) + b"no request\r\n\r\n")
        answer = read_all(connection)
    assert status_of(answer) == 200
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"completion_tokens":3' in answer


def test_a_request_may_come_byte_by_byte(server: ServerProcess, healthy: Healthy) -> None:
    sent = _post(LENGTH, BODY)
    with healthy.beside(), contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(server)) for _ in range(20)]
        for connection in crowd:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for place in range(len(sent)):
            for connection in crowd:
                connection.sendall(sent[place : place + 1])
        assert all(status_of(connection.recv(65536)) == 200 for connection in crowd)


def _stream(length: int, **more: Any) -> bytes:
    asked = {**ASKED, "max_tokens": length, "ignore_eos": True, "stream": True, **more}
    content = json.dumps(asked).encode()
    return _post(b"Content-Length: %d\r\n" % len(content), content)


def _is_idle(server: ServerProcess) -> bool:
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    return not any(server.metric(f"engine_core_{name}") for name in names)


def test_streams_that_are_left_leave_nothing(server: ServerProcess, healthy: Healthy) -> None:
    draw = random.Random(0)
    before = memory_of(server)

    def leave(seed: int) -> None:
        own = random.Random(seed)
        with connect(server) as connection:
            connection.sendall(_stream(800, n=own.choice((1, 2)), logprobs=own.choice((None, 3))))
            for _ in range(own.choice((0, 0, 1, 5))):
                connection.recv(own.choice((1, 4096)))

    with healthy.beside(), ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, [draw.getrandbits(64) for _ in range(150)]))
    wait_until(lambda: _is_idle(server))
    assert memory_of(server) - before < 32 * 2**20


LARGE = {
    "keys": lambda: b'{"a":{' + b",".join(b'"%x":0' % number for number in range(600_000)) + b"}}",
    "numbers": lambda: b'{"prompt":[' + b"0," * 4_000_000 + b"0]}",
    "fewer numbers": lambda: b'{"prompt":[' + b"0," * 2_000_000 + b"0]}",
    "long numbers": lambda: b'{"prompt":[' + (b"9" * 4000 + b",") * 2000 + b"0]}",
    "lists": lambda: b'{"prompt":[' + b"[]," * 250_000 + b"0]}",
    "texts": lambda: b'{"prompt":[' + b'"",' * 2_000_000 + b'""]}',
    "escapes": lambda: b'{"prompt":"' + b"\\u00e9" * 1_390_000 + b'"}',
    "brackets in a text": lambda: b'{"prompt":"' + b"[{:," * 2_000_000 + b'"}',
    "spaces": lambda: b'{"prompt":' + b" " * 8_000_000 + b"0}",
}


def test_bodies_large_in_every_way_stop_nobody(server: ServerProcess, healthy: Healthy) -> None:
    headers = {**KEY, "Content-Type": "application/json"}
    bodies = [make() for make in LARGE.values()]
    assert all(2**20 // 2 < len(body) < 8 * 2**20 for body in bodies)
    before = memory_of(server)

    def post(body: bytes) -> int:
        url = f"{server.url}/v1/completions"
        return httpx.post(url, content=body, headers=headers, timeout=60).status_code

    with healthy.beside(), ThreadPoolExecutor(4) as pool:
        assert set(pool.map(post, bodies)) == {400}
    assert memory_of(server) - before < 200 * 2**20


def test_bodies_that_are_not_ended_leave_room(server: ServerProcess, healthy: Healthy) -> None:
    before = memory_of(server)
    sent = _post(b"Content-Length: 8000000\r\n", b" " * 7_000_000)
    with healthy.beside(), contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(server)) for _ in range(40)]
        for connection in crowd:
            send(connection, sent)
        # All but those for whom there is room.
        wait_until(lambda: len(select.select(crowd, [], [], 0)[0]) > 16)
        refused = select.select(crowd, [], [], 1)[0]
        assert len(crowd) - len(refused) >= 16
        assert all(b"too_many_bodies" in read_all(connection) for connection in refused)
        assert memory_of(server) - before < 300 * 2**20
        # Who sends less is not concerned.
        small = {**ASKED, "prompt": [5] * 500, "user": "a" * 50_000}
        answer = httpx.post(f"{server.url}/v1/completions", json=small, headers=KEY)
        assert answer.status_code == 200
    wait_until(lambda: memory_of(server) - before < 32 * 2**20)


def test_clients_that_expect_to_go_on_and_do_not(server: ServerProcess, healthy: Healthy) -> None:
    sent = _post(b"Content-Length: 999\r\nExpect: 100-continue\r\n", b"")
    with healthy.beside(), contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(server)) for _ in range(40)]
        for connection in crowd:
            connection.sendall(sent)
        for connection in crowd:
            assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert not any(is_closed(connection) for connection in crowd)
        assert httpx.get(f"{server.url}/v1/models", headers=KEY).status_code == 200
    wait_until(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 0})


def test_unknown_paths_and_ids_leave_no_trace(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as session:
        session.get("/nothing")
        lines = len(session.get("/metrics").text.splitlines())
        for number in range(300):
            name = {"X-Request-Id": f"{number} " + "x" * 2000}
            answer = session.get(f"/nothing-{number}?{number}", headers=name)
            assert answer.status_code == 404
            assert answer.headers["x-request-id"] != name["X-Request-Id"]
        assert len(session.get("/metrics").text.splitlines()) == lines
