"""Attacks on the web page: texts, files and stored conversations that are made to harm it."""

from __future__ import annotations

import json
from itertools import pairwise

from page_actions import ask, ask_and_wait, expect

# Seconds that the page may be busy with tens of kilobytes, on a machine that has other work.
BUSY_S = 20
SCRIPT = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
PWNED = "window.pwned"

DATE = "2026-01-01T00:00:00Z"
QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}


def export(*messages: object, **more: object) -> dict[str, object]:
    conversation = {"id": "a", "created": DATE, "updated": DATE, "messages": list(messages)}
    return {
        "format": "engine-core-conversations",
        "version": 1,
        "conversations": [conversation | more],
    }


# Each is answered with a word at its end, and the longest time without a frame is measured.
BOMBS = {
    "a table of a million empty cells": "|"
    + "a|" * 500
    + "\n|"
    + "-|" * 500
    + "\n"
    + "|a|\n" * 2000,
    "lists in lists": "\n".join("  " * level + "- a" for level in range(250)),
    "an address without an end": "a." * 40_000 + "@",
    "links without an end": "[a](" * 5_000 + "![" * 5_000,
    "comments, declarations and tags without an end": "<!--" * 2_000
    + "<!A" * 2_000
    + "<a b=" * 2_000,
    "emphasis without an end": "*a " * 3_000 + "_a__a" * 2_000 + "~~a" * 2_000,
    "code without an end": " ".join("`" * count for count in range(1, 180)),
    "definitions": "\n".join(f"[a{index}]: b" for index in range(2_000)) + "\n\n[a1]" * 500,
    "one line of code": "```java\n" + "$" * 40_000 + "\n```",
    "macros without an end": r"\(\def\a{\a\a}\a\) $$\newcommand{\a}{\b\b}\newcommand{\b}{\a\a}\a$$",
    "macros of macros": r"\("
    + "".join(
        rf"\def\{after}" + "{" + rf"\{name}" * 8 + "}" for name, after in pairwise("xbcdefghij")
    )
    + r"\j\)",
    "formulas in formulas": (r"$$" + r"\sqrt{" * 600 + "}" * 600 + "$$\n\n") * 4,
    "a formula of two thousand columns": r"\(\begin{array}{c}" + "&" * 1_900 + r"\end{array}\)",
    "a formula of a thousand lines": r"\(\begin{matrix}" + r"\\[1000em]" * 190 + r"\end{matrix}\)",
}
LONGEST_JS = """() => {
  window.longest = 0;
  let last = performance.now();
  const look = () => {
    longest = Math.max(longest, performance.now() - last);
    last = performance.now();
    setTimeout(look);
  };
  look();
}"""


def test_no_text_freezes_the_page(server, page, answer_type):
    page.evaluate(LONGEST_JS)
    for name, bomb in BOMBS.items():
        document = f"\\(x\\)\n\n{bomb}\n\nThe end."
        server.replies.append(answer_type(content=[document[:3_000], document[3_000:]]))
        ask_and_wait(page, f"Go: {name}")
        expect(page.locator(".prose")).to_contain_text("The end.")
        assert page.evaluate("longest") < 1000 * BUSY_S, name
        page.get_by_role("button", name="New conversation", exact=True).first.click()
    ask_and_wait(page, "Still there?")


# What a formula would have over everything else, if it could.
COVERS = [
    r"\raisebox{20em}{\Huge{COVER COVER COVER}}",
    r"\raisebox{1000em}{\rule{20em}{20em}}",
    r"\hspace{-20em}\rule[-10em]{20em}{30em}",
    r"\kern-40em\llap{\rule[-20em]{20em}{40em}}",
    r"\smash{\rule[-20em]{20em}{40em}}",
    r"\vphantom{\rule{0em}{-900em}}\rule[-19em]{20em}{39em}",
]
COVERING_JS = """() => {
  const found = [];
  for (let x = 5; x < innerWidth; x += 60) {
    for (let y = 5; y < innerHeight; y += 15) {
      const at = document.elementsFromPoint(x, y)[0]?.closest(".formula");
      if (!at) continue;
      const { left, top, right, bottom } = at.closest(".prose").getBoundingClientRect();
      const inside = x > left - 9 && x < right + 9 && y > top - 9 && y < bottom + 9;
      if (!inside) found.push([x, y]);
    }
  }
  return found;
}"""


def test_no_formula_covers_what_is_not_its_answer(server, page, answer_type):
    for formula in COVERS:
        places = f"- \\({formula}\\)\n\n# \\({formula}\\)\n\n$${formula}$$\n\n> \\({formula}\\) a"
        server.replies.append(answer_type(content=[places]))
        ask_and_wait(page, "Cover")
        expect(page.locator(".prose").last.locator(".formula.done")).to_have_count(4)
        for place in (0, 0.5, 1):
            page.evaluate("place => { scroller.scrollTop = place * scroller.scrollHeight; }", place)
            assert page.evaluate(COVERING_JS) == [], formula


