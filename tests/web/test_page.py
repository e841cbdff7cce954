"""The web page in a real browser, against a server that answers as each test wants it."""

from __future__ import annotations

import hashlib
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_actions import answers, ask, ask_and_wait, expect, in_answer
from serving import ServerProcess, write_tiny_model
from slow_llama import OPTIONS as SLOW

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

WEB = Path(__file__).parents[2] / "engine_core" / "server" / "web"
OpenPage = Callable[..., "Page"]


def show_settings(page: Page, **values: str) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    for name, value in values.items():
        page.fill(f"[name={name}]", value)


def test_asks_the_served_model_and_shows_what_it_says(server, page, answer_type):
    usage = {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    server.replies.append(
        answer_type(content=["An **engine** ", "runs a ", "model."], usage=usage, hold_after=1)
    )
    expect(page.locator("#model-name")).to_have_text("tiny")
    ask(page, "What is an engine?")
    # Tokens that all come at once have no speed.
    expect(page.locator(".prose")).to_have_text("An engine")
    server.go.set()
    expect(answers(page)).to_have_count(1)

    assert server.last == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is an engine?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.received[-1].authorization is None
    expect(page.locator(".answer .prose")).to_have_text("An engine runs a model.")
    expect(page.locator(".answer strong")).to_have_text("engine")
    stats = page.locator(".stats").inner_text()
    assert re.fullmatch(
        r"7 tokens · [\d.]+ tokens/s · first token [\d.]+ m?s · total [\d.]+ m?s"
        r" · prompt 12 tokens, 8 cached",
        stats,
    ), stats
    expect(page.locator("#prompt")).to_have_value("")
    expect(page.locator("#prompt")).to_be_focused()


def test_speed_counts_the_tokens_after_the_first(page):
    def statistics(tokens: int, **timing: float) -> str:
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        return page.evaluate(
            "async (answer) => (await import('./message.js')).statistics(answer)",
            {"usage": usage, "timing": timing},
        )

    # 20 tokens in the half second between the first and the last.
    assert statistics(21, first=1500, last=2000, total=2040).startswith(
        "21 tokens · 40.0 tokens/s · first token 1.5 s · total 2.0 s"
    )
    assert "tokens/s" not in statistics(1, first=100, last=100, total=100)
    assert "tokens/s" not in statistics(9, first=100, last=100, total=100)  # all in one chunk


def test_several_served_names_can_be_chosen(server, open_page):
    server.models = ["small", "also-small"]
    page = open_page(server.url)
    page.get_by_label("Model").select_option("also-small")
    ask_and_wait(page, "Hi")
    assert server.last["model"] == "also-small"
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("also-small")


def test_system_prompt_and_sampling_are_sent_only_if_set(server, page):
    show_settings(
        page,
        system="Be brief.",
        temperature="0.7",
        top_p="0.9",
        top_k="40",
        max_tokens="64",
        seed="0",
        min_p="0.05",
        presence_penalty="-0.5",
        frequency_penalty="0.25",
        repetition_penalty="1.1",
    )
    ask_and_wait(page, "Hi")
    body = server.last
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 64, "seed": 0}
    sampling |= {"min_p": 0.05, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    sampling["repetition_penalty"] = 1.1
    assert {name: body.get(name) for name in sampling} == sampling

    page.reload()
    show_settings(page)
    expect(page.locator("[name=system]")).to_have_value("Be brief.")
    page.get_by_role("button", name="Reset to the defaults").click()
    ask_and_wait(page, "And now?")
    assert server.last["messages"][0] == {"role": "user", "content": "Hi"}
    assert not sampling.keys() & server.last.keys()


def test_a_setting_out_of_range_is_not_sent(server, page):
    show_settings(page, top_p="1.5")
    ask(page, "Hi")
    expect(page.locator("#settings-error")).to_contain_text("Top-p")
    expect(page.locator("[name=top_p]")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("[name=top_p]")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("Hi")
    assert server.received == []
    page.fill("[name=top_p]", "0.5")
    expect(page.locator("#settings-error")).to_be_hidden()
    page.locator("#prompt").press("Enter")
    expect(answers(page)).to_have_count(1)
    assert server.last["top_p"] == 0.5


def test_enter_sends_and_shift_enter_starts_a_line(server, page):
    page.locator("#prompt").press("Enter")
    page.locator("#prompt").press_sequentially("one")
    height = page.locator("#prompt").bounding_box()["height"]
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#prompt").bounding_box()["height"] > height
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(1)
    assert [request.body["messages"] for request in server.received] == [
        [{"role": "user", "content": "one\ntwo"}]
    ]


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stopping_closes_the_connection_and_keeps_the_text(server, page, answer_type, how):
    server.replies.append(answer_type(content=["So far", " and no further"], hold_after=1))
    ask(page, "Go on")
    expect(page.locator(".prose")).to_have_text("So far")
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop the answer").click()
    assert server.client_gone.wait(60)
    expect(page.locator(".note")).to_have_text("Stopped.")
    expect(page.locator(".prose")).to_have_text("So far")
    expect(page.locator("#prompt")).to_be_focused()
    ask_and_wait(page, "More")
    assert server.last["messages"] == [
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": "So far"},
        {"role": "user", "content": "More"},
    ]


def test_stopping_before_the_first_token_gives_the_text_back(server, page, answer_type):
    server.replies.append(answer_type(hold_after=0))
    ask(page, "Too soon")
    server.wait_for_requests(1)
    expect(page.locator(".answer.streaming")).to_have_count(1)
    page.locator("#prompt").press_sequentially("later")
    page.keyboard.press("Enter")  # an answer is being made: nothing is sent, nothing is lost
    page.keyboard.press("Escape")
    assert server.client_gone.wait(60)
    expect(page.locator("#prompt")).to_have_value("Too soon\nlater")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#alert")).to_be_hidden()
    assert len(server.received) == 1


def test_regenerating_asks_again_without_the_answer(server, page, answer_type, refusal_type):
    server.replies.extend([answer_type(content=["First"]), answer_type(content=["Second"])])
    ask_and_wait(page, "Name a number")
    page.get_by_role("button", name="Regenerate this answer").click()
    expect(page.locator(".prose")).to_have_text("Second")
    assert server.last["messages"] == [{"role": "user", "content": "Name a number"}]

    page.evaluate("addEventListener('error', () => {})")
    server.replies.append(answer_type(content=[], error="The engine died."))
    page.get_by_role("button", name="Regenerate this answer").click()
    expect(page.locator("#alert")).to_have_text("The engine died.")
    expect(page.locator(".prose")).to_have_text("Second")


def test_an_edited_message_replaces_what_follows_it(server, page, answer_type):
    server.replies.extend(answer_type(content=[f"Answer {n}"]) for n in range(1, 4))
    ask_and_wait(page, "One")
    ask_and_wait(page, "Two")

    def edit() -> Locator:
        page.locator(".user").first.hover()
        page.get_by_role("button", name="Edit this message").first.click()
        return page.get_by_label("Edit your message")

    area = edit()
    expect(area).to_be_focused()
    expect(area).to_have_value("One")
    expect(page.locator(".editor .hint")).to_have_text(
        "Sending removes the 3 messages after this one."
    )
    area.fill("changed my mind")
    area.press("Escape")
    expect(page.locator(".bubble")).to_have_text(["One", "Two"])

    edit().fill("Uno")
    page.keyboard.press("Enter")
    expect(page.locator(".prose")).to_have_text(["Answer 3"])
    expect(page.locator(".bubble")).to_have_text(["Uno"])
    assert server.last["messages"] == [{"role": "user", "content": "Uno"}]


def test_versions_of_an_answer_are_kept(server, page, answer_type):
    for text in ("One", "Two", "Then", "Three"):
        server.replies.append(answer_type(content=[text]))
    regenerate = page.get_by_role("button", name="Regenerate this answer")
    earlier = page.get_by_role("button", name="Previous version")
    later = page.get_by_role("button", name="Next version")
    versions = page.locator(".versions")
    ask_and_wait(page, "Name a number")
    expect(versions).to_have_count(0)
    regenerate.click()
    expect(versions).to_have_text("2/2")
    expect(later).to_be_disabled()
    # What is asked now follows the first version, and stays with it.
    earlier.press("Enter")
    expect(page.locator(".prose")).to_have_text("One")
    expect(later).to_be_focused()
    expect(page.get_by_role("status")).to_contain_text("Version 1 of 2.")
    ask_and_wait(page, "And then?")
    assert [message["content"] for message in server.last["messages"]] == [
        *("Name a number", "One", "And then?"),
    ]
    later.click()
    expect(page.locator(".prose")).to_have_text("Two")
    regenerate.click()
    expect(versions).to_have_text("3/3")
    expect(page.locator(".prose")).to_have_text("Three")
    page.reload()
    expect(versions).to_have_text("3/3")
    earlier.click()
    earlier.click()
    expect(versions).to_have_text("1/3")
    expect(page.locator(".prose")).to_have_text(["One", "Then"])


def test_an_answer_can_be_edited_and_continued(server, open_page, answer_type, refusal_type):
    page = open_page(server.url, expected=("status of 400",))
    server.replies.append(answer_type(content=["It is red"]))
    server.replies.append(refusal_type(400, {"error": {"message": "Not with this template."}}))
    server.replies.append(answer_type(content=[" and", " green"], finish_reason="length"))
    server.replies.append(answer_type(content=[" too."]))
    ask_and_wait(page, "Which colour?")

    def edit() -> Locator:
        page.get_by_role("button", name="Edit this answer").click()
        return page.get_by_label("Edit the answer")

    area = edit()
    expect(area).to_be_focused()
    expect(area).to_have_value("It is red")
    area.fill("It is blue")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#alert")).to_have_text("Not with this template.")
    expect(area).to_have_value("It is blue")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(answers(page).locator(".prose")).to_have_text("It is blue and green")
    asked = [{"role": "user", "content": "Which colour?"}]
    begun = {"continue_final_message": True, "add_generation_prompt": False}
    wanted = {"messages": [*asked, {"role": "assistant", "content": "It is blue"}], **begun}
    assert {name: server.last[name] for name in wanted} == wanted
    expect(page.locator(".stats")).to_contain_text("edited")
    expect(page.locator(".versions")).to_have_text("2/2")

    # Cut off by the limit, it can go on as it is; that is no other version.
    page.get_by_role("button", name="Continue this answer").click()
    expect(answers(page).locator(".prose")).to_have_text("It is blue and green too.")
    assert server.last["messages"][1]["content"] == "It is blue and green"
    expect(page.locator(".versions")).to_have_text("2/2")
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".prose")).to_have_text("It is red")

    edit().fill("It is\n*white*")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".prose em")).to_have_text("white")
    ask_and_wait(page, "Sure?")
    assert server.last["messages"][1]["content"] == "It is\n*white*"
    assert not begun.keys() & server.last.keys()


