"""Pictures in the web page: added, shown, sent, kept, exported, and refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from page_actions import answers, ask, ask_and_wait, expect
from PIL import Image
from seeing_model import character, write_seeing_model
from serving import ServerProcess

if TYPE_CHECKING:
    from playwright.sync_api import Page

OpenPage = Callable[..., "Page"]


def picture(width: int, height: int, seed: int, kind: str) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def png(seed: int = 0) -> bytes:
    return picture(60, 40, seed, "PNG")


def as_file(name: str, content: bytes, kind: str = "image/png") -> Any:
    return {"name": name, "mimeType": kind, "buffer": content}


def choose(page: Page, *files: Any) -> None:
    """Add files with the button."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add pictures").click()
    chooser.value.set_files(list(files))


def attached(page: Page) -> Any:
    return page.locator("#attached img")


# Files as a browser gives them to a page that something is pasted into, or dropped on.
TRANSFER_JS = """([kind, files, text]) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files) {
    const bytes = Uint8Array.from(atob(content), (char) => char.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  if (text) data.setData("text/plain", text);
  const field = kind === "paste" ? { clipboardData: data } : { dataTransfer: data };
  const Kind = kind === "paste" ? ClipboardEvent : DragEvent;
  const event = new Kind(kind, { ...field, bubbles: true, cancelable: true });
  document.querySelector(kind === "paste" ? "#prompt" : "#scroller").dispatchEvent(event);
  return event.defaultPrevented;
}"""


def transfer(page: Page, kind: str, *files: tuple[str, str, bytes], text: str = "") -> bool:
    """Paste or drop files; whether the page takes them."""
    given = [(name, mime, base64.b64encode(content).decode()) for name, mime, content in files]
    taken: bool = page.evaluate(TRANSFER_JS, [kind, given, text])
    return taken


def urls(content: Any) -> list[bytes]:
    """The pictures of a message as it was sent."""
    found = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert all(url.startswith("data:image/") for url in found)
    return [base64.b64decode(url.split(",")[1]) for url in found]


@pytest.fixture
def seeing(server: Any, open_page: OpenPage) -> Page:
    """The page of a model that takes pictures."""
    server.modalities = ["text", "image"]
    page = open_page(server.url)
    expect(page.get_by_role("button", name="Add pictures")).to_be_visible()
    return page


def test_pictures_are_added_shown_removed_and_sent(server, seeing):
    page = seeing
    first, second, third = (png(seed=seed) for seed in range(3))
    choose(page, as_file("cat.png", first), as_file("dog.png", second))
    assert transfer(page, "drop", ("bird.png", "image/png", third))
    assert transfer(page, "paste", ("image.png", "image/png", third))
    names = ["cat.png", "dog.png", "bird.png", "Pasted picture"]
    expect(attached(page)).to_have_count(4)
    assert [image.get_attribute("alt") for image in attached(page).all()] == names
    # Both by keyboard: the one after it is reached, and its button removes it.
    page.get_by_role("button", name="Remove dog.png").press("Enter")
    expect(page.get_by_role("button", name="Remove bird.png")).to_be_focused()
    page.keyboard.press("Enter")
    expect(attached(page)).to_have_count(2)
    ask_and_wait(page, "What is this?")
    [message] = server.last["messages"]
    assert urls(message["content"]) == [first, third]
    assert message["content"][-1] == {"type": "text", "text": "What is this?"}
    expect(attached(page)).to_have_count(0)
    shown = page.locator(".bubble img")
    expect(shown).to_have_count(2)
    expect(shown.first).to_have_js_property("naturalWidth", 60)
    expect(shown.first).to_have_attribute("alt", "cat.png")
    button = page.get_by_role("button", name="cat.png", exact=True)
    before = shown.first.bounding_box()
    button.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    assert before is not None

    # A picture alone, after a turn whose pictures go with it.
    choose(page, as_file("dog.png", second))
    expect(attached(page)).to_have_count(1)
    page.locator("#prompt").press("Enter")
    expect(answers(page)).to_have_count(2)
    content = [message["content"] for message in server.last["messages"]]
    assert urls(content[0]) == [first, third]
    assert content[1] == "Hello there."
    assert urls(content[2]) == [second]
    assert [part["type"] for part in content[2]] == ["image_url"]


def test_what_is_no_picture_is_refused_by_name(server, seeing):
    page = seeing
    choose(page, as_file("notes.png", b"not a picture"), as_file("cat.png", png()))
    expect(page.locator("#alert")).to_have_text(
        "notes.png is no picture that this browser can show."
    )
    expect(attached(page)).to_have_count(1)
    assert transfer(page, "drop", ("export.json", "application/json", b"{}"))
    expect(page.locator("#alert")).to_contain_text("export.json is no picture")
    expect(attached(page)).to_have_count(1)
    # Text that comes with a picture of it is text.
    assert not transfer(page, "paste", ("image.png", "image/png", png()), text="words")
    assert not transfer(page, "drop", text="words")
    expect(attached(page)).to_have_count(1)


