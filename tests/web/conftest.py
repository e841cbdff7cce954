"""A headless Chromium, and a server that answers as each test wants it."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

# Far more than is needed: only a test that fails takes so long, however busy the machine is.
TIMEOUT_MS = 60_000
WEB = Path(__file__).parents[2] / "engine_core" / "server" / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a test of this folder once more if it fails, and no other: a browser is not ours."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.flaky(reruns=1))


@dataclass(frozen=True)
class Answer:
    """A stream of chunks; with ``hold_after`` it waits after so many until the test lets it go."""

    content: Sequence[str] = ("Hello ", "there.")
    reasoning: Sequence[str] = ()
    finish_reason: str | None = "stop"
    error: str | None = None
    usage: dict[str, Any] | None = field(
        default_factory=lambda: {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}
    )
    hold_after: int | None = None
    delay: float = 0.0
    raw: bytes = b""


@dataclass(frozen=True)
class Refusal:
    """An answer that is an HTTP error."""

    status: int
    body: object
    hold: bool = False


@dataclass(frozen=True)
class Received:
    """A request for an answer, as it came."""

    body: dict[str, Any]
    authorization: str | None


class FakeServer:
    """The page's files, /v1/models and /v1/chat/completions, on a port of this machine."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reset()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                if path == "/v1/models":
                    if self._is_authorized():
                        each: dict[str, object] = {"object": "model"}
                        if fake.modalities is not None:
                            each["input_modalities"] = fake.modalities
                        models = [{"id": name, **each} for name in fake.models]
                        self._json(200, {"object": "list", "data": models})
                    return
                file = WEB / (path.removeprefix("/") or "index.html")
                if not file.is_file():
                    self._json(404, {"error": {"message": f"no {path}"}})
                    return
                self.send_response(200)
                self.send_header("Content-Type", TYPES[file.suffix])
                self.send_header("Content-Security-Policy", POLICY)
                # The next test's page is of the same files.
                self.send_header("Cache-Control", "max-age=3600")
                self.end_headers()
                self.wfile.write(file.read_bytes())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not self._is_authorized():
                    return
                client_gone = fake.client_gone
                fake.received.append(Received(body, self.headers["Authorization"]))
                reply = fake.replies.popleft() if fake.replies else Answer()
                try:
                    if isinstance(reply, Refusal):
                        if reply.hold:
                            self._hold()
                        self._json(reply.status, reply.body)
                    else:
                        self._stream(reply)
                except ConnectionError:
                    client_gone.set()

            def _is_authorized(self) -> bool:
                wanted = fake.api_key
                if wanted is None or self.headers["Authorization"] == f"Bearer {wanted}":
                    return True
                self._json(401, {"error": {"message": "Incorrect API key provided."}})
                return False

            def _json(self, status: int, body: object) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, answer: Answer) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                deltas = [{"reasoning_content": text} for text in answer.reasoning]
                deltas += [{"content": text} for text in answer.content]
                for sent, delta in enumerate(deltas):
                    if sent == answer.hold_after:
                        self._hold()
                    time.sleep(answer.delay)
                    self._event({"choices": [{"index": 0, "delta": delta}]})
                if answer.hold_after == len(deltas):
                    self._hold()
                self.wfile.write(answer.raw)
                if answer.error is not None:
                    self._event({"error": {"message": answer.error, "code": 500}})
                    return
                if answer.finish_reason is None:
                    return
                end = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
                self._event({"choices": [end]})
                self._event({"choices": [], "usage": answer.usage})
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, chunk: object) -> None:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

            def _hold(self) -> None:
                """Wait for the test, or for the client to close the connection."""
                deadline = time.monotonic() + 120
                go = fake.go
                while not go.is_set():
                    readable, _, _ = select.select([self.connection], [], [], 0.02)
                    if readable and not self.connection.recv(1, socket.MSG_PEEK):
                        raise ConnectionResetError
                    if time.monotonic() > deadline:
                        raise TimeoutError("the test never let the answer go")

        class Server(ThreadingHTTPServer):
            request_queue_size = 64  # a browser that has to wait tries again a second later

            def handle_error(self, request: object, client_address: object) -> None:
                import sys

                error = sys.exc_info()[1]
                if error is not None and not isinstance(error, ConnectionError):
                    fake.unexpected.append(error)

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def reset(self) -> None:
        """Forget what a test wanted and saw; what it held goes on."""
        self.go.set()
        self.models = ["tiny"]
        self.modalities: list[str] | None = None
        self.api_key: str | None = None
        self.replies: deque[Answer | Refusal] = deque()
        self.received: list[Received] = []
        self.go = threading.Event()
        self.client_gone = threading.Event()
        self.unexpected: list[BaseException] = []

    @property
    def last(self) -> dict[str, Any]:
        """The body of the last request for an answer."""
        return self.received[-1].body

    def wait_for_requests(self, count: int) -> None:
        """Until so many requests for an answer have come."""
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while len(self.received) < count:
            assert time.monotonic() < deadline, f"{len(self.received)} requests of {count}"
            time.sleep(0.01)

    def close(self) -> None:
        """Stop listening; what is being answered ends."""
        self.go.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: FakeServer) -> FakeServer:
    shared_server.reset()
    return shared_server