def test_an_edit_that_is_refused_is_still_there(server, open_page, answer_type, refusal_type):
    page = open_page(server.url, expected=("status of 400",))
    server.replies.append(answer_type(content=["Answer"]))
    server.replies.append(refusal_type(400, {"error": {"message": "Too long."}}))
    ask_and_wait(page, "One")
    page.locator(".user").hover()
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit your message").fill("Uno")
    page.keyboard.press("Enter")
    expect(page.locator("#alert")).to_have_text("Too long.")
    expect(page.get_by_label("Edit your message")).to_have_value("Uno")
    expect(page.locator(".prose")).to_have_text("Answer")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".bubble")).to_have_text("One")


REFUSALS = [
    (400, {"error": {"message": "top_k is -7; it must be at least -1."}}, "top_k is -7"),
    (422, {"detail": [{"msg": "Field required"}]}, "Field required"),
    (429, {"error": {"message": "The queue is full."}}, "The queue is full."),
    (500, b"<html>it broke</html>", "The server answered 500 Internal Server Error."),
    (503, b"", "The server answered 503 Service Unavailable."),
]


def test_a_refusal_is_shown_and_nothing_is_lost(server, open_page, refusal_type):
    statuses = [f"status of {status}" for status, _, _ in REFUSALS]
    page = open_page(server.url, expected=tuple(statuses))
    page.fill("#prompt", "  A long\nquestion")
    for status, body, shown in REFUSALS:
        server.replies.append(refusal_type(status, body))
        page.locator("#prompt").press("Enter")
        alert = page.get_by_role("alert").filter(has_text=shown)
        expect(alert).to_be_visible()
        expect(page.locator("#prompt")).to_have_value("  A long\nquestion")
        expect(page.locator(".message")).to_have_count(0)
    page.reload()
    expect(page.locator("#prompt")).to_have_value("  A long\nquestion")
    page.locator("#prompt").press("Enter")
    expect(answers(page)).to_have_count(1)
    expect(page.locator("#alert")).to_be_hidden()


def test_a_server_that_is_gone_is_an_error_and_nothing_is_lost(lost_server, open_page):
    server = lost_server
    # A connection that the browser opened ahead, and nobody accepted, is reset.
    page = open_page(server.url, expected=("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET"))
    expect(page.locator("#model-name")).to_have_text("tiny")
    server.close()
    ask(page, "Still there?")
    expect(page.locator("#alert")).to_contain_text("cannot be reached")
    expect(page.locator("#prompt")).to_have_value("Still there?")


ENDINGS = [
    ({"error": "The engine process died."}, "The engine process died."),
    ({"finish_reason": None}, "The connection closed before the answer was complete."),
    ({"raw": b"data: {broken\n\n"}, "The server sent a chunk that is not JSON."),
]


