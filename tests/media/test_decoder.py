"""Pictures that strangers send: decoded in processes with limits, or refused by name."""

from __future__ import annotations

import base64
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine_core.errors import EngineDeadError, RequestError
from engine_core.media import MediaDecoder, split_media

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    made = MediaDecoder(max_pixels=10_000)
    yield made
    made.close()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises many pixels, in a few bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        check = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def test_pictures_come_back_as_they_were(decoder: MediaDecoder) -> None:
    image = Image.fromarray(PIXELS)
    for kind, options in (("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})):
        got = decoder.image(data_url(encoded(image, kind, **options)), "p")
        assert np.array_equal(got, PIXELS)
    grey = decoder.image(data_url(encoded(image.convert("L"))), "p")
    assert np.array_equal(grey, np.asarray(image.convert("L").convert("RGB")))


def test_what_is_transparent_is_white(decoder: MediaDecoder) -> None:
    pixels = np.dstack([PIXELS, np.full((5, 7), 255, np.uint8)])
    pixels[1:3, :, 3] = 0
    got = decoder.image(data_url(encoded(Image.fromarray(pixels))), "p")
    assert (got[1:3] == 255).all()
    assert np.array_equal(got[3:], PIXELS[3:])


def test_a_photograph_stands_upright(decoder: MediaDecoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    url = data_url(encoded(Image.fromarray(PIXELS), "PNG", exif=exif))
    assert np.array_equal(decoder.image(url, "p"), np.rot90(PIXELS, 3))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/a.png", "'https', and addresses and files are not fetched"),
        ("file:///etc/passwd", "'file'"),
        ("/etc/passwd", "'text'"),
        ("data:text/plain;base64,aaaa", "data:text/plain;base64"),
        ("data:image/png,aaaa", "data:image/TYPE;base64"),
        ("data:image/png;base64,a$b=", "its base64 is wrong"),
        (data_url(b"hello"), "no picture in one of PNG, JPEG"),
        (data_url(b""), "no picture"),
        (data_url(encoded(Image.fromarray(PIXELS))[:60]), "the picture is damaged"),
        (data_url(bomb(30_000, 30_000)), "30000 x 30000 pixels, and 10000 are taken"),
        (data_url(bomb(50, 50)), "the picture is damaged"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "no picture"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(decoder: MediaDecoder, url: str, said: str) -> None:
    with pytest.raises(RequestError, match=f"^here: .*{said}") as caught:
        decoder.image(url, "here")
    assert caught.value.param == "here"


def test_animations_are_refused(decoder: MediaDecoder) -> None:
    frames = [Image.fromarray(PIXELS), Image.fromarray(255 - PIXELS)]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(RequestError, match=r"animated \(GIF\); send one frame"):
        decoder.image(data_url(content, "image/gif"), "p")


def test_a_picture_that_waits_when_the_decoder_closes_is_told_so() -> None:
    made = MediaDecoder()
    made.image(data_url(encoded(Image.fromarray(PIXELS))), "p")
    large = data_url(encoded(Image.new("RGB", (4000, 4000))))
    with ThreadPoolExecutor(12) as threads:
        waiting = [threads.submit(made.image, large, "p") for _ in range(12)]
        time.sleep(0.1)  # two are decoded, and the others wait
        made.close()
        errors = [each.exception() for each in waiting]
    assert all(error is None or isinstance(error, EngineDeadError) for error in errors)


def test_a_decoder_that_dies_is_named_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.media.decoder._SECONDS", 1e-3)
    made = MediaDecoder()
    with pytest.raises(RequestError, match=r"^here: the picture was not decoded: ") as caught:
        made.image(data_url(encoded(Image.fromarray(PIXELS))), "here")
    assert caught.value.param == "here"
    made.close()


def test_a_closed_decoder_says_so() -> None:
    made = MediaDecoder()
    made.close()
    with pytest.raises(EngineDeadError, match="being shut down"):
        made.image(data_url(encoded(Image.fromarray(PIXELS))), "p")


def test_parts_of_messages_are_marked_and_found() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}
    shown = {"type": "image", "image": PIXELS}
    text = {"type": "text", "text": "What is it?"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [url, text, shown]},
        {"role": "user", "content": [text]},
    ]
    plain, parts = split_media(messages)
    assert plain[0] is messages[0]
    assert plain[1]["content"] == [{"type": "image"}, text, {"type": "image"}]
    assert plain[2] is messages[2]
    assert [(part.kind, part.param) for part in parts] == [
        ("image", "messages.1.content.0.image_url"),
        ("image", "messages.1.content.2.image"),
    ]
    assert (parts[0].value, parts[1].value is PIXELS) == ("data:image/png;base64,aa", True)
    with pytest.raises(RequestError, match=r"messages\.0\.content\.0\.image_url: is"):
        split_media([{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}])
