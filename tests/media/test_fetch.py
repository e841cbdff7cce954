"""Addresses and paths: what is read, and what is refused without a look at it.

The hosts are names of a resolver of the test's; what is connected to is a server on this machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from attacking import wait_until
from serving import write_certificate

from engine_core.errors import EngineDeadError, QueueFullError, RequestError
from engine_core.media import fetch
from engine_core.media.download import Resolver, _is_public
from engine_core.media.fetch import MediaSources
from engine_core.media.parts import MediaPart
from engine_core.workers import Member

CONTENT = b"a picture" * 1000
PUBLIC, PRIVATE = "93.184.215.14", "10.1.2.3"
MEETING = threading.Barrier(4)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        what = self.path.strip("/").partition("?")[0]
        if what == "meet":
            MEETING.wait(60)
        if what == "redirect":
            self.send_response(302)
            self.send_header("Location", "/fine")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200 if what != "missing" else 404)
        if what in ("fine", "missing", "short", "huge"):
            length = {"short": len(CONTENT) + 7, "huge": 10**12}.get(what, len(CONTENT))
            self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            if what == "endless":
                while True:
                    self.wfile.write(CONTENT)
            if what == "slow":
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.02)
            answers = {"host": self.headers["Host"], "meet": self.path}
            if what.startswith("own/"):
                answers[what] = self.path
            self.wfile.write(answers[what].encode() if what in answers else CONTENT)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # who finds no place tries again a second later


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The port of a server with TLS, and its certificate, for public.example alone."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = write_certificate(folder, "DNS:public.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1], certificate
        server.shutdown()
        thread.join()


# By the port that is asked for, if it is not that of the server without TLS.
PORTS: dict[int, int] = {}


@pytest.fixture
def dialled(port: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The addresses that were connected to; each is the server here."""
    known = {
        "public.example": [[PUBLIC]],
        "private.example": [[PRIVATE]],
        "both.example": [[PUBLIC, PRIVATE]],
        # Public at the only look there is at it, and afterwards this machine.
        "rebound.example": [[PUBLIC], ["127.0.0.1"]],
        "127.0.0.1": [["127.0.0.1"]],
        "::ffff:7f00:1": [["::ffff:127.0.0.1"]],
    }
    made: list[tuple[str, int]] = []
    connect = socket.socket.connect

    def resolve(host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        answers = known[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port or 0)) for each in found]

    def dial(sock: socket.socket, address: tuple[str, int]) -> None:
        made.append(address)
        connect(sock, ("127.0.0.1", PORTS.get(address[1], port)))

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket.socket, "connect", dial)
    return made


def read(sources: MediaSources, value: Any) -> Any:
    (part,) = sources.begin([MediaPart("image", value, "here")]).result(60)
    assert (part.param, part.uuid) == ("here", None)
    return part.value


@pytest.fixture
def sources(request: pytest.FixtureRequest) -> Iterator[MediaSources]:
    hosts = ("Public.example", "private.example", "both.example", "rebound.example")
    hosts += ("127.0.0.1", "::ffff:7f00:1", "public.example:8080")
    seconds = 1 if "too slow" in request.node.name else 60
    made = MediaSources(domains=hosts, max_bytes=100_000, seconds=seconds)
    yield made
    made.close()
    # What others have begun would look up, and dial, in the next test.
    wait_until(lambda: not made._turns.num_running)


def test_what_comes_from_an_allowed_host(sources: MediaSources, dialled: list[Any]) -> None:
    assert read(sources, "http://public.example/fine?a=b") == CONTENT
    assert read(sources, "HTTP://PUBLIC.example:80/fine#there") == CONTENT
    assert read(sources, "http://public.example:8080/host") == b"public.example:8080"
    assert read(sources, "http://rebound.example/host") == b"rebound.example"
    assert dialled == [(PUBLIC, 80), (PUBLIC, 80), (PUBLIC, 8080), (PUBLIC, 80)]
    assert read(sources, "http://public.example/own/\u00fc%20\u4e2d?a=\u00fc") == (
        b"/own/%C3%BC%20%E4%B8%AD?a=%C3%BC"
    )


