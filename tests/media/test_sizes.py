"""Sizes of pictures by their headers, and what Pillow says of the same files."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine_core.errors import RequestError
from engine_core.media.images import MAX_PIXELS, decode_image
from engine_core.media.parts import MediaPart
from engine_core.media.sizes import cost_of, picture_size

FORMATS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "PNG": ("PNG", "RGBA", {}),
    "JPEG": ("JPEG", "RGB", {}),
    "progressive": ("JPEG", "RGB", {"progressive": True}),
    "preview": ("JPEG", "L", {"exif": b"Exif\0\0" + b"\xff\xd8\xff\xc0" * 9000, "comment": "a"}),
    "CMYK": ("JPEG", "CMYK", {}),
    "lossy": ("WEBP", "RGB", {"quality": 50}),
    "lossless": ("WEBP", "RGB", {"lossless": True}),
    "extended": ("WEBP", "RGBA", {"exif": b"Exif\0\0" + bytes(50)}),
    "GIF": ("GIF", "P", {}),
    "BMP": ("BMP", "RGB", {}),
}


def part(value: Any, kind: str = "image") -> MediaPart:
    return MediaPart(kind, value, "here")


@pytest.mark.parametrize(("form", "mode", "settings"), FORMATS.values(), ids=FORMATS.keys())
def test_sizes_are_what_pillow_says(form: str, mode: str, settings: dict[str, Any]) -> None:
    chance = random.Random(0)
    for _ in range(10):
        out = BytesIO()
        size = chance.randint(1, 700), chance.randint(1, 700)
        Image.new(mode, size).save(out, form, **settings)
        content = out.getvalue()
        width, height = Image.open(BytesIO(content)).size
        assert picture_size(part(content)) == (height, width)
        lines = base64.encodebytes(content).decode()
        assert picture_size(part(f"data:image/any;base64,{lines}")) == (height, width)
        assert cost_of(part(content)) == width * height
        for end in (0, 1, 5, 13, 20, 29):  # cut off
            assert picture_size(part(content[:end])) in (None, (height, width))


def test_a_gif_that_is_larger_than_its_screen() -> None:
    out = BytesIO()
    Image.new("P", (300, 200)).save(out, "GIF", comment=b"a" * 300)
    content = bytearray(out.getvalue())
    content[6:10] = b"\1\0\1\0"
    width, height = Image.open(BytesIO(content)).size
    assert picture_size(part(bytes(content))) == (height, width) == (200, 300)


def encoded(form: str) -> bytes:
    out = BytesIO()
    Image.new("L", (300, 200)).save(out, form)
    return out.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def test_a_size_that_is_not_where_it_belongs_is_not_guessed() -> None:
    """Pillow finds it. What stands in its place is no size, be it larger or smaller."""
    png, jpeg, gif = map(encoded, ("PNG", "JPEG", "GIF"))
    screen = gif[:6] + b"\1\0\1\0" + gif[10:]
    picture = 13 + 3 * (2 << (gif[10] & 7))
    frame = b"\xff\xc0\x00\x0b\x08\x00\x02\x00\x02\x01\x01\x11\x00"  # of 2 x 2 pixels
    hidden = b"\xff\xe5" + struct.pack(">H", 2 + len(frame)) + frame
    for moved in (
        png[:8] + chunk(b"tEXt", struct.pack(">II", 1, 1)) + png[8:],
        png[:8] + chunk(b"tEXt", struct.pack(">II", 40_000, 40_000)) + png[8:],
        jpeg[:2] + b"\xff\x00\x00\x06" + hidden + jpeg[2:],
        screen[:picture] + b"\0" + screen[picture:],
    ):
        assert decode_image(moved).shape == (200, 300, 3)
        assert picture_size(part(moved)) is None
        assert cost_of(part(moved)) == MAX_PIXELS


@pytest.mark.parametrize("side", [1, 3000])
def test_a_picture_of_two_sizes_is_refused(side: int) -> None:
    png = encoded("PNG")
    first = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    two = png[:8] + first + png[8:]
    assert Image.open(BytesIO(two)).size == (300, 200)
    with pytest.raises(RequestError, match=f"begins as one of {side} x {side} pixels.* 300 x 200"):
        decode_image(two)


def test_what_says_nothing_costs_the_most() -> None:
    for value in (b"", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff" * 300_000, "data:,", "data:a", "d"):
        assert picture_size(part(value)) is None
        assert cost_of(part(value)) == MAX_PIXELS
    assert cost_of(part(b"\0" * 2000, "video")) == MAX_PIXELS
    assert cost_of(part(np.zeros((3, 5, 3), np.uint8))) == 15


def test_sounds_cost_by_their_length() -> None:
    assert cost_of(part(b"RIFF" + bytes(960_000), "audio")) == 960_004
    assert cost_of(part(b"OggS" + bytes(96_000), "audio")) > 960_000
    assert cost_of(part(bytes(10**8), "audio")) == MAX_PIXELS
