"""Connections that do not finish their TLS handshake, beside clients that do."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attacking import Healthy, connect, read_all, send, status_of, wait_until
from serving import ServerProcess, write_certificate

pytestmark = pytest.mark.slow

CONNECTIONS = 30
# The header of a record with a ClientHello of 512 bytes.
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    certificate, key = write_certificate(tmp_path_factory.mktemp("tls"))
    options = ["--max-num-seqs", "4", "--max-model-len", "1024", "--kv-cache-memory", "16MiB"]
    options += ["--served-model-name", "tiny", "--header-timeout", "2"]
    options += ["--max-connections", str(CONNECTIONS), "--max-connections-per-address", "20"]
    options += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with ServerProcess(tiny_model, *options) as process:
        process.verify = ssl.create_default_context(cafile=certificate)
        yield process.wait_ready()
        assert process.process.poll() is None, process.log
        assert "Traceback" not in process.log


def _secure(server: ServerProcess, connection: socket.socket) -> ssl.SSLSocket:
    assert isinstance(server.verify, ssl.SSLContext)
    return server.verify.wrap_socket(connection, server_hostname="127.0.0.1")


def _metric(server: ServerProcess, reason: str) -> float:
    text = httpx.get(f"{server.url}/metrics", verify=server.verify).text
    name = f'engine_core_refused_connections_total{{reason="{reason}"}} '
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return float(lines[0].removeprefix(name)) if lines else 0.0


@pytest.mark.parametrize("first", [b"", HELLO])
def test_a_crowd_without_handshakes_makes_room(server: ServerProcess, first: bytes) -> None:
    healthy = Healthy(server)
    dropped = _metric(server, "dropped")
    with healthy.beside(), contextlib.ExitStack() as stack:
        for index in range(3 * CONNECTIONS):
            connection = connect(server, f"127.0.1.{1 + index % 20}")
            send(stack.enter_context(connection), first)
        for path in ("/health", "/version", "/v1/models"):
            answer = httpx.get(server.url + path, verify=server.verify)
            assert answer.status_code == 200
    # Those that were there for two seconds have ended by themselves.
    assert _metric(server, "dropped") - dropped >= CONNECTIONS
    healthy.session.close()


def test_an_address_has_its_share_of_handshakes(server: ServerProcess) -> None:
    refused = _metric(server, "address")
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server, "127.0.2.1"))
        for path, status in ((b"/version", 429), (b"/health", 200)):
            with _secure(server, connect(server, "127.0.2.1")) as connection:
                connection.sendall(b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path)
                assert status_of(connection.recv(65536)) == status
    assert _metric(server, "address") - refused == 2


SILENT = {
    "nothing": b"",
    "a piece of a hello": HELLO,
    "no hello": b"\x16\x03\x01\x00\x05aaaaa",
    "plain HTTP": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "bytes": bytes(range(256)) * 64,
}


@pytest.mark.parametrize("name", SILENT)
def test_a_handshake_ends_in_time(server: ServerProcess, name: str) -> None:
    with connect(server) as connection:
        start = time.monotonic()
        send(connection, SILENT[name])
        assert b"HTTP/1.1 200" not in read_all(connection)
        seconds = time.monotonic() - start
    assert seconds < 9
    if name in ("nothing", "a piece of a hello"):
        assert seconds > 1


def test_silence_after_a_handshake_ends_in_time_too(server: ServerProcess) -> None:
    with _secure(server, connect(server)) as connection:
        start = time.monotonic()
        assert connection.recv(100) == b""
        assert 1 < time.monotonic() - start < 9
    with _secure(server, connect(server)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\na")
        assert status_of(connection.recv(65536)) == 408


def test_a_client_that_leaves_within_a_handshake_has_no_place(server: ServerProcess) -> None:
    for number in range(4 * CONNECTIONS):
        with connect(server, "127.0.3.1") as connection:
            send(connection, HELLO if number % 2 else b"")

    def are_served() -> bool:
        """Whether as many of this address as it may have are."""
        statuses = []
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                raw = connect(server, "127.0.3.1")
                connection = stack.enter_context(_secure(server, raw))
                connection.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                statuses.append(status_of(connection.recv(65536)))
        return set(statuses) == {200}

    wait_until(are_served)