def test_an_answer_that_breaks_off_is_kept(server, page, answer_type):
    for number, (ending, shown) in enumerate(ENDINGS, 1):
        server.replies.append(answer_type(content=["The beginning"], **ending))
        ask_and_wait(page, "Tell me")
        expect(page.locator(".note.error")).to_have_text(shown)
        expect(page.locator(".prose").last).to_have_text("The beginning")
        page.reload()
        expect(page.locator(".note.error")).to_have_text(shown)
        page.get_by_role("button", name="Regenerate this answer").last.click()
        expect(page.locator(".prose")).to_have_text(["Hello there."] * number)
        expect(page.locator(".note").locator("visible=true")).to_have_count(0)


def test_a_key_is_asked_for_when_the_server_wants_one(server, open_page):
    server.api_key = "sesame"
    page = open_page(server.url, expected=("status of 401",))
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("The server asks for a key.")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("Incorrect API key provided.")
    expect(dialog.get_by_label("Key")).to_have_value("")
    dialog.get_by_label("Key").fill("sesame")
    dialog.get_by_role("button", name="Use this key").click()
    expect(page.locator("#model-name")).to_have_text("tiny")
    ask_and_wait(page, "Hi")
    assert server.received[-1].authorization == "Bearer sesame"
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")

    # The key changes while the page is open: the question goes out once the new one is given.
    server.api_key = "open-up"
    ask(page, "Again")
    expect(dialog).to_be_visible()
    expect(page.locator("#prompt")).to_have_value("Again")
    page.keyboard.press("Escape")
    expect(page.locator("#prompt")).to_have_value("Again")
    page.locator("#prompt").press("Enter")
    dialog.get_by_label("Key").fill("open-up")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(2)
    assert server.received[-1].authorization == "Bearer open-up"
    expect(page.locator("#prompt")).to_have_value("")

    show_settings(page)
    page.get_by_role("button", name="Forget the API key").click()
    assert page.evaluate("sessionStorage.length") == 0


def test_reasoning_is_folded_away(server, page, answer_type):
    server.replies.append(
        answer_type(reasoning=["They greet ", "<b>me</b>."], content=["Hello."], hold_after=2)
    )
    ask(page, "Hi")
    details = page.locator("details.reasoning")
    expect(details).to_be_visible()
    expect(page.locator(".reasoning-text")).to_be_hidden()
    details.get_by_text("Reasoning").click()
    expect(page.locator(".reasoning-text")).to_have_text("They greet <b>me</b>.")
    server.go.set()
    expect(answers(page).locator(".prose")).to_have_text("Hello.")
    expect(page.locator(".reasoning-text")).to_be_visible()
    ask_and_wait(page, "Bye")
    assert server.last["messages"][1] == {"role": "assistant", "content": "Hello."}


HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'>",
    "text <img src=//evil.example/a.png> <b onclick=pwned()>bold</b>",
    "![a picture](https://evil.example/beacon.png)",
    "![x](javascript:window.pwned=3)",
    "[click](javascript:window.pwned=4)",
    "[click](JaVaScRiPt:window.pwned=4)",
    "[click](&#106;avascript:window.pwned=4)",
    "[click](data:text/html,<script>window.pwned=5</script>)",
    "[click](vbscript:x) [here](/v1/models) [there](//evil.example/)",
    '[title](https://example.com "x\\" onmouseover=\\"window.pwned=6")',
    "<a href='javascript:window.pwned=7'>a</a>",
    "<javascript:window.pwned=8>",
    "<svg onload='window.pwned=9'><script>window.pwned=10</script></svg>",
    "<iframe src='javascript:window.pwned=11'></iframe><object data=x></object><embed src=x>",
    "<form action=//evil.example><input name=prompt autofocus onfocus='window.pwned=12'></form>",
    "<style>@import '//evil.example/x.css'; body { display: none }</style>",
    "<link rel=stylesheet href=//evil.example/x.css><meta http-equiv=refresh content=0>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=13>",
    '```"><img src=x onerror=window.pwned=14>\n</code></pre><img src=x onerror=pwned=15>\n```',
    "`<img src=x onerror=window.pwned=16>`",
    "<div id=prompt name=body style='position:fixed;inset:0'>over everything</div>",
    "| <img src=x onerror=window.pwned=17> | b |\n| - | - |\n| <script>pwned=18</script> | c |",
    "- [ ] <img src=x onerror=window.pwned=19>",
    "[x]: javascript:window.pwned=20\n\n[x] [y][x]",
    "<br onclick='window.pwned=21'><sup onmouseover='window.pwned=22'>sup</sup>",
    r"\(\href{javascript:window.pwned=23}{x}\) \[\includegraphics{https://evil.example/a.png}\]",
    r"$$\htmlStyle{position: fixed; inset: 0}{x}$$ \(\htmlId{prompt}{x}\) \(\url{//evil.example}\)",
    "```html\n<img src=x onerror=window.pwned=24><script>window.pwned=25</script>\n```",
    "\\(<img src=x onerror=window.pwned=26>",
]

# What an answer's elements may be, written down independently of what the sanitiser is told.
FOUND_JS = """() => {
  const tags = new Set(), attributes = new Set(), links = [];
  for (const node of document.querySelectorAll(".prose *")) {
    if (node.closest(".code-bar")) continue;
    tags.add(node.localName);
    for (const { name } of node.attributes) attributes.add(`${node.localName} ${name}`);
    if (node.localName === "a") links.push(node.getAttribute("href"));
  }
  return { tags: [...tags], attributes: [...attributes], links };
}"""


def test_a_hostile_answer_is_only_text(server, open_page, answer_type):
    page = open_page(server.url)
    page.evaluate(
        """() => {
          window.violations = [];
          addEventListener("securitypolicyviolation", (e) => violations.push(e.blockedURI));
        }"""
    )
    document = "\n\n".join(HOSTILE)
    pieces = [document[at : at + 5] for at in range(0, len(document), 5)]
    server.replies.append(answer_type(content=pieces, reasoning=HOSTILE, delay=0.0005))
    ask_and_wait(page, "\n".join(HOSTILE))
    for link in page.locator(".prose a").all():
        link.dispatch_event("mouseover")
    page.wait_for_timeout(100)

    for _ in range(2):
        assert page.evaluate("window.pwned") is None
        found = page.evaluate(FOUND_JS)
        assert set(found["tags"]) <= {
            *("a", "br", "code", "div", "em", "li", "p", "pre", "span", "sup", "ul"),
            *("table", "tbody", "td", "th", "thead", "tr"),
        }
        assert set(found["attributes"]) <= {
            *("a href", "a rel", "a target", "a title", "pre tabindex", "div class"),
            *("div tabindex", "div role", "div aria-label", "span class"),
        }
        assert {link for link in found["links"] if link} == {
            "https://evil.example/beacon.png",
            "https://example.com",
        }
        expect(page.locator(".prose")).to_contain_text("<script>window.pwned = 1</script>")
        assert page.evaluate("document.querySelectorAll('#prompt').length") == 1
        assert page.evaluate("window.violations ?? []") == []
        page.reload()  # and once more from what was stored
        expect(answers(page)).to_have_count(1)
    link = page.locator(".prose a[href='https://example.com']")
    expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(link).to_have_attribute("target", "_blank")