REFUSED = {
    "another host": ("http://other.example/fine", "'other.example' are not fetched", 0),
    "another port": ("http://public.example:81/fine", "'public.example:81' are not fetched", 0),
    "a name in front": ("http://public.example@other.example/", "'other.example' are not", 0),
    "a user": ("http://me:key@public.example/fine", "are not fetched", 0),
    "a longer name": ("http://public.example.other/fine", "are not fetched", 0),
    "no host": ("http:///fine", "is no address: it names no host", 0),
    "a private host": ("http://private.example/fine", "not public", 0),
    "a half private host": ("http://both.example/fine", "not public", 0),
    "this machine": ("http://127.0.0.1/fine", "not public", 0),
    "this machine again": ("http://[::ffff:7f00:1]/fine", "not public", 0),
    "a redirect": ("http://public.example/redirect", "redirect .302., which is not followed", 1),
    "missing": ("http://public.example/missing", "status 404", 1),
    "too long": ("http://public.example/huge", "1000000000000 bytes, and 100000 are taken", 1),
    "without end": ("http://public.example/endless", "100001 bytes, and 100000 are taken", 1),
    "cut off": ("http://public.example/short", "nothing comes from 'public.example': Incompl", 1),
    "too slow": ("http://public.example/slow", "it took more than 1 s", 1),
    "another line": ("http://public.example/a\r\nHost: b", "control characters", 1),
    "ftp": ("ftp://public.example/fine", "this is 'ftp'", 0),
    "text": ("public", "this is text", 0),
    "a file": ("file:///etc/passwd", "files are not read", 0),
    "a port that is none": ("http://public.example:x/", "is no address", 0),
}


