"""Take the picture of the web page that the documents show.

A model is served with ``engine-core serve`` and asked in a headless Chromium; what the page then
shows is saved. Needs the package playwright and a Chromium, such as Debian's package chromium:

    python scripts/screenshot.py .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

# Those of a conversation are asked one after another; the last conversation is the one shown.
CONVERSATIONS = (
    ("Name three planets and a fact about each.",),
    (
        "Write a Python function that returns the factorial of n.",
        "What is the capital of France?",
    ),
)
START_SECONDS = 300
ANSWER_MS = 300_000


@contextmanager
def serve(model: Path) -> Iterator[str]:
    """Serve a model on a free port; gives the page's address once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    name = model.name.split(".")[0]
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "engine_core.cli", "serve", str(model)),
            *("--port", str(port), "--served-model-name", name),
        ]
    )
    try:
        wait_until_ready(server, port)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit("the server did not become ready; its log is above")


def talk(page: Page, questions: tuple[str, ...]) -> None:
    """Ask in a conversation of its own, and wait for the answers."""
    page.locator("#new-conversation").click()
    for index, question in enumerate(questions):
        page.fill("#prompt", question)
        page.keyboard.press("Enter")
        page.locator(".answer:not(.streaming)").nth(index).wait_for(timeout=ANSWER_MS)


def take(url: str, chromium: str, out: Path, scheme: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page(
            viewport={"width": 1200, "height": 780},
            device_scale_factor=2,
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page.goto(url)
        page.locator("#open-settings").click()
        page.fill("[name=temperature]", "0")
        page.fill("[name=max_tokens]", "300")
        page.locator("#close-settings").click()
        for questions in CONVERSATIONS:
            talk(page, questions)
        page.mouse.move(600, 770)
        page.locator("#scroller").evaluate("node => { node.scrollTop = 0; }")
        page.locator("#to-end").evaluate("node => { node.hidden = true; }")
        page.screenshot(path=out, animations="disabled", caret="hide")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="a checkpoint, such as a GGUF file")
    parser.add_argument("--out", type=Path, default=Path("docs/images/web-page.png"))
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium was found; on Debian: apt-get install chromium")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with serve(arguments.model) as url:
        take(url, chromium, arguments.out, arguments.scheme)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