def test_markdown_is_shown_and_code_can_be_copied(server, open_page, answer_type):
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    document = """# Title

Some *emphasis*, **weight**, ~~gone~~ and `code < 3`. H<sub>2</sub>O

3. three
4. four
   - nested

| left | right |
| --- | ---: |
| a | 1 |

- [x] done

```python title=x
if a < b and "c":
    print('<b>')
```

> quoted
"""
    server.replies.append(answer_type(content=list(document)))
    ask_and_wait(page, "Show all")
    prose = page.locator(".prose")
    expect(prose.get_by_role("heading", level=1)).to_have_text("Title")
    for tag, text in [
        ("em", "emphasis"),
        ("strong", "weight"),
        ("del", "gone"),
        ("p > code", "code < 3"),
        ("sub", "2"),
        ("ol > li > ul > li", "nested"),
        ("blockquote", "quoted"),
        (".code-bar span", "python"),
        ("td[align=right]", "1"),
    ]:
        expect(prose.locator(tag)).to_have_text(text)
    expect(prose.locator("ol")).to_have_attribute("start", "3")
    expect(prose).to_contain_text("☑ done")
    page.get_by_role("button", name="Copy this code").click()
    expect(page.locator("#status")).to_contain_text("Copied")
    code = "if a < b and \"c\":\n    print('<b>')\n"
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.get_by_role("button", name="Copy this answer").click()
    page.wait_for_function(
        "text => navigator.clipboard.readText().then(read => read === text)", arg=document
    )


FORMULAS = r"""Mass \(E = mc^2\), *a vector \(\vec{v}^*\)* and \\(none\\) for $5. Bad: \(\frac{1\).

So
\[
\text{<img src=x onerror=window.pwned=1>}
- \sqrt{2}
=
\fcolorbox{red}{white}{3}
\]

$$\begin{aligned} a &= \mathcal{L} \\[2pt] b &= 1 \end{aligned}$$

- in a list $$\sum_{i<n} i$$

`\(code\)`

```python
def half(): return "\(" + str(0.5)
```

\(never closed
"""


def test_formulas_and_code_bring_their_libraries_when_they_are_needed(
    server, open_page, answer_type
):
    page = open_page(server.url)
    loaded: set[str] = set()
    page.on("request", lambda request: loaded.add(request.url.removeprefix(server.url)))
    page.reload()  # all of it, from the first file on
    server.replies.append(answer_type(content=["Plain, with `code`.\n\n```\nplain\n```"]))
    ask_and_wait(page, "Hi")
    assert not [url for url in loaded if "katex" in url or "highlight" in url]

    server.replies.append(answer_type(content=["```python\ndef f(): pa", "ss\n"], hold_after=1))
    ask(page, "Code")
    keyword = page.locator(".hljs-keyword")
    expect(keyword).to_have_text("def")  # while the fence has no end
    server.go.set()
    expect(keyword).to_have_text(["def", "pass"])
    assert [url for url in loaded if "highlight" in url]
    assert not [url for url in loaded if "katex" in url]
    files = [WEB / (path or "index.html") for path in loaded if not path.startswith("v1/")]
    assert len(files) > 10
    assert sum(path.stat().st_size for path in files) < 400_000

    expect(answers(page)).to_have_count(2)
    server.go.clear()
    server.replies.append(answer_type(content=[r"Now \(\fra", r"c{1}{2}\)."], hold_after=1))
    ask(page, "A formula")
    expect(page.locator(".formula.open")).to_have_text(r"\(\fra")
    assert page.locator(".katex, .katex-error").count() == 0
    server.go.set()
    expect(page.locator(".formula mfrac")).to_have_count(1)
    page.evaluate("document.fonts.ready")
    assert {url.rpartition(".")[2] for url in loaded if "katex" in url} == {"js", "css", "woff2"}


def test_formulas_are_shown_and_what_is_none_stays_as_written(server, page, answer_type):
    pieces = [FORMULAS[at : at + 9] for at in range(0, len(FORMULAS), 9)]
    server.replies.append(answer_type(content=pieces))
    ask_and_wait(page, "Show all")
    for _ in range(2):
        expect(page.locator(".prose .formula.done")).to_have_count(5)
        expect(page.locator(".formula:not(.done)")).to_have_text(r"\(\frac{1\)")
        expect(page.get_by_role("group", name="Formula")).to_have_count(3)
        expect(page.locator(".prose em .formula.done")).to_have_count(1)
        expect(page.locator(".prose li .katex-display")).to_have_count(1)
        expect(page.locator(".prose :is(h1, h2, img)")).to_have_count(0)
        prose = page.locator(".prose")
        expect(prose).to_contain_text(r"and \(none\) for $5")
        expect(prose).to_contain_text("(never closed")
        expect(page.locator(".prose p > code")).to_have_text(r"\(code\)")
        expect(page.locator("annotation").first).to_have_text("E = mc^2")
        # Styles are set, though the page's policy forbids style attributes in HTML.
        assert page.evaluate("document.querySelector('.prose svg').style.width.endsWith('em')")
        assert page.evaluate("window.pwned") is None
        page.reload()


DOCUMENTS = [
    "para one\nstill one\n\npara two\n\n- a\n- b\n\n  b goes on\n\n2\n\n1. x\n\n2. y\n\nend",
    "Heading\n===\n\ntext\n---\n\n***\n\n    indented code\n\n    more of it\n\ntext",
    "```js\nlet a;\n\n\n# no heading\n```\nafter\n\n~~~\nunclosed\n\n- no list",
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 |\n\n> quote\nlazy\n> > nested\n\n"
    "<div>\n\nhtml\n\n</div>\n\nx",
    "See [one][1], [two] and ![pic][1].\n\nmiddle\n\nlast\n\n"
    "[1]: https://example.com\n[two]: https://example.org 'T'\n",
    "windows\r\nline\r\n\r\n- ends\r\n- here\r\n\r\ndone **bo\r\nld**\n\n* * *\n\n"
    "https://example.com/a_b_c",
    "1. a\n\n   ```py\n   x\n\n   y\n   ```\n\n2. b\n   > q\n\n   p\n\n"
    "10) other\n\n+ plus\n+ plus\n\n\n\n\nend",
    "**never closed\n\n`nor this\n\n[nor](this\n\n| nor | this\n|---\n\n"
    "![\n\n<!-- nor\n\nthis\n\n# #\n#\n",
    "\n\n\n  leading\n\n\ttab\n\n \n\n\\*escaped\\* &amp; &lt; &copy;\n\n"
    "**a*b**c* __x_y__\n\n日本語 🙂\n\n",
]
MORE_DOCUMENTS = [
    FORMULAS,
    "text\n\\[\na\n- b\n+ c\n* d\n= e\n===\n\\]\nafter\n\n$$\nx\n\ny\n$$\n\n$$ a $$ b\n\nend \\",
    "\\[ never\n- closed\n\n- l\n\n+ k\n\n\\( also not\n\nnext\n\nlast $",
    "> \\[\n> x\n\nout\n\n1. a\n   \\[\n   - x\n   \\]\n2. b \\(\n\nx\n\n$$\nq\n$$ tail\n\n***\n``",
    "text\n$$ open\n# head\n\npara\n\n```\n\\(\n\n$$\n```\n\n[l][1] \\(q\\)\n\nx\n\n[1]: https://a.b",
]