def test_names_and_errors_are_shown_as_text(server, open_page, refusal_type, answer_type):
    server.models = [f"tiny {SCRIPT}", f"other{SCRIPT}", "__proto__", "constructor"]
    page = open_page(server.url, expected=("400 (Bad Request)",))
    server.replies.append(refusal_type(400, {"error": {"message": SCRIPT, "code": SCRIPT}}))
    ask(page, SCRIPT)
    expect(page.locator("#alert, .note.error").filter(has_text="onerror").first).to_be_visible()
    page.locator("#prompt").fill(SCRIPT)
    server.replies.append(answer_type(content=["x"], finish_reason=SCRIPT, error=SCRIPT))
    page.keyboard.press("Enter")
    expect(page.locator(".note.error")).to_have_text(SCRIPT)
    expect(page.locator(".conversation").first).to_contain_text("<img src=x")
    assert page.title().startswith("<img src=x")
    for name in ("Rename", "Delete"):
        page.locator(".conversation-row, li").get_by_role("button", name=name).first.click()
        page.keyboard.press("Escape")
    page.locator("#search").fill("<script>")
    expect(page.locator(".conversation")).to_have_count(1)
    assert page.evaluate(PWNED) is None
    assert page.locator("img, script:not([src])").count() == 0


def test_an_imported_file_is_text_wherever_it_is_shown(server, page, tmp_path):
    answer = ANSWER | {
        "reasoning": SCRIPT,
        "content": f"{SCRIPT} [x](javascript:window.pwned=1)",
        "status": "error",
        "error": SCRIPT,
        "model": SCRIPT,
        "finish_reason": SCRIPT,
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "prompt_tokens_details": {"image_tokens": SCRIPT, "cached_tokens": [SCRIPT]},
        },
        "versions": [ANSWER | {"content": SCRIPT, "id": SCRIPT}],
        "at": 1,
        "id": '"]<img>',
    }
    file = tmp_path / f"{SCRIPT[:30].replace('/', '')}.json"
    value = export(
        QUESTION | {"content": SCRIPT, "id": '"]<img>'},
        answer,
        title=SCRIPT,
        draft=SCRIPT,
        settings={"system": SCRIPT, "temperature": "1e300", "seed": " "},
    )
    file.write_text(json.dumps(value))
    page.locator("#import-file").set_input_files(file)
    expect(page.locator(".conversation")).to_contain_text(SCRIPT[:20])
    for _ in range(2):
        expect(page.locator(".note.error")).to_have_text(SCRIPT)
        expect(page.locator(".bubble")).to_have_text(SCRIPT)
        expect(page.locator("#prompt")).to_have_value(SCRIPT)
        page.get_by_role("button", name="Previous version").click()
        expect(page.locator(".prose")).to_contain_text("<script>")
        page.get_by_role("button", name="Next version").click()
        page.get_by_role("button", name="Edit this answer").click()
        page.keyboard.press("Escape")
        assert page.evaluate(PWNED) is None
        assert page.locator("img, script:not([src])").count() == 0
        assert page.locator(".prose a[href]").count() == 0
        page.reload()


def _nested(depth: int) -> str:
    """An answer's version's version's ..., as JSON."""
    start = '{"role": "assistant", "content": "A", "at": 0, "versions": ['
    return start * depth + json.dumps(ANSWER) + "]}" * depth


IMPORTS = {
    "a prototype for all": '"__proto__": {"polluted": 1}, "format"',
    "a prototype's field": '"constructor": {"prototype": {"polluted": 1}}, "format"',
    "a prototype of a conversation": '"__proto__": {"polluted": 1}, "id"',
    "a prototype of a message": '"__proto__": {"polluted": 1}, "role"',
    "a prototype of settings": '"settings": {"__proto__": {"polluted": 1}}, "id"',
}


def test_no_import_changes_what_all_objects_have(server, page, tmp_path):
    file = tmp_path / "import.json"
    for name, put in IMPORTS.items():
        field = put[put.rindex('"', 0, -1) :]
        file.write_text(json.dumps(export(QUESTION, ANSWER)).replace(field, put, 1))
        page.locator("#import-file").set_input_files(file)
        expect(page.locator("#alert:visible, .conversation")).not_to_have_count(0)
        assert page.evaluate("({}).polluted ?? [].polluted") is None, name
        ask_and_wait(page, "Go")
        page.reload()
        assert page.evaluate("({}).polluted ?? [].polluted") is None, name
        page.goto(f"{server.url}icon.svg")  # which stores nothing itself
        page.evaluate("localStorage.clear()")
        page.goto(server.url)


LARGE = {
    "nothing": "",
    "a zero": "\0",
    "no text": b"\xff\xfe\x00\xd8",
    "brackets": "[" * 100_000,
    "versions of versions": json.dumps(export(QUESTION, ANSWER)).replace(
        json.dumps(ANSWER), _nested(6_000)
    ),
    "a hundred thousand mistakes": json.dumps(
        export(*[QUESTION, ANSWER] * 50_000, {"role": "tool", "content": ""})
    ),
    "a number for a text": json.dumps(export(QUESTION | {"content": 5})),
    "no such base64": json.dumps(
        export(QUESTION | {"pictures": [{"name": "x", "data": "data:image/png;base64,%%%"}]})
    ),
    "a page as a picture": json.dumps(
        export(QUESTION | {"pictures": [{"name": "x", "data": "data:text/html,<b>x</b>"}]})
    ),
    "a drawing with a script as a picture": json.dumps(
        export(QUESTION | {"pictures": [{"name": "x", "data": "data:image/svg+xml;base64,AA=="}]})
    ),
}