@pytest.mark.parametrize(("url", "said", "dials"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_fetched(
    url: str, said: str, dials: int, sources: MediaSources, dialled: list[Any]
) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        read(sources, url)
    assert refused.value.param == "here"
    assert str(refused.value).startswith("here: ")
    assert len(dialled) == dials
    assert all(address == (PUBLIC, 80) for address in dialled)


@pytest.mark.parametrize("many", [1, 30])
def test_reading_ends_when_nobody_waits_for_it(
    dialled: list[Any], port: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections are ended, and downloads that wait for a thread are not begun."""
    sources = MediaSources(domains=("public.example",), seconds=60)
    url = "http://public.example/slow"
    parts = [MediaPart("image", url, f"part.{number}") for number in range(many)]
    begun = sources.begin(parts)
    while len(dialled) < min(many, fetch._OF_CLIENT):
        assert not begun.done()
        time.sleep(0.01)
    assert begun.cancel()
    assert not sources._turns
    monkeypatch.setattr(fetch, "_QUEUED", 1)  # one more has room when all of those are gone
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(QueueFullError):
            (part,) = sources.begin([MediaPart("image", url[:-4] + "fine", "here")]).result(60)
            break
        time.sleep(0.01)
    assert part.value == CONTENT
    assert len(dialled) == min(many, fetch._OF_CLIENT) + 1
    sources.close()


def urls(*names: str, host: str = "public.example") -> list[MediaPart]:
    return [
        MediaPart("image", f"http://{host}/{name}", f"part.{number}")
        for number, name in enumerate(names)
    ]


def test_what_a_prompt_names_comes_at_once(sources: MediaSources, dialled: list[Any]) -> None:
    """No answer comes before all four were asked for."""
    names = [f"meet?{number}" for number in range(4)]
    read = sources.begin(urls(*names)).result(60)
    assert [part.value for part in read] == [f"/{name}".encode() for name in names]
    assert [part.param for part in read] == ["part.0", "part.1", "part.2", "part.3"]


def test_the_first_that_fails_ends_the_others(
    dialled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, at once, and nothing of the others goes on."""
    sources = MediaSources(domains=("public.example",), seconds=60)
    many = urls(*["slow"] * 5, "missing", *["slow"] * 20)
    with pytest.raises(RequestError, match=r"part\.5: .*status 404") as refused:
        sources.begin(many).result(30)
    assert refused.value.param == "part.5"
    assert not sources._turns
    monkeypatch.setattr(fetch, "_QUEUED", 1)
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(QueueFullError):
            assert sources.begin(urls("fine")).result(60)[0].value == CONTENT
            break
        time.sleep(0.01)
    assert len(dialled) <= fetch._OF_CLIENT + 1
    sources.close()


def test_clients_take_turns(dialled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_AT_ONCE", 1)
    sources = MediaSources(domains=("public.example", "public.example:8080"), seconds=60)
    first = sources.begin(urls("meet", *["fine"] * 5), "one")
    other = sources.begin(urls("fine", host="public.example:8080"), "another")
    for _ in range(2):
        threading.Thread(target=MEETING.wait, daemon=True).start()
    MEETING.wait(60)
    assert len(first.result(60)) == 6
    assert len(other.result(60)) == 1
    assert [port for _, port in dialled].index(8080) < 3
    sources.close()


def test_a_handshake_that_takes_all_the_time(
    dialled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of it comes in time, and the whole never does."""

    def answer(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.sendall(b"\x16\x03\x03\x40\x00")
            while True:
                sock.sendall(b"\x02")
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        monkeypatch.setitem(PORTS, 443, listener.getsockname()[1])
        sources = MediaSources(domains=("public.example",), seconds=1)
        with pytest.raises(RequestError, match="it took more than 1 s"):
            read(sources, "https://public.example/fine")
        thread.join(60)
        assert not thread.is_alive()
        sources.close()


def test_a_host_with_tls_shows_who_it_is(
    sources: MediaSources,
    dialled: list[Any],
    secure: tuple[int, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, certificate = secure
    monkeypatch.setitem(PORTS, 443, port)
    with pytest.raises(
        RequestError, match=r"here: .*'public.example': .*certificate verify failed"
    ):
        read(sources, "https://public.example/fine")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # trusted, as a root of the system's is
    assert read(sources, "https://public.example/host") == b"public.example"
    assert read(sources, "HTTPS://PUBLIC.example:443/fine") == CONTENT
    for url, said in (
        ("https://rebound.example/fine", "certificate verify failed: .*rebound.example"),
        ("https://public.example/redirect", "redirect .302., which is not followed"),
        ("https://public.example/short", "nothing comes from 'public.example': Incompl"),
        ("https://public.example/endless", "100001 bytes, and 100000 are taken"),
        ("https://private.example/fine", "not public"),
        ("https://public.example:80/fine", "are not fetched"),
    ):
        with pytest.raises(RequestError, match=said):
            read(sources, url)
    hurried = MediaSources(domains=("public.example",), seconds=1)
    with pytest.raises(RequestError, match="it took more than 1 s"):
        read(hurried, "https://public.example/slow")
    hurried.close()
    assert set(dialled) == {(PUBLIC, 443)}
    # One who speaks no TLS where it is asked for.
    del PORTS[443]
    with pytest.raises(RequestError, match=r"nothing comes from 'public.example': .*SSL"):
        read(sources, "https://public.example/fine")


def test_nobody_is_allowed_if_nothing_is_said(dialled: list[Any]) -> None:
    sources = MediaSources()
    for url in ("http://public.example/fine", "https://public.example/fine"):
        with pytest.raises(RequestError, match="are not fetched"):
            read(sources, url)
    assert dialled == []
    assert read(sources, "data:image/png;base64,AA==") == "data:image/png;base64,AA=="
    sources.close()
    with pytest.raises(EngineDeadError):
        read(sources, "http://public.example/fine")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("169.254.169.254", False),  # a cloud's metadata
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff0e::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        (f"64:ff9b::{PUBLIC}", True),
        ("2002:0a00:0001::", False),  # 10.0.0.1 by 6to4
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert _is_public(address) is public


def test_files_below_the_allowed_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "media", tmp_path / "media2"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a b.png").write_bytes(CONTENT)
    (inside / "link.png").symlink_to(outside / "a b.png")
    (inside / "large.png").write_bytes(bytes(100_001))
    os.mkfifo(inside / "pipe")
    sources = MediaSources(local_path=str(inside), max_bytes=100_000)
    assert read(sources, f"file://{inside}/a%20b.png") == CONTENT
    assert read(sources, f"file://localhost{inside}/../media/a%20b.png") == CONTENT
    for url, said in (
        (f"file://{outside}/a%20b.png", "not below the folder"),
        (f"file://{inside}/../media2/a%20b.png", "not below the folder"),
        (f"file://{inside}/%2e%2e/media2/a%20b.png", "not below the folder"),
        (f"file://{inside}/link.png", "not below the folder"),
        ("file:///etc/passwd", "not below the folder"),
        (f"file://other.example{inside}/a%20b.png", "files are not read"),
        (f"file://{inside}/none.png", "'none.png' cannot be read: No such file"),
        (f"file://{inside}/large.png", "100001 bytes"),
        (f"file://{inside}/pipe", "'pipe' is no file"),
        (f"file://{inside}", "cannot be read|is no file"),
        (f"file://{inside}/a%00b", "is no path|cannot be read"),
    ):
        with pytest.raises(RequestError, match=said):
            read(sources, url)
    # What the program itself gives as a path is its own affair.
    assert read(sources, outside / "a b.png") == CONTENT
    sources.close()


def test_the_files_of_a_prompt_are_bounded_together(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(40_000))
    sources = MediaSources(max_bytes=100_000)
    parts = [MediaPart("image", tmp_path / str(number), f"part.{number}") for number in range(3)]
    assert [len(part.value) for part in sources.begin(parts[:2]).result(60)] == [40_000] * 2
    with pytest.raises(RequestError, match="more than 100000 bytes together"):
        sources.begin(parts).result(60)
    sources.close()


def test_what_waits_for_a_worker_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_MAX_OF_CLIENT", 50_000)
    monkeypatch.setattr(fetch, "_MAX_HELD", 150_000)
    (tmp_path / "a").write_bytes(bytes(40_000))
    part = MediaPart("image", tmp_path / "a", "here")
    sources = MediaSources()
    held = [sources.begin([part]).result(60) for _ in range(2)]
    with pytest.raises(QueueFullError, match="send it again later"):
        sources.begin([part])
    # Others have room of their own, as long as there is any.
    held += [sources.begin([part], name).result(60) for name in "ab"]
    with pytest.raises(QueueFullError, match="send it again later"):
        sources.begin([part], "c")
    # What needs no reading is not held up.
    data = MediaPart("image", b"", "there")
    assert sources.begin([data]).result(60) == [data]
    sources.release(len(held[0][0].value))
    assert sources.begin([part]).result(60)
    sources.close()


def test_what_comes_is_bounded_while_it_comes(
    sources: MediaSources, dialled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has come for a prompt that is refused has no room any more."""
    monkeypatch.setattr(fetch, "_MAX_HELD", 45_000)
    (tmp_path / "a").write_bytes(bytes(40_000))
    files = [MediaPart("image", tmp_path / "a", f"part.{number}") for number in range(2)]
    assert sources.begin(files, "one").result(60)
    with pytest.raises(QueueFullError, match="send it again later"):
        sources.begin(files, "two").result(60)
    sources.release(80_000, "one")
    with pytest.raises(RequestError, match="100001 bytes"):
        sources.begin([*files, *urls("endless")], "two").result(60)
    for _ in range(2):
        read = sources.begin([*files[:1], *urls("fine")], "two").result(60)
        sources.release(sum(len(part.value) for part in read), "two")
    assert not sources._held


def slow_ones(sources: MediaSources, dialled: list[Any], count: int, client: Any) -> list[Any]:
    """Prompts of a client that names addresses from which nothing whole ever comes."""
    begun = [sources.begin(urls("slow"), client) for _ in range(count)]
    wanted = min(count, fetch._OF_CLIENT)
    wait_until(lambda: len(dialled) >= wanted)
    return begun


def test_a_prompt_may_name_more_than_the_queue_has(
    dialled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing else waits; and it gives way, as others do."""
    monkeypatch.setattr(fetch, "_QUEUED", 20)
    sources = MediaSources(domains=("public.example",), seconds=60)
    assert len(sources.begin(urls(*["fine"] * 30), "one").result(60)) == 30
    wait_until(lambda: not sources._turns.num_running)
    many = sources.begin(urls(*["slow"] * 40), "one")
    with pytest.raises(QueueFullError, match="send it again later"):
        sources.begin(urls(*["fine"] * 50), "two")
    assert not many.done()
    waits = sources.begin(urls("fine"), "two")
    with pytest.raises(QueueFullError):
        many.result(60)
    assert waits.result(60)[0].value == CONTENT
    sources.close()


def test_a_program_is_refused_for_nothing_that_it_asked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_QUEUED", "_MAX_HELD", "_MAX_OF_CLIENT"):
        monkeypatch.setattr(fetch, name, 1)
    (tmp_path / "a.png").write_bytes(CONTENT)
    sources = MediaSources(max_bytes=3 * len(CONTENT))
    parts = [MediaPart("image", tmp_path / "a.png", f"part.{number}") for number in range(3)]
    begun = [sources.begin(parts, bounded=False) for _ in range(8)]
    assert [len(each.result(60)) for each in begun] == [3] * 8
    sources.release(8 * 3 * len(CONTENT))
    assert not sources._held
    sources.close()


def test_the_slow_addresses_of_one_hold_up_no_other(
    sources: MediaSources, dialled: list[Any]
) -> None:
    """Whatever salts they come with; and a newcomer has a place, which who has most gives up."""
    members = [Member("one", number) for number in range(64)]
    begun = [each for member in members for each in slow_ones(sources, dialled, 4, member)]
    assert len(begun) == fetch._QUEUED
    for other in ("two", Member("three", None)):
        (part,) = sources.begin(urls("fine"), other).result(30)
        assert part.value == CONTENT
    (refused,) = [each for each in begun if each.done()]
    with pytest.raises(QueueFullError, match="are being read already"):
        refused.result()
    waits = sources.begin(urls("fine"), Member("one", "another"))
    assert not waits.done()
    with pytest.raises(QueueFullError):
        sources.begin(urls(*["fine"] * 200), "two")
    # Nobody gave up a place for a prompt that found none.
    assert [each for each in [*begun, waits] if each.done()] == [refused]
    for each in begun:
        each.cancel()
    assert waits.result(60)[0].value == CONTENT


def test_a_host_has_not_all_threads(sources: MediaSources, dialled: list[Any]) -> None:
    begun = [sources.begin(urls("slow"), name) for name in "abcd" for _ in range(fetch._OF_CLIENT)]
    wait_until(lambda: len(dialled) >= fetch._OF_HOST)
    assert len(dialled) == fetch._OF_HOST
    (part,) = sources.begin(urls("fine", host="rebound.example"), "e").result(60)
    assert part.value == CONTENT
    waits = sources.begin(urls("fine"), "e")
    assert not waits.done()
    for each in begun:
        each.cancel()
    assert waits.result(60)[0].value == CONTENT


def test_a_resolver_that_does_not_answer(
    dialled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for no longer than for anything else, and in one thread."""
    resolve, hang = socket.getaddrinfo, threading.Event()
    asked: list[str] = []

    def slowly(host: str, *given: Any, **named: Any) -> Any:
        asked.append(host)
        if host == "hanging.example":
            hang.wait(60)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return resolve(host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    hosts = ("public.example", "hanging.example")
    hurried = MediaSources(domains=hosts, seconds=1)
    patient = MediaSources(domains=hosts, seconds=60)
    lost = [hurried.begin(urls("fine", host=hosts[1]), name) for name in "abcabc"]
    for each in lost:
        with pytest.raises(RequestError, match=r"'hanging\.example': it took more than 1 s"):
            each.result(60)
    assert hurried.begin(urls("fine"), "a").result(60)[0].value == CONTENT
    assert asked == ["hanging.example", "public.example"]
    # Nor is it waited for by nobody.
    left = patient.begin(urls("fine", host=hosts[1]))
    wait_until(lambda: left.cancel() and not patient._turns.num_running)
    last = patient.begin(urls("fine", host=hosts[1]))
    hang.set()
    with pytest.raises(RequestError, match="Temporary failure in name resolution"):
        last.result(60)
    assert len(dialled) == 1
    hurried.close()
    patient.close()


def test_connections_that_are_not_made_end_with_the_others(
    monkeypatch: pytest.MonkeyPatch, dialled: list[Any]
) -> None:
    """A host that takes no connection answers neither yes nor no."""
    with socket.socket() as deaf, contextlib.ExitStack() as stack:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        full = [stack.enter_context(socket.socket()) for _ in range(4)]
        for sock in full:
            sock.setblocking(False)
            sock.connect_ex(deaf.getsockname())
        monkeypatch.setitem(PORTS, 8080, deaf.getsockname()[1])
        sources = MediaSources(domains=("public.example", "public.example:8080"), seconds=600)
        parts = [*urls(*["fine"] * 3, host="public.example:8080"), *urls("missing")]
        with pytest.raises(RequestError, match="status 404"):
            sources.begin(parts).result(60)
        wait_until(lambda: not sources._turns.num_running)
        # And when the program ends.
        before = len(dialled)  # fewer than all, where the one that is missing was first to end
        waits = sources.begin(parts[:2])
        wait_until(lambda: len(dialled) > before)
        sources.close()
        with pytest.raises(RequestError, match="nobody waits for it"):
            waits.result(60)


def test_a_host_that_no_thread_could_look_up_is_looked_up_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = Resolver()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            resolver.look_up("127.0.0.1")
    assert resolver.look_up("127.0.0.1").result(30).addresses == ["127.0.0.1"]