STREAMED_JS = """async ([document_, cuts]) => {
  const { MarkdownStream, renderMarkdown } = await import("./markdown.js");
  window.requestAnimationFrame = (draw) => (draw(Infinity), 0);
  const whole = document.createElement("div");
  renderMarkdown(whole, document_);
  const streamed = document.createElement("div");
  const blocks = [];
  const stream = new MarkdownStream(streamed, { onBlocks: (text) => blocks.push(text) });
  let at = 0;
  for (const cut of [...cuts, document_.length]) {
    stream.append(document_.slice(at, cut));
    at = cut;
  }
  stream.finish();
  return [whole.innerHTML, streamed.innerHTML, whole.textContent, blocks.join("")];
}"""


def test_markdown_in_pieces_is_the_same_as_whole(page):
    for document in DOCUMENTS:
        length = len(document.encode("utf-16-le")) // 2  # as JavaScript counts
        for step in (1, 2, 7):
            whole, streamed, text, blocks = page.evaluate(
                STREAMED_JS, [document, list(range(step, length, step))]
            )
            assert streamed == whole, f"in pieces of {step}: {document!r}"
            if "[1]:" not in document:
                assert blocks == text
    for document in MORE_DOCUMENTS:  # what a formula says is not its text in the page
        for step in (1, 7):
            cuts = list(range(step, len(document), step))
            whole, streamed, _, _ = page.evaluate(STREAMED_JS, [document, cuts])
            assert streamed == whole, f"in pieces of {step}: {document!r}"
    assert "<table>" in page.evaluate(STREAMED_JS, [DOCUMENTS[3], []])[0]


MALFORMED = {
    "quotes": ">" * 20_000 + " deep",
    "brackets": "[" * 20_000 + "deep",
    "lists": "- " * 5_000 + "deep",
    "emphasis": "*_" * 10_000 + "deep",
    "fences": "```" * 999 + "deep",
    "table": "|" * 5_000 + "\n" + "|-" * 5_000 + "\ndeep",
    "formulas": "\\("
    + "{" * 900
    + "\\)"
    + "\\(" * 3_000
    + "\\[\n" * 3_000
    + "*_$$" * 1_000
    + "deep",
}


def test_malformed_markdown_neither_breaks_nor_blocks_the_page(server, page, answer_type):
    for name, document in MALFORMED.items():
        pieces = [document[at : at + 1000] for at in range(0, len(document), 1000)]
        server.replies.append(answer_type(content=pieces))
        ask_and_wait(page, f"Go: {name}")
        expect(page.locator(".prose")).to_contain_text("deep")
        page.get_by_role("button", name="New conversation", exact=True).first.click()
    ask_and_wait(page, "Still there?")


def test_a_very_long_answer_is_shown_whole_and_followed(server, page, answer_type):
    paragraphs = [f"Paragraph {n} " + "with some words " * 12 + "\n\n" for n in range(1500)]
    server.replies.append(answer_type(content=[*paragraphs, "The end."], delay=0.0003))
    ask_and_wait(page, "Tell me everything")
    expect(page.locator(".prose p")).to_have_count(1501)
    expect(in_answer(page, "The end.")).to_be_in_viewport()
    page.reload()
    expect(in_answer(page, "The end.")).to_be_in_viewport()


def test_who_scrolls_up_is_left_there(server, page, answer_type):
    lines = [f"Line {n}\n\n" for n in range(60)]
    server.replies.append(answer_type(content=[*lines, "The end."], hold_after=59))
    ask(page, "Go")
    expect(in_answer(page, "Line 58")).to_be_in_viewport()
    page.locator("#scroller").evaluate("node => { node.scrollTop = 0; }")
    to_end = page.get_by_role("button", name="Scroll to the end")
    expect(to_end).to_be_visible()
    server.go.set()
    expect(answers(page)).to_have_count(1)
    expect(in_answer(page, "Line 0")).to_be_in_viewport()
    to_end.click()
    expect(in_answer(page, "The end.")).to_be_in_viewport()
    expect(to_end).to_be_hidden()


def test_conversations_are_kept_and_go_on_while_another_is_shown(server, page, answer_type):
    server.replies.extend(
        [answer_type(content=["Begun", " and done."], hold_after=1), answer_type(content=["Two."])]
    )
    listed = page.locator(".conversation")
    ask(page, "First question")
    expect(page.locator(".prose")).to_have_text("Begun")
    page.get_by_role("button", name="New conversation", exact=True).first.click()
    expect(page.locator(".message")).to_have_count(0)
    ask_and_wait(page, "Second question")
    assert server.last["messages"] == [{"role": "user", "content": "Second question"}]
    expect(page.locator(".prose")).to_have_text("Two.")
    expect(page.locator(".running .conversation")).to_have_text("First question")
    server.go.set()
    expect(page.locator(".running")).to_have_count(0)
    listed.filter(has_text="First question").click()
    expect(page.locator(".prose")).to_have_text("Begun and done.")

    page.fill("#prompt", "a thought")
    page.reload()
    expect(listed).to_have_text(["Second question", "First question"])
    expect(page.locator(".prose")).to_have_text("Begun and done.")
    expect(page.locator("#prompt")).to_have_value("a thought")

    page.get_by_role("button", name="Delete “First question”").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(listed).to_have_count(2)
    page.get_by_role("button", name="Delete “First question”").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(listed).to_have_text(["Second question"])
    expect(page.locator(".prose")).to_have_text("Two.")
    page.reload()
    expect(listed).to_have_text(["Second question"])


def test_closing_the_page_keeps_the_answer_so_far(server, page, answer_type):
    server.replies.append(answer_type(content=["Half", " more"], hold_after=1))
    ask(page, "Go")
    expect(page.locator(".prose")).to_have_text("Half")
    page.reload()
    assert server.client_gone.wait(60)
    expect(page.locator(".prose")).to_have_text("Half")
    expect(page.locator(".note")).to_have_text("Stopped.")

    server.client_gone.clear()
    server.replies.append(answer_type(hold_after=0))
    ask(page, "And then?")
    server.wait_for_requests(2)
    page.reload()
    assert server.client_gone.wait(60)
    expect(page.locator(".prose")).to_have_text("Half")
    expect(page.locator("#prompt")).to_have_value("And then?")


