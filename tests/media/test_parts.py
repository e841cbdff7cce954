"""Parts of messages and items of prompts, in the forms of every service that users know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_core.errors import RequestError
from engine_core.inputs import once_each
from engine_core.media.parts import MediaPart, prompt_media, split_media

URL = "data:image/png;base64,AA=="
PIXELS = np.zeros((2, 3, 3), np.uint8)

PARTS: dict[str, tuple[dict[str, Any], tuple[str, Any, str, str | None]]] = {
    "openai": ({"type": "image_url", "image_url": {"url": URL}}, ("image", URL, "image_url", None)),
    "mindie": ({"type": "image_url", "image_url": URL}, ("image", URL, "image_url", None)),
    "responses": ({"type": "input_image", "image_url": URL}, ("image", URL, "image_url", None)),
    "uuid": (
        {"type": "image_url", "image_url": {"url": URL}, "uuid": "a"},
        ("image", URL, "image_url", "a"),
    ),
    "uuid inside": (
        {"type": "image_url", "image_url": {"url": URL, "uuid": "a"}},
        ("image", URL, "image_url", "a"),
    ),
    "known": ({"type": "image_url", "uuid": "a"}, ("image", None, "image_url", "a")),
    "known, empty": (
        {"type": "image_url", "image_url": {"url": ""}, "uuid": "a"},
        ("image", None, "image_url", "a"),
    ),
    "video": (
        {"type": "video_url", "video_url": {"url": "https://host/a.mp4"}},
        ("video", "https://host/a.mp4", "video_url", None),
    ),
    "audio address": (
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA=="}},
        ("audio", "data:audio/wav;base64,AA==", "audio_url", None),
    ),
    "sound": (
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        ("audio", "data:audio/wav;base64,AA==", "input_audio", None),
    ),
    "known sound": (
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}, "uuid": "b"},
        ("audio", None, "input_audio", "b"),
    ),
    "object": ({"type": "image", "image": PIXELS}, ("image", PIXELS, "image", None)),
    "no type": ({"image": PIXELS}, ("image", PIXELS, "image", None)),
    "path": ({"image": "some/a.png"}, ("image", Path("some/a.png"), "image", None)),
    "address": ({"image": "https://host/a.png"}, ("image", "https://host/a.png", "image", None)),
    "pair": ({"audio": (PIXELS, 8000)}, ("audio", (PIXELS, 8000), "audio", None)),
}


@pytest.mark.parametrize(("part", "expected"), PARTS.values(), ids=PARTS.keys())
def test_parts_are_known_in_every_form(part: Any, expected: tuple[Any, ...]) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": "a"}, part, {"text": "b"}]}]
    messages, found = split_media(asked)
    kind, value, key, uuid = expected
    assert messages == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": kind},
                {"type": "text", "text": "b"},
            ],
        }
    ]
    assert found == [MediaPart(kind, value, f"messages.0.content.1.{key}", uuid)]


def test_an_address_that_a_stranger_sends_is_never_a_path() -> None:
    for url in ("/etc/passwd", "passwd", "C:passwd"):
        asked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        assert split_media(asked)[1][0].value == url


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url"}, "there is no image"),
        ({"type": "video_url", "video_url": {"url": None}}, "there is no video"),
        ({"type": "image_url", "image_url": {"url": 3}}, "data:image/..."),
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": ""}, "1 to 256 characters"),
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": 3}, "1 to 256 characters"),
        ({"type": "image_url", "image_url": {"url": URL}, "uuid": "a" * 257}, "1 to 256 char"),
        ({"type": "input_audio", "input_audio": {"data": "AA=="}}, '"format": "wav"'),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "a;b"}}, '"wav"'),
    ],
    ids=str,
)
def test_parts_without_content_are_refused_by_their_place(part: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        split_media([{"role": "system", "content": "a"}, {"role": "user", "content": [part]}])
    assert refused.value.param == f"messages.1.content.0.{part['type']}"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "text", "text": "a", "image_url": {"url": URL}}, "image_url"),
        ({"type": "text", "text": "a", "image": PIXELS}, "image"),
        ({"text": "a", "input_audio": {"data": "AA==", "format": "wav"}}, "input_audio"),
        ({"type": "image_url", "image_url": URL, "video_url": URL}, "video_url"),
        ({"type": "image", "image": PIXELS, "audio": (PIXELS, 8000)}, "audio"),
        ({"image": PIXELS, "video": [PIXELS]}, "video"),
        ({"type": "refusal", "refusal": "a", "file": {"file_data": URL}}, "file"),
    ],
    ids=str,
)
@pytest.mark.parametrize("beside", [[], [{"type": "image_url", "image_url": URL}]])
def test_nothing_that_is_shown_is_overlooked(part: Any, field: str, beside: list[Any]) -> None:
    with pytest.raises(RequestError, match="give what it shows a part of its own") as refused:
        split_media([{"role": "user", "content": [{"type": "text", "text": "b"}, part, *beside]}])
    assert refused.value.param == f"messages.0.content.1.{field}"
    with pytest.raises(RequestError, match="a message has no 'images'; give") as refused:
        split_media([{"role": "user", "content": "a", "images": [URL]}])
    assert refused.value.param == "messages.0.images"
    # A client that writes all fields says nothing by it.
    fine = [{"type": "text", "text": "b", "image_url": None, "images": []}]
    assert split_media([{"role": "user", "content": fine}])[1] == []


@pytest.mark.parametrize("beside", [[], [{"type": "image_url", "image_url": URL}]])
@pytest.mark.parametrize("kind", ["image_pil", "image_embeds", "foo", "input_text"])
def test_a_users_part_that_a_template_would_pass_over_is_refused(
    kind: str, beside: list[Any]
) -> None:
    """Those of others are the template's business."""
    content = [*beside, {"type": kind, kind: PIXELS}, {"type": "text", "text": "a"}]
    with pytest.raises(RequestError, match=f"'text', 'image_url', .*, got '{kind}'") as refused:
        split_media([{"role": "user", "content": content}])
    assert refused.value.param == f"messages.0.content.{len(beside)}.type"
    thought = [{"type": "thinking", "thinking": "a"}]
    assert split_media([{"role": "assistant", "content": thought}])[1] == []