def test_a_large_or_unusual_picture_is_drawn_anew(server, seeing):
    page = seeing
    large = picture(2600, 2000, 0, "JPEG")
    assert len(large) > 2_000_000
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="30" height="20"><rect width="9"/></svg>'
    choose(
        page,
        as_file("large.jpg", large, "image/jpeg"),
        as_file("drawing.svg", svg, "image/svg+xml"),
    )
    expect(attached(page)).to_have_count(2)
    ask_and_wait(page, "And?")
    first, second = map(Image.open, map(BytesIO, urls(server.last["messages"][0]["content"])))
    assert first.format == "JPEG"
    assert first.width * first.height <= 4_010_000
    assert first.width / first.height == pytest.approx(1.3, abs=0.002)
    assert (second.format, second.size) == ("PNG", (30, 20))


def test_a_text_model_takes_none(server, open_page):
    server.modalities = ["text"]
    page = open_page(server.url)
    expect(page.locator("#model-name")).to_have_text("tiny")
    expect(page.get_by_role("button", name="Add pictures")).to_be_hidden()
    assert transfer(page, "drop", ("cat.png", "image/png", png()))
    expect(page.locator("#alert")).to_have_text("tiny takes no pictures, only text.")
    expect(attached(page)).to_have_count(0)
    # A conversation with pictures stays, and says why it does not go on with this model.
    server.modalities = ["text", "image"]
    page.reload()
    choose(page, as_file("cat.png", png()))
    ask_and_wait(page, "What is this?")
    server.modalities = ["text"]
    page.reload()
    expect(page.locator(".bubble img")).to_have_count(1)
    ask(page, "And now?")
    expect(page.locator("#alert")).to_contain_text("tiny takes no pictures, only text. Edit the")
    expect(page.locator("#prompt")).to_have_value("And now?")
    assert len(server.received) == 1
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_role("button", name="Remove cat.png").click()
    page.get_by_role("button", name="Send", exact=True).first.click()
    expect(page.locator(".bubble img")).to_have_count(0)
    server.wait_for_requests(2)
    assert server.last["messages"] == [{"role": "user", "content": "What is this?"}]