def test_another_tab_sees_the_conversation(server, page):
    ask_and_wait(page, "In the first tab")
    other = page.context.new_page()
    other.goto(server.url)
    other.get_by_role("button", name="New conversation").first.click()
    ask_and_wait(other, "In the second tab")
    expect(page.locator(".conversation")).to_have_text(["In the second tab", "In the first tab"])
    expect(page.locator(".bubble")).to_have_text(["In the first tab"])


def test_full_storage_is_reported_and_the_conversation_goes_on(server, page):
    ask_and_wait(page, "Hi")
    page.evaluate(
        """() => {
          let part = "x".repeat(1024 * 1024);
          for (let n = 0; part.length; n += 1) {
            try { localStorage.setItem(`full-${n}`, part); }
            catch { part = part.slice(part.length >> 1 || 1); }
          }
        }"""
    )
    ask_and_wait(page, "Hi again")
    expect(page.locator("#alert")).to_contain_text("no room left")
    expect(page.locator(".prose")).to_have_count(2)


def test_what_is_stored_but_not_ours_does_no_harm(server, open_page):
    page = open_page(server.url)
    page.evaluate(
        """() => {
          const put = (id, value) => localStorage.setItem(`engine-core.conversation.${id}`, value);
          put("a", "{cut off");
          put("b", JSON.stringify({ id: 3 }));
          put("c", JSON.stringify({ id: "c", messages: [null, { role: "x", content: "y" }] }));
          put("d", JSON.stringify({ id: "d", messages: [{ role: "user", content: "Mine" }] }));
          // As a browser leaves it that was killed while an answer came.
          const cut = (content) => [
            { role: "user", content: "Question" },
            { role: "assistant", content, status: "streaming" },
          ];
          put("e", JSON.stringify({ id: "e", messages: cut("Half") }));
          put("f", JSON.stringify({ id: "f", messages: cut("") }));
          const again = cut("");
          again[1].versions = ["One", "Two"].map((content) => ({ role: "assistant", content }));
          again[1].at = 2;
          put("g", JSON.stringify({ id: "g", messages: again }));
          localStorage.setItem("engine-core.current", "e");
        }"""
    )
    page.reload()
    expect(page.locator(".prose")).to_have_text("Half")
    expect(page.locator(".note")).to_have_text("Stopped.")
    page.evaluate("localStorage.setItem('engine-core.current', 'f')")
    page.reload()
    expect(page.locator("#prompt")).to_have_value("Question")
    expect(page.locator(".message")).to_have_count(0)
    page.evaluate("localStorage.setItem('engine-core.current', 'g')")
    page.reload()
    expect(page.locator(".prose")).to_have_text("Two")
    expect(page.locator(".versions")).to_have_text("2/2")
    expect(page.locator("#prompt")).to_have_value("")
    page.locator(".conversation").filter(has_text="Mine").click()
    expect(page.locator(".bubble")).to_have_text("Mine")


def test_export_as_json(server, page, answer_type):
    server.replies.append(answer_type(content=["An answer."], reasoning=["Hm."]))
    show_settings(page, system="Be brief.", temperature="0.5")
    ask_and_wait(page, "A question")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation as JSON").click()
    assert re.fullmatch(r"conversation-\d{4}-\d\d-\d\d\.json", download.value.suggested_filename)
    exported = json.loads(download.value.path().read_text("utf-8"))
    [conversation] = exported["conversations"]
    assert conversation["settings"] == {
        "system": "Be brief.",
        "temperature": "0.5",
        **dict.fromkeys(("top_p", "top_k", "min_p", "max_tokens", "seed"), ""),
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), ""),
    }
    question, answer = conversation["messages"]
    assert (question["role"], question["content"]) == ("user", "A question")
    assert (answer["role"], answer["content"], answer["reasoning"]) == (
        "assistant",
        "An answer.",
        "Hm.",
    )
    assert (answer["model"], answer["finish_reason"]) == ("tiny", "stop")
    assert answer["usage"]["prompt_tokens"] == 11

    page.get_by_role("button", name="New conversation", exact=True).first.click()
    ask_and_wait(page, "Another")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all as JSON").click()
    exported = json.loads(download.value.path().read_text("utf-8"))
    assert [each["messages"][0]["content"] for each in exported["conversations"]] == [
        "A question",
        "Another",
    ]


def test_a_conversation_can_be_renamed_and_found(server, page, answer_type):
    server.replies.extend(answer_type(content=[text]) for text in ("Stir it.", "Über Wien."))
    ask_and_wait(page, "How is soup made?")
    page.get_by_role("button", name="New conversation", exact=True).first.click()
    ask_and_wait(page, "Which way to Rome?")
    page.get_by_role("button", name="Rename “Which way to Rome?”").click()
    name = page.get_by_role("dialog").get_by_label("Name")
    expect(name).to_have_value("Which way to Rome?")
    name.fill("  The way   ")
    page.keyboard.press("Enter")
    listed = page.locator(".conversation")
    expect(listed).to_have_text(["The way", "How is soup made?"])
    expect(listed.first).to_be_focused()
    expect(page).to_have_title(re.compile("^The way . engine-core$"))

    search = page.get_by_role("searchbox", name="Search conversations")
    for words, found in {
        "über rome": ["The way"],
        "stir": ["How is soup made?"],
        "way soup": [],
        "the WAY": ["The way"],
    }.items():
        search.fill(words)
        expect(listed).to_have_text(found)
        expect(page.locator("#no-match")).to_be_visible(visible=not found)
    search.press("Escape")
    expect(listed).to_have_count(2)
    page.reload()
    expect(listed).to_have_text(["The way", "How is soup made?"])
    page.get_by_role("button", name="Rename “The way”").click()
    name.fill("")
    page.keyboard.press("Enter")
    expect(listed.first).to_have_text("Which way to Rome?")


