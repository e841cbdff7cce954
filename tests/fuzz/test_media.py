"""Damaged pictures, videos and sounds are decoded or refused by name, within seconds.

Each case is seeded: kind and number make the same file again.
"""

from __future__ import annotations

import random
import re
import time
import wave
import zlib
from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from random_examples import examples

from engine_core.errors import RequestError
from engine_core.media.images import decode_image, load_decoders
from engine_core.media.sounds import decode_audio
from engine_core.media.videos import decode_video

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)


def picture(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    out = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned
    more = {"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {}
    Image.fromarray(PIXELS).convert(mode).save(out, kind, **more, **options)
    return out.getvalue()


def video(form: str, codec: str) -> bytes:
    out = BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 56, 40, "yuv420p"
        for _ in range(8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(PIXELS, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def sound(form: str, codec: str) -> bytes:
    out = BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=16000, layout="mono")
        of_floats = "flt" in stream.codec_context.format.name
        for number in range(6):
            samples = np.full((1, 960), number, np.float32 if of_floats else np.int16)
            name = stream.codec_context.format.name
            frame = av.AudioFrame.from_ndarray(samples, name, "mono")
            frame.sample_rate, frame.time_base = 16000, Fraction(1, 16000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def wave_file() -> bytes:
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(PIXELS.tobytes())
    return out.getvalue()


def frames(data: bytes) -> list[Any]:
    return list(decode_video(data))


KINDS: dict[str, tuple[Callable[[bytes], Any], Callable[[], bytes]]] = {
    "png": (decode_image, lambda: picture("PNG")),
    "png of a palette": (decode_image, lambda: picture("PNG", "P")),
    "jpeg": (decode_image, lambda: picture("JPEG")),
    "jpeg in passes": (decode_image, lambda: picture("JPEG", "CMYK", progressive=True)),
    "webp": (decode_image, lambda: picture("WEBP")),
    "bmp": (decode_image, lambda: picture("BMP")),
    "gif": (decode_image, lambda: picture("GIF", "P")),
    "mp4": (frames, lambda: video("mp4", "libx264")),
    "webm": (frames, lambda: video("webm", "libvpx-vp9")),
    "avi": (frames, lambda: video("avi", "mpeg4")),
    "mpegts": (frames, lambda: video("mpegts", "mpeg2video")),
    "flv": (frames, lambda: video("flv", "flv1")),
    "wav": (decode_audio, wave_file),
    "flac": (decode_audio, lambda: sound("flac", "flac")),
    "m4a": (decode_audio, lambda: sound("mp4", "aac")),
    "aiff": (decode_audio, lambda: sound("aiff", "pcm_s16be")),
}


def damaged(good: bytes, draw: random.Random) -> bytes:
    """``good`` with up to eight changes, most of them near its beginning."""
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(data) if draw.random() < 0.4 else min(len(data), 200))
        width = draw.choice((1, 2, 4, 8))
        number = draw.choice(NUMBERS) % 256**width
        match draw.randrange(6):
            case 0:
                data[at] = draw.randrange(256)
            case 1 | 2:
                data[at : at + width] = number.to_bytes(width, draw.choice(("big", "little")))
            case 3:
                del data[at : at + draw.choice((1, 4, 100, len(data)))]
            case 4:
                data[at:at] = data[: draw.choice((1, 4, 64, 500))]
            case _:
                data[at:at] = draw.randbytes(draw.choice((4, 50)))
        if len(data) < 16:
            return bytes(data)
    return bytes(data)


def most_memory(*, anew: bool = False) -> int:
    """Bytes that this process had in memory at most, since it was last asked for them anew."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) * 1024


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_decoded_or_refused(kind: str) -> None:
    load_decoders()
    decode, make = KINDS[kind]
    good = make()
    assert len(np.asarray(decode(good)[0] if decode is decode_audio else decode(good)))
    refusals = []
    before = most_memory(anew=True)
    for number in range(examples(400)):
        data = damaged(good, random.Random(zlib.crc32(kind.encode()) + number))
        begun = time.process_time()
        try:
            decode(data)
        except RequestError as error:
            refusals.append(str(error))
        assert time.process_time() - begun < 20, number
        assert most_memory() - before < 2**30, number
    assert refusals
    assert max(map(len, refusals)) < 500
