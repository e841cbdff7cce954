"""The cost of decoding a part, as far as the beginning of its file tells.

Nothing is decoded here, so that it may be done outside of a worker. It says whose turn it is, and
nothing is refused by it.
"""

from __future__ import annotations

import base64
import binascii

from engine_core.media.headers import HEAD, header_size
from engine_core.media.images import MAX_PIXELS
from engine_core.media.parts import MediaPart

# A prompt that costs more takes seconds.
LARGE = 16_000_000
# Characters of a data URL before its content.
_PREFIX = 256
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
        return header_size(beginning(value, HEAD))
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


__all__ = ["LARGE", "beginning", "cost_of", "picture_size"]