def test_what_was_exported_can_be_imported(server, open_page, answer_type, tmp_path):
    page = open_page(server.url)
    server.replies.extend(answer_type(content=[text], reasoning=["Hm."]) for text in "ABC")
    show_settings(page, system="Be brief.", min_p="0.5")
    ask_and_wait(page, "First")
    page.get_by_role("button", name="Regenerate this answer").click()
    expect(page.locator(".versions")).to_have_text("2/2")
    page.get_by_role("button", name="New conversation", exact=True).first.click()
    ask_and_wait(page, "Second")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all as JSON").click()
    file = tmp_path / "all.json"
    download.value.save_as(file)

    other = open_page(server.url)  # another browser
    for shown in (None, "These conversations are all here already."):
        with other.expect_file_chooser() as chooser:
            other.get_by_role("button", name="Import from JSON").click()
        chooser.value.set_files(file)
        if shown:
            expect(other.locator("#alert")).to_have_text(shown)
        expect(other.locator(".conversation")).to_have_text(["Second", "First"])
    other.locator(".conversation").filter(has_text="First").click()
    expect(other.locator(".prose")).to_have_text("B")
    expect(other.locator(".versions")).to_have_text("2/2")
    show_settings(other)
    expect(other.get_by_label("Min-p")).to_have_value("0.5")
    other.reload()
    expect(other.locator(".prose")).to_have_text("B")

    # Another state of a conversation that is there stands beside it.
    exported = json.loads(file.read_text("utf-8"))
    exported["conversations"][0] |= {"updated": "2031-01-01T00:00:00Z", "title": "Changed"}
    file.write_text(json.dumps(exported), "utf-8")
    other.locator("#import-file").set_input_files(file)
    expect(other.locator(".conversation")).to_have_text(["Changed", "Second", "First"])


def bad_files() -> dict[str, object]:
    """Files that are no exports, by what is said of each."""

    def export(*messages: object, **more: object) -> dict[str, object]:
        date = "2026-01-01T00:00:00Z"
        conversation = {"id": "a", "created": date, "updated": date, "messages": list(messages)}
        return {
            "format": "engine-core-conversations",
            "version": 1,
            "conversations": [conversation | more],
        }

    question = {"role": "user", "content": "Q"}
    answer = {"role": "assistant", "content": "A"}
    return {
        "It is not JSON.": "{cut off",
        'its "format" is not "engine-core-conversations"': [1],
        "Its version is 2; this page reads version 1.": export() | {"version": 2},
        "It has no list of conversations.": export() | {"conversations": {}},
        "Conversation 1 is not an object.": export() | {"conversations": ["x"]},
        'Conversation 1: "messages" is "x"; it must be a list.': export(messages="x"),
        'Conversation 1: "id" is "../x"; it must be an id.': export(id="../x"),
        'Conversation 1 has an unknown field "colour".': export(colour=1),
        'Conversation 1 has an unknown setting "tools".': export(settings={"tools": ""}),
        'the setting "top_p" is "much", no number': export(settings={"top_p": "much"}),
        'Conversation 1, message 1 lacks "content".': export({"role": "user"}),
        '"role" is "robot"; it must be "user" or': export(question | {"role": "robot"}),
        'message 2 is of the role "user", not "assistant".': export(question, question),
        '"content" is {"x":1}; it must be text.': export(question | {"content": {"x": 1}}),
        '"usage" is {"prompt_tokens":"<b>"}; it must be an object with': export(
            question, answer | {"usage": {"prompt_tokens": "<b>"}}
        ),
        'message 2, versions, message 1 is of the role "user"': export(
            question, answer | {"versions": [question], "at": 0}
        ),
        '"at" is 3, and there are not as many versions.': export(question, answer | {"at": 3}),
    }