def test_no_file_that_is_refused_leaves_anything(server, page, tmp_path):
    file = tmp_path / "bad.json"
    before = page.evaluate("JSON.stringify(localStorage)")
    for name, content in LARGE.items():
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        page.evaluate("document.getElementById('alert-text').textContent = ''")
        page.locator("#import-file").set_input_files(file)
        expect(page.locator("#alert-text")).to_contain_text("bad.json was not imported."), name
        assert page.evaluate("JSON.stringify(localStorage)") == before, name
    ask_and_wait(page, "Go")


# JSON of messages and of what else a stored conversation has, each as no version of the page wrote.
CORRUPT = [
    {
        "messages": [
            *(QUESTION | {"id": {}}, ANSWER | {"id": ["x"], "reasoning": {"a": 1}}),
            *(QUESTION, ANSWER | {"usage": "x", "timing": {"first": {}, "total": "y"}}),
            *(QUESTION, ANSWER | {"usage": {"completion_tokens": {}}, "timing": 5}),
            *(QUESTION, ANSWER | {"status": "error", "error": {"a": 1}, "at": "x"}),
            *(QUESTION, ANSWER | {"versions": [ANSWER, 5, None], "at": 10**20}),
            *(QUESTION, ANSWER | {"versions": {"length": 9}, "at": -5, "tail": "x"}),
        ]
    },
    {"messages": [ANSWER, ANSWER, QUESTION], "settings": "text", "draft": {"a": 1}},
    {"messages": [ANSWER | {"status": "streaming", "content": ""}], "settings": [1, 2]},
    {
        "messages": [QUESTION | {"pictures": [5, None, {"id": 5}, {"id": "x", "name": "y"}]}],
        "settings": {"temperature": {"a": 1}, "max_tokens": "x", "toString": 1},
    },
    {"messages": [QUESTION], "updated": {"a": 1}, "created": 5, "title": ["x"], "pictures": "x"},
    {
        "messages": [QUESTION, ANSWER | {"content": "x" * 10**6, "finish_reason": {"a": 1}}],
        "id": 'c"] <img src=x onerror=window.pwned=1>',
        "title": "x" * 10**6,
    },
]


def test_what_is_stored_and_corrupt_can_be_opened_and_deleted(server, open_page):
    page = open_page(server.url, expected=("The specified value", "404"))
    for corrupt in CORRUPT:
        stored = {"id": "c", "created": DATE, "updated": DATE} | corrupt
        page.goto(f"{server.url}icon.svg")  # which stores nothing itself
        page.evaluate(
            """([id, value]) => {
              localStorage.clear();
              localStorage.setItem(`engine-core.conversation.${id}`, value);
              localStorage.setItem("engine-core.current", id);
              localStorage.setItem("engine-core.model", "<b>");
              localStorage.setItem("engine-core.theme", "<b>");
            }""",
            [stored["id"], json.dumps(stored)],
        )
        page.goto(server.url)
        expect(page.locator(".conversation")).not_to_have_count(0)
        ask(page, "Go on")
        expect(page.locator("#stop")).not_to_be_visible()
        page.get_by_role("button", name="Delete “").first.click()
        page.locator("#delete-dialog button[type=submit]").click()
        expect(page.locator("#delete-dialog")).not_to_be_visible()
        expect(page.locator(".message")).to_have_count(0)
        assert page.evaluate(PWNED) is None
    ask_and_wait(page, "A new one")
    assert page.locator("script:not([src])").count() == 0


def test_an_answer_that_is_no_stream_of_ours(server, page, answer_type):
    for raw in (
        b"data: {cut off\n\n",
        b"data: null\n\ndata: 5\n\ndata: []\n\n",
        b'data: {"choices": null}\n\n',
        b'data: {"choices": [{"delta": null}]}\n\n',
        b'data: {"choices": [{"delta": {"content": {"a": 1}}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": 5, "reasoning_content": []}}]}\n\n',
        b'data: {"__proto__": {"polluted": 1}, "choices": []}\n\n',
        b'data: {"choices": [{"delta": {"content": "\\ud800"}}], "usage": "x"}\n\n',
        b"\xff\xfe\n\n: " + b"x" * 100_000 + b"\n\nevent: error\n\n",
    ):
        server.replies.append(answer_type(content=["Before. "], raw=raw, usage=None))
        ask(page, "Go")
        expect(page.locator("#stop")).not_to_be_visible()
        expect(page.locator(".prose, #alert-text").first).to_be_visible()
        assert page.evaluate("({}).polluted") is None
        page.reload()
        page.get_by_role("button", name="New conversation", exact=True).first.click()
    ask_and_wait(page, "Go")
