"""Large pictures of one colour, made at once: an encoder would take longer than what is tested."""

from __future__ import annotations

import base64
import struct
import zlib


def flat_png(height: int, width: int, value: int = 0) -> bytes:
    """A PNG file of RGB pixels that are ``value`` in every channel.

    One row is compressed, so that it can stand by itself, and repeated.
    """
    row = b"\0" + bytes([value]) * 3 * width
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(row) + packer.flush(zlib.Z_FULL_FLUSH)
    check = 1
    for _ in range(height):
        check = zlib.adler32(row, check)
    rows = b"\x78\xda" + packed * height + b"\x03\0" + struct.pack(">I", check)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def flat_url(height: int, width: int, value: int = 0) -> str:
    """The same as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(flat_png(height, width, value)).decode()}"