@pytest.fixture
def lost_server() -> Iterator[FakeServer]:
    """One of its own for a test that closes it."""
    server = FakeServer()
    yield server
    server.close()


def _chromium() -> str:
    """The path of a Chromium; without one the test is skipped, but never in CI."""
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        reason = "needs the package playwright"
    else:
        for name in ("chromium", "chromium-browser", "google-chrome"):
            if path := shutil.which(name):
                return path
        reason = "needs a Chromium, such as Debian's package chromium"
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, which CI must have")
    pytest.skip(reason)


# Not for the session: Playwright runs an event loop in this thread, which other tests' asyncio.run
# would trip over.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = _chromium()
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            timeout=3 * TIMEOUT_MS,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        yield browser
        browser.close()


@dataclass
class Watch:
    """Forbidden actions of a page, and console errors that a test expects."""

    origin: str
    problems: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def attach(self, page: Page) -> None:
        page.on("pageerror", self._error)
        page.on("console", self._console)
        page.on("request", self._request)

    def detach(self, page: Page) -> None:
        page.remove_listener("pageerror", self._error)
        page.remove_listener("console", self._console)
        page.remove_listener("request", self._request)

    def _error(self, error: object) -> None:
        self.problems.append(f"exception: {error}")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.origin, "blob:" + self.origin)):
            self.problems.append(f"request: {request.url}")

    def unexpected(self) -> list[str]:
        return [
            problem
            for problem in self.problems
            if not any(expected in problem for expected in self.expected)
        ]


OpenPage = Callable[..., "Page"]


class KeptPage:
    """A page that one test leaves to the next: a new one starts a process of the browser."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._page: Page | None = None

    def take(self) -> Page:
        """The page, which shows nothing and has nothing stored."""
        if self._page is None:
            context = self._browser.new_context()
            context.set_default_timeout(TIMEOUT_MS)
            self._page = context.new_page()
        page, self._page = self._page, None
        return page

    def leave(self, page: Page, origin: str) -> None:
        """Take it back, without what a test has stored for an origin and other pages.

        One that a failed test left busy is closed instead.
        """
        from playwright.sync_api import Error

        try:
            self._tidy(page, origin)
        except Error:
            page.context.close()
        else:
            self._page = page

    def _tidy(self, page: Page, origin: str) -> None:
        context = page.context
        for other in context.pages:
            if other is not page:
                other.close()
        page.goto(origin + "icon.svg")  # which stores nothing itself
        page.evaluate("sessionStorage.clear()")
        page.goto("about:blank")
        devtools = context.new_cdp_session(page)
        everything = {"origin": origin.rstrip("/"), "storageTypes": "all"}
        devtools.send("Storage.clearDataForOrigin", everything)
        devtools.detach()
        page.mouse.move(0, 0)


@pytest.fixture(scope="module")
def kept_page(browser: Browser) -> KeptPage:
    return KeptPage(browser)


@pytest.fixture
def open_page(
    browser: Browser, kept_page: KeptPage, shared_server: FakeServer
) -> Iterator[OpenPage]:
    """Opens a page at an address, with nothing stored, and watches what it does.

    Keyword arguments go to Playwright's ``new_context``. A page that logs an error or a warning, or
    asks another origin for anything, fails its test, but for what ``page.expected`` names.
    """
    opened: list[tuple[BrowserContext, Watch]] = []
    kept: list[tuple[Page, Watch]] = []

    def open_(url: str, *, expected: tuple[str, ...] = (), **options: Any) -> Page:
        watch = Watch(url, expected=expected)
        if not options and not kept and url == shared_server.url:
            page = kept_page.take()
            kept.append((page, watch))
        else:
            context = browser.new_context(**options)
            context.set_default_timeout(TIMEOUT_MS)
            opened.append((context, watch))
            page = context.new_page()
        watch.attach(page)
        page.goto(url)
        return page

    yield open_
    for context, _ in opened:
        context.close()
    for page, watch in kept:
        watch.detach(page)
        kept_page.leave(page, shared_server.url)
    for _, watch in (*opened, *kept):
        assert watch.unexpected() == []
    assert not shared_server.unexpected


@pytest.fixture
def page(server: FakeServer, open_page: OpenPage) -> Page:
    return open_page(server.url)


@pytest.fixture
def answer_type() -> type[Answer]:
    return Answer


@pytest.fixture
def refusal_type() -> type[Refusal]:
    return Refusal