def test_a_file_that_is_no_export_is_refused(server, page, tmp_path):
    ask_and_wait(page, "Mine")
    file = tmp_path / "bad.json"
    before = page.evaluate("JSON.stringify(localStorage)")
    for said, content in bad_files().items():
        file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
        page.locator("#import-file").set_input_files(file)
        expect(page.locator("#alert")).to_contain_text(said)
        expect(page.locator("#alert")).to_contain_text("bad.json was not imported.")
    expect(page.locator(".conversation")).to_have_text(["Mine"])
    assert page.evaluate("JSON.stringify(localStorage)") == before


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(...)`` (WCAG 2.2)."""
    values = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Every visible text with its colour and that of the first opaque thing behind it.
COLOURS_JS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const node = walker.currentNode.parentElement;
    if (!text || node.closest(".hidden, .skip") || !node.checkVisibility()) continue;
    let back = node;
    while (back && getComputedStyle(back).backgroundColor === "rgba(0, 0, 0, 0)")
      back = back.parentElement;
    found.push([text, getComputedStyle(node).color, getComputedStyle(back).backgroundColor]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_and_can_be_switched(
    server, open_page, answer_type, refusal_type, scheme
):
    page = open_page(server.url, color_scheme=scheme, expected=("status of 500",))
    dark = scheme == "dark"
    other = "light" if dark else "dark"

    def is_dark() -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return luminance(colour) < 0.2

    server.replies.append(
        answer_type(
            content=[
                "[link](https://example.com) `code`\n\n> quote\n\n```py\nx\n```\n\n|a|\n|-|\n|b|"
            ],
            reasoning=["Hm"],
            finish_reason="length",
        )
    )
    server.replies.append(refusal_type(500, {"error": {"message": "It failed."}}))
    ask_and_wait(page, "Show all")
    expect(page.locator(".note")).to_have_text("Cut off at the most tokens allowed.")
    ask(page, "Fail")
    expect(page.locator("#alert")).to_be_visible()
    show_settings(page, top_p="7")

    for _ in range(2):
        assert is_dark() == dark
        colours = page.evaluate(COLOURS_JS)
        assert {"Cut off at the most tokens allowed.", "It failed.", "Reasoning", "quote"} <= {
            text for text, _, _ in colours
        }
        for text, colour, back in colours:
            light, deep = sorted((luminance(colour), luminance(back)), reverse=True)
            assert (light + 0.05) / (deep + 0.05) >= 4.5, (text, colour, back)
        page.get_by_role("button", name=f"Switch to the {other} theme").click()
        dark, other = not dark, scheme
    assert page.evaluate("localStorage.getItem('engine-core.theme')") is None

    page.get_by_role("button", name=re.compile("Switch to the")).click()
    page.reload()
    assert is_dark() == (scheme == "light")


UNNAMED_JS = """() => [...document.querySelectorAll("button, input, textarea, select")]
  .filter((node) => !node.hidden && node.checkVisibility())
  .filter((node) => !node.labels?.length && !node.getAttribute("aria-label"))
  .filter((node) => !node.innerText?.trim())
  .map((node) => node.outerHTML)"""


def test_it_can_be_used_by_keyboard_and_screen_reader(server, page, answer_type):
    server.replies.append(
        answer_type(content=["First.\n\n", "Second.\n\n", "Third, ", "more."], hold_after=3)
    )
    page.locator("body").press("Tab")
    ask(page, "Hi")
    log = page.get_by_role("log", name="Messages")
    expect(log.get_by_role("article", name="Answer")).to_have_attribute("aria-busy", "true")
    # A complete block is read while the answer goes on; what may still change is not.
    expect(page.get_by_role("status")).to_have_text("First.")
    server.go.set()
    expect(page.get_by_role("status")).to_have_text(
        re.compile(r"First\.\s*Second\.\s*Third, more\.\s*The answer is complete\.")
    )
    show_settings(page)
    expect(page.get_by_label("System prompt")).to_be_focused()
    assert page.evaluate(UNNAMED_JS) == []
    fields = ["Message", "Temperature", "Top-p", "Top-k", "Min-p", "Max tokens", "Seed"]
    for label in (*fields, "Presence penalty", "Frequency penalty", "Repetition penalty"):
        expect(page.get_by_label(label, exact=True)).to_be_visible()
    settings = page.get_by_role("button", name="Settings", exact=True)
    expect(settings).to_have_attribute("aria-expanded", "true")
    page.get_by_role("button", name="Close the settings").press("Enter")
    expect(settings).to_be_focused()
    expect(settings).to_have_attribute("aria-expanded", "false")

    # From the message field backwards: every button of the answer can be reached.
    page.locator("#prompt").focus()
    reached = set()
    for _ in range(4):
        page.keyboard.press("Shift+Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert reached >= {"Regenerate this answer", "Copy this answer", "Edit this message"}


def test_it_fits_a_phone(server, open_page, answer_type):
    page = open_page(
        server.url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True
    )
    wide = (
        "word" * 200 + "\n\n```\n" + "code " * 100 + "\n```\n\n|" + "cell|" * 40 + "\n|" + "-|" * 40
    )
    wide += "\n\n\\[" + "x_{1} + " * 40 + "1\\]\n\nin \\(\\sqrt{" + "y + " * 40 + "1}\\)"
    server.replies.append(answer_type(content=[wide]))
    ask_and_wait(page, "x" * 300)
    expect(page.locator(".formula.done")).to_have_count(2)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    scroller = "(n => n.scrollWidth - n.clientWidth)(document.querySelector('#scroller'))"
    assert page.evaluate(scroller) == 0
    expect(page.locator("#send")).to_be_in_viewport(ratio=1)

    sidebar = page.get_by_role("navigation", name="Conversations")
    expect(sidebar).to_be_hidden()
    page.get_by_role("button", name="Conversations", exact=True).tap()
    expect(sidebar).to_be_in_viewport(ratio=1)
    page.keyboard.press("Escape")
    expect(sidebar).to_be_hidden()
    expect(page.get_by_role("button", name="Conversations", exact=True)).to_be_focused()
    page.get_by_role("button", name="Settings", exact=True).tap()
    page.get_by_label("Seed").fill("5")
    page.locator("#scrim").tap(position={"x": 10, "y": 300})
    expect(page.get_by_label("Seed")).to_be_hidden()
    page.fill("#prompt", "Again")
    page.locator("#send").tap()
    expect(answers(page)).to_have_count(2)
    assert server.last["seed"] == 5


def fetch(url: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


@pytest.fixture
def real_server(browser: object, tmp_path: Path) -> Iterator[str]:
    """``engine-core serve`` with a tiny model; asks for ``browser`` so as not to start in vain."""
    options = ("--served-model-name", "tiny", "--max-model-len", "512", *SLOW)
    with ServerProcess(write_tiny_model(tmp_path / "tiny"), *options) as server:
        yield server.wait_ready().url + "/"


def test_with_the_real_server(real_server, open_page):
    url = real_server
    page = open_page(url, expected=("status of 400",))
    expect(page.locator("#model-name")).to_have_text("tiny")
    show_settings(page, system="Answer briefly.", temperature="0", max_tokens="30")
    ask_and_wait(page, "What is the capital of France?")
    expect(page.locator(".stats")).to_contain_text(re.compile(r"\d+ tokens · [\d.]+ tokens/s"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Export this conversation as JSON").click()
    [conversation] = json.loads(download.value.path().read_text("utf-8"))["conversations"]
    shown = conversation["messages"][1]
    body = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
        "temperature": 0,
        "max_tokens": 30,
    }
    whole = json.loads(fetch(url + "v1/chat/completions", body))
    assert shown["content"] == whole["choices"][0]["message"]["content"] != ""
    assert shown["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert shown["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]

    # The server's own words about a value that only it refuses.
    page.fill("[name=top_k]", str(2**31))
    ask(page, "Again")
    expect(page.locator("#alert")).to_contain_text("top_k")
    expect(page.locator("#prompt")).to_have_value("Again")

    # Stopped, the request is the engine's no more: long before its hundred tokens are made.
    page.get_by_role("button", name="New conversation", exact=True).first.click()
    values = {"system": "", "temperature": "0", "top_p": "", "top_k": "", "max_tokens": "400"}
    for name, value in values.items():
        page.fill(f"[name={name}]", value)
    ask(page, "Count from 1 to 1000.")
    expect(page.locator(".answer.streaming .prose")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".note").last).to_have_text("Stopped.")
    deadline = time.monotonic() + 60
    while not (
        b"\nengine_core_aborted_sequences_total 1.0\n" in (metrics := fetch(url + "metrics"))
        and b"\nengine_core_requests_running 0.0\n" in metrics
    ):
        assert time.monotonic() < deadline, metrics.decode()
        time.sleep(0.1)

    # Its template can be left at the end of what there is, and the model goes on from there.
    answer = "JSON.parse(localStorage.getItem('engine-core.conversation.' + "
    answer += "localStorage.getItem('engine-core.current'))).messages[1]"
    begun = page.evaluate(answer)["content"]
    page.fill("[name=max_tokens]", "4")
    page.get_by_role("button", name="Continue this answer").click()
    expect(page.locator(".note")).to_have_text("Cut off at the most tokens allowed.")
    continued = page.evaluate(answer)
    assert continued["content"].startswith(begun)
    assert continued["content"] != begun
    assert continued["usage"]["completion_tokens"] == 4


def test_nothing_inline_and_small_enough():
    sizes = {path: path.stat().st_size for path in WEB.rglob("*") if path.is_file()}
    katex = sum(size for path, size in sizes.items() if "katex" in str(path))
    assert katex < 530_000
    assert sum(sizes.values()) - katex < 400_000
    index = (WEB / "index.html").read_text("utf-8")
    assert re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", index) is None
    assert re.search(r"(src|href)=\"(https?:)?//", index) is None


def test_the_vendored_libraries_are_what_they_are_said_to_be():
    vendor = WEB / "vendor"
    rows = re.findall(
        r"^\| (\S+) \|.* (LICENSE\.\S+) \| ([0-9a-f]{64}) \|$",
        (vendor / "README.md").read_text(),
        re.M,
    )
    found = {
        path.relative_to(vendor).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.rglob("*")
        if path.suffix in (".js", ".css", ".woff2")
    }
    assert found == {name: digest for name, _, digest in rows}
    assert {licence for _, licence, _ in rows} == {path.name for path in vendor.glob("LICENSE.*")}
    style = (vendor / "katex" / "katex.min.css").read_text()
    asked = {f"katex/{address}" for address in re.findall(r"url\(([^)]*)\)", style)}
    assert asked == {name for name in found if name.endswith(".woff2")}
