"""The cost of decoding a part, as far as the beginning of its file tells.

Nothing is decoded here, so that it may be done outside of a worker. It says whose turn it is, and
nothing is refused by it.
"""

from __future__ import annotations

import base64
import binascii
import struct

from engine_core.media.images import MAX_PIXELS
from engine_core.media.parts import MediaPart

# A prompt that costs more takes seconds.
LARGE = 16_000_000
# A camera's JPEG may have previews and profiles before its size.
_HEAD = 2**18
# Characters of a data URL before its content.
_PREFIX = 256
# Of JPEG: those that say the size, and those without a length.
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
# Samples that a byte of a compressed sound may be.
_SAMPLES = 50


def cost_of(part: MediaPart) -> int:
    """Pixels of a picture, or what takes as long of anything else; the most if nothing tells."""
    if part.kind == "image":
        size = picture_size(part)
        return MAX_PIXELS if size is None else min(size[0] * size[1], MAX_PIXELS)
    if part.kind == "audio" and isinstance(part.value, str | bytes):
        begin = beginning(part.value, 16)
        samples = 1 if begin.startswith(b"RIFF") else _SAMPLES
        return min(len(part.value) * samples, MAX_PIXELS)
    return MAX_PIXELS


def picture_size(part: MediaPart) -> tuple[int, int] | None:
    """The height and width of a picture as its file or data URL says it, before it is turned."""
    value = part.value
    if isinstance(value, str | bytes):
        return _size(beginning(value, _HEAD))
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) == 3:
        return int(shape[0]), int(shape[1])
    return None


def beginning(value: str | bytes, count: int) -> bytes:
    """The first bytes of a file, or of what a data URL has; nothing if it is none."""
    if isinstance(value, bytes):
        return value[:count]
    _, comma, content = value[: _PREFIX + count * 4 // 3].partition(",")
    content = "".join(content.split())
    try:
        return base64.b64decode(content[: len(content) // 4 * 4]) if comma else b""
    except (binascii.Error, ValueError):
        return b""


def _size(head: bytes) -> tuple[int, int] | None:
    """Height and width as the header of a picture says."""
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack_from(">II", head, 16)
        elif head[:6] in (b"GIF87a", b"GIF89a"):
            width, height = _gif(head)
        elif head.startswith(b"BM"):
            old = struct.unpack_from("<I", head, 14)[0] == 12
            width, height = struct.unpack_from("<HH" if old else "<ii", head, 18)
        elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            width, height = _webp(head)
        elif head.startswith(b"\xff\xd8"):
            width, height = _jpeg(head)
        else:
            return None
    except (struct.error, IndexError):
        return None
    return abs(height), abs(width)


def _gif(head: bytes) -> tuple[int, int]:
    """The screen, and as much more as the first picture on it has."""
    width, height = struct.unpack_from("<HH", head, 6)
    at = 13 + (3 << (head[10] & 7) + 1 if head[10] & 0x80 else 0)
    while head[at] == 0x21:  # what comes before the picture, in pieces with their lengths
        at += 2
        while head[at]:
            at += head[at] + 1
        at += 1
    if head[at] == 0x2C:
        left, top, wide, high = struct.unpack_from("<HHHH", head, at + 1)
        width, height = max(width, left + wide), max(height, top + high)
    return width, height


def _webp(head: bytes) -> tuple[int, int]:
    kind = head[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X" and len(head) >= 30:
        return (
            int.from_bytes(head[24:27], "little") + 1,
            int.from_bytes(head[27:30], "little") + 1,
        )
    raise IndexError("no known piece of WebP")


def _jpeg(head: bytes) -> tuple[int, int]:
    at = 2
    while True:
        while head[at] != 0xFF:
            at += 1
        while head[at] == 0xFF:
            at += 1
        marker = head[at]
        at += 1
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", head, at + 3)
            return width, height
        if marker not in _JPEG_BARE:
            at += max(2, struct.unpack_from(">H", head, at)[0])


__all__ = ["LARGE", "beginning", "cost_of", "picture_size"]