def test_items_of_prompts_have_their_uuids() -> None:
    clip = np.zeros((4, 2, 3, 3), np.uint8)
    found = prompt_media(
        {"image": [PIXELS, None, "a.png"], "video": clip, "audio": []},
        {"image": ["a", "b", None], "video": "c"},
    )
    assert found == {
        "image": [
            MediaPart("image", PIXELS, "multi_modal_data.image.0", "a"),
            MediaPart("image", None, "multi_modal_data.image.1", "b"),
            MediaPart("image", Path("a.png"), "multi_modal_data.image.2"),
        ],
        "video": [MediaPart("video", clip, "multi_modal_data.video.0", "c")],
    }
    assert prompt_media({"image": found["image"]}) == {"image": found["image"]}


@pytest.mark.parametrize(
    ("data", "uuids", "param"),
    [
        ([PIXELS], None, "multi_modal_data"),
        ({"image": PIXELS}, ["a"], "multi_modal_uuids"),
        ({"image": PIXELS}, {"image": ["a", "b"]}, "multi_modal_uuids.image"),
        ({"image": PIXELS}, {"video": "a"}, "multi_modal_uuids.video"),
        ({"image": [PIXELS, None]}, None, "multi_modal_data.image.1"),
        ({"image": PIXELS}, {"image": 7}, "multi_modal_data.image.0"),
    ],
    ids=["a list", "a list of names", "two names", "another kind", "no name", "a number"],
)
def test_items_that_do_not_fit_are_refused(data: Any, uuids: Any, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        prompt_media(data, uuids)
    assert refused.value.param == param


def test_what_is_the_same_object_is_made_once() -> None:
    first, second = [1], [1]  # equal, and two
    asked: list[tuple[int, object]] = []

    def make(index: int, value: object) -> int:
        asked.append((index, value))
        return len(asked)

    assert once_each([first, second, first, first], make) == [1, 2, 1, 1]
    assert [index for index, _ in asked] == [0, 1]
