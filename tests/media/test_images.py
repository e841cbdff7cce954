"""Pictures that strangers send: decoded, or refused by name."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine_core.errors import RequestError
from engine_core.media import split_media
from engine_core.media.images import data_of, decode_image, load_decoders

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


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


def decoded(url: str) -> Any:
    load_decoders()
    return decode_image(data_of(url, "image"), max_pixels=10_000)


def test_pictures_come_back_as_they_were() -> None:
    image = Image.fromarray(PIXELS)
    for kind, options in (("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})):
        got = decoded(data_url(encoded(image, kind, **options)))
        assert np.array_equal(got, PIXELS)
    assert np.array_equal(decoded(data_url(encoded(image), "IMAGE/X")), PIXELS)
    assert np.array_equal(decoded("DATA" + data_url(encoded(image))[4:]), PIXELS)
    grey = decoded(data_url(encoded(image.convert("L"))))
    assert np.array_equal(grey, np.asarray(image.convert("L").convert("RGB")))


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\t"])
def test_base64_in_lines(end: str) -> None:
    """As e-mail has it, and the command of that name writes it."""
    head, _, content = data_url(encoded(Image.fromarray(PIXELS))).partition(",")
    lines = [content[place : place + 76] for place in range(0, len(content), 76)]
    assert len(lines) > 1
    assert np.array_equal(decoded(f"{head},{end}{end.join(lines)}{end}"), PIXELS)


def test_what_is_transparent_is_white() -> None:
    pixels = np.dstack([PIXELS, np.full((5, 7), 255, np.uint8)])
    pixels[1:3, :, 3] = 0
    got = decoded(data_url(encoded(Image.fromarray(pixels))))
    assert (got[1:3] == 255).all()
    assert np.array_equal(got[3:], PIXELS[3:])


def test_a_photograph_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    url = data_url(encoded(Image.fromarray(PIXELS), "PNG", exif=exif))
    assert np.array_equal(decoded(url), np.rot90(PIXELS, 3))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/a.png", "'https', and addresses and files are not fetched"),
        ("file:///etc/passwd", "'file'"),
        ("/etc/passwd", "'text'"),
        ("data:text/plain;base64,aaaa", "data:text/plain;base64"),
        ("data:image/png,aaaa", "data:image/TYPE;base64"),
        (
            "data:image/png;base64",
            "data:image/TYPE;base64, and begins with 'data:image/png;base64'",
        ),
        ("data:image/png;base64,a$b=", "its base64 is wrong"),
        (data_url(b"hello"), "no picture in one of PNG, JPEG"),
        (data_url(b""), "no picture"),
        (data_url(encoded(Image.fromarray(PIXELS))[:60]), "the picture is damaged"),
        (data_url(bomb(30_000, 30_000)), "30000 x 30000 pixels, and 10000 are taken"),
        (data_url(bomb(50, 50)), "the picture is damaged"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "no picture"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(url: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        decoded(url)


@pytest.mark.parametrize("size", [(1, 65_536), (65_536, 1)])
def test_sides_are_bounded_as_pixels_are(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="pixels, and a side may have 65535 at most"):
        decode_image(bomb(*size))


def test_animations_are_refused() -> None:
    frames = [Image.fromarray(PIXELS), Image.fromarray(255 - PIXELS)]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(RequestError, match=r"animated \(GIF\); send one frame"):
        decoded(data_url(content, "image/gif"))


def test_a_cameras_file_of_several_pictures_shows_the_first() -> None:
    image = Image.fromarray(np.repeat(np.repeat(PIXELS, 8, 0), 8, 1))
    content = encoded(image, "MPO", save_all=True, append_images=[image.rotate(180)])
    assert Image.open(BytesIO(content)).n_frames == 2
    alone = decoded(data_url(encoded(image, "JPEG"), "image/jpeg"))
    assert np.array_equal(decoded(data_url(content, "image/jpeg")), alone)


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
    spaced = {"type": "image_url", "image_url": "\n data:image/png;base64,aa\n"}
    _, (found,) = split_media([{"role": "user", "content": [spaced]}])
    assert found.value == parts[0].value
    with pytest.raises(RequestError, match=r"messages\.0\.content\.0\.image_url: is"):
        split_media([{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}])


def test_grey_of_16_bits_has_its_shades() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (6, 9), np.uint8)
    out = BytesIO()
    Image.fromarray(grey.astype(np.uint16) * 257).save(out, "PNG")
    assert (decode_image(out.getvalue()) == grey[..., None]).all()


def test_a_picture_of_many_scans_is_refused() -> None:
    """Each takes a decoder as long as the whole picture, and ten bytes of the file."""
    out = BytesIO()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(out, "JPEG", progressive=True)
    content = out.getvalue()
    assert decode_image(content).shape == (64, 64, 3)
    last = content.rindex(b"\xff\xda")
    scan = content[last:-2]
    with pytest.raises(RequestError, match="scans, and 128 are taken at most"):
        decode_image(content[:-2] + scan * 500 + content[-2:])


@pytest.mark.parametrize("progressive", [False, True])
def test_what_lies_beside_a_picture_is_none_of_its_scans(progressive: bool) -> None:
    """As a preview in it, or a telephone's video behind it."""
    image = Image.fromarray(PIXELS)
    content = encoded(image, "JPEG", progressive=progressive, comment=b"\xff\xda\xff\xd9" * 500)
    assert content.count(b"\xff\xda") > 500
    expected = decode_image(encoded(image, "JPEG", progressive=progressive))
    assert (decode_image(content + b"\xff\xda" * 500) == expected).all()