def test_pictures_are_kept_with_the_conversation(server, open_page, refusal_type):
    server.modalities = ["text", "image"]
    page = open_page(server.url, expected=("status of 400",))
    cat = png()
    choose(page, as_file("cat.png", cat))
    expect(attached(page)).to_have_count(1)
    page.reload()
    expect(attached(page)).to_have_js_property("naturalWidth", 60)
    # Refused, the picture and what was typed are there to be sent again.
    server.replies.append(refusal_type(400, {"error": {"message": "too many pictures"}}))
    ask(page, "What is this?")
    expect(page.locator("#alert")).to_have_text("too many pictures")
    expect(attached(page)).to_have_count(1)
    page.locator("#prompt").press("Enter")
    expect(answers(page)).to_have_count(1)
    assert urls(server.last["messages"][0]["content"]) == [cat]

    page.reload()
    expect(page.locator(".bubble img")).to_have_js_property("naturalWidth", 60)
    page.get_by_role("button", name="Regenerate this answer").click()
    expect(page.locator(".versions")).to_have_text("2/2")
    assert urls(server.last["messages"][0]["content"]) == [cat]
    # Nobody stores it any more once the conversation is deleted.
    count = """() => new Promise((resolve) => {
      indexedDB.open("engine-core").onsuccess = (event) => {
        const store = event.target.result.transaction("pictures").objectStore("pictures");
        store.count().onsuccess = (found) => resolve(found.target.result);
      };
    })"""
    assert page.evaluate(count) == 1
    page.get_by_role("button", name="Delete “What is this?”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_function(f"async () => (await ({count})()) === 0")


def test_pictures_go_through_an_export(server, seeing, open_page, tmp_path):
    page = seeing
    cat, dog = png(), png(seed=1)
    choose(page, as_file("cat.png", cat))
    ask_and_wait(page, "What is this?")
    choose(page, as_file("dog.png", dog))
    expect(attached(page)).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation as JSON").click()
    file = tmp_path / "seen.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text("utf-8"))
    [conversation] = exported["conversations"]
    url = f"data:image/png;base64,{base64.b64encode(cat).decode()}"
    assert conversation["messages"][0]["pictures"] == [{"name": "cat.png", "data": url}]

    other = open_page(server.url)
    other.locator("#import-file").set_input_files(file)
    expect(other.locator(".bubble img")).to_have_js_property("naturalWidth", 60)
    expect(attached(other)).to_have_attribute("alt", "dog.png")
    other.reload()
    ask_and_wait(other, "And this?")
    sent = server.last["messages"]
    assert [urls(sent[0]["content"]), urls(sent[2]["content"])] == [[cat], [dog]]

    # Nothing of a file with a bad picture is taken.
    before = other.evaluate("JSON.stringify(localStorage)")
    for bad, said in (
        ({"name": "x", "data": "https://example.org/x.png"}, '"pictures" is'),
        ({"name": "x", "data": "data:image/svg+xml;base64,PHN2Zz4="}, '"pictures" is'),
        ({"name": "x", "data": "data:image/png;base64,*"}, "a picture whose base64 is wrong"),
        ({"name": "x", "id": "y", "data": None}, '"pictures" is'),
        ("x", '"pictures" is'),
    ):
        conversation["messages"][0]["pictures"] = [bad]
        conversation["updated"] = "2031-01-01T00:00:00Z"
        file.write_text(json.dumps(exported), "utf-8")
        other.locator("#import-file").set_input_files(file)
        expect(other.locator("#alert")).to_contain_text(said)
    assert other.evaluate("JSON.stringify(localStorage)") == before


def test_no_room_and_a_lost_picture_are_said(server, seeing):
    page = seeing
    page.evaluate(
        """() => {
          IDBObjectStore.prototype.put = () => {
            throw new DOMException("", "QuotaExceededError");
          };
        }"""
    )
    choose(page, as_file("cat.png", png()))
    expect(page.locator("#alert")).to_contain_text("no room left to store cat.png")
    ask_and_wait(page, "What is this?")
    assert len(urls(server.last["messages"][0]["content"])) == 1
    page.reload()
    expect(page.locator(".bubble")).to_contain_text("cat.png (no longer in this browser)")
    ask(page, "Again?")
    expect(page.locator("#alert")).to_contain_text("“cat.png” is no longer in this browser.")
    assert len(server.received) == 1
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_role("button", name="Remove cat.png").click()
    page.get_by_role("button", name="Send", exact=True).first.click()
    server.wait_for_requests(2)
    expect(answers(page)).to_have_count(1)
    assert server.last["messages"] == [{"role": "user", "content": "What is this?"}]


def test_enter_waits_for_a_picture_that_is_being_read(server, seeing):
    page = seeing
    page.evaluate(
        """() => {
          const read = File.prototype.arrayBuffer;
          File.prototype.arrayBuffer = async function () {
            await new Promise((resolve) => { window.go = resolve; });
            return read.call(this);
          };
        }"""
    )
    choose(page, as_file("cat.png", png()))
    ask(page, "What is this?")
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_have_value("What is this?")
    page.evaluate("go()")
    expect(answers(page)).to_have_count(1)
    assert len(server.received) == 1
    assert len(urls(server.last["messages"][0]["content"])) == 1


@pytest.fixture
def seeing_server(browser: object, tmp_path: Path) -> Iterator[ServerProcess]:
    """A model that sees; asks for ``browser`` so as not to start in vain."""
    model = write_seeing_model(tmp_path / "m")
    with ServerProcess(model, "--kv-cache-memory", "16MiB", "--max-model-len", "256") as server:
        yield server.wait_ready()


def test_with_a_real_model_that_sees(seeing_server, open_page):
    page = open_page(seeing_server.url + "/", expected=("status of 400",))
    text = "".join(map(character, (5, 80, 7)))
    choose(page, as_file("cat.png", png()))
    expect(attached(page)).to_have_count(1)
    page.get_by_role("button", name="Settings", exact=True).click()
    for name, value in {"temperature": "0", "max_tokens": "8"}.items():
        page.fill(f"[name={name}]", value)
    ask_and_wait(page, text)
    expect(page.locator(".stats")).to_contain_text("of pictures")
    stored = "JSON.parse(localStorage.getItem('engine-core.conversation.' + "
    stored += "localStorage.getItem('engine-core.current'))).messages[1]"
    answer = page.evaluate(stored)
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    body = {"model": "m", "temperature": 0, "max_tokens": 8}
    body["messages"] = [{"role": "user", "content": content}]
    whole = httpx.post(seeing_server.url + "/v1/chat/completions", json=body, timeout=60).json()
    assert answer["content"] == whole["choices"][0]["message"]["content"] != ""
    assert answer["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]

    # What only the server knows to refuse: the words are its own, and the picture is not lost.
    choose(page, as_file("still.gif", moving(), "image/gif"))
    expect(attached(page)).to_have_count(1)
    ask(page, text)
    expect(page.locator("#alert")).to_contain_text("the picture is animated")
    expect(attached(page)).to_have_count(1)


def moving() -> bytes:
    out = BytesIO()
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()
