"""Sizes of pictures by their headers, and what Pillow says of the same files."""

from __future__ import annotations

import base64
import random
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine_core.media.images import MAX_PIXELS
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
