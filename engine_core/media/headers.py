"""The size of a picture as its file begins. Nothing is decoded here."""

from __future__ import annotations

import struct

# A camera's JPEG may have previews and profiles before its size.
HEAD = 2**18
# Of JPEG: those that say the size, and those without a length.
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD9)))


def header_size(head: bytes) -> tuple[int, int] | None:
    """Height and width as the beginning of a picture says it, before it is turned.

    None if it says nothing, or not where the format has it: decoders go on to search for it.
    """
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
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
    if head[at] != 0x2C:
        raise IndexError("no picture after the screen")
    left, top, wide, high = struct.unpack_from("<HHHH", head, at + 1)
    return max(width, left + wide), max(height, top + high)


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
        if not marker:  # this is content, which decoders skip, and has no length
            raise IndexError("no marker of JPEG")
        at += 1
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", head, at + 3)
            return width, height
        if marker not in _JPEG_BARE:
            at += max(2, struct.unpack_from(">H", head, at)[0])


__all__ = ["HEAD", "header_size"]
