"""Files of video and sound, opened for PyAV. What they hold comes from strangers: use a worker."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from engine_core.errors import RequestError

# Formats whose header counts the samples, and those whose header says a duration, by FFmpeg's
# names. Of others it guesses the duration from what is there.
_COUNTED = ("aiff", "flac", "mp3", "wav")
_TIMED = ("flv", "matroska,webm", "mov,mp4,m4a,3gp,3g2,mj2")
# What may be missing: seconds, and a part of the whole. Encoders add and leave out a packet, and
# the last picture of a screen that is recorded stays.
_COUNTED_SPARE, _TIMED_SPARE = (0.1, 0.01), (0.5, 0.1)
# Sizes of who did not know yet how much there would be.
_ENDLESS = 0x7FFF0000


@contextmanager
def opened(data: bytes, what: str, formats: Sequence[str]) -> Iterator[Any]:
    """The ``av`` container of a file in one of FFmpeg's ``formats``, for a ``with`` block.

    What fails in the block is told as damage of the file. Other formats, some of which are lists of
    further files and addresses, are not looked into.

    Raises:
        RequestError: it is no such file, or is damaged; or PyAV is not installed.
    """
    try:
        import av
    except ImportError:
        raise RequestError(
            f"{what}s need PyAV, which is not installed: pip install 'engine-core-llm[media]'"
        ) from None
    options = {"format_whitelist": ",".join(formats), "protocol_whitelist": "none"}
    try:
        container = av.open(BytesIO(data), options=options, metadata_errors="ignore")
    except (av.error.FFmpegError, OSError, ValueError):
        raise RequestError(f"the data is no {what} in one of {', '.join(formats)}") from None
    try:
        with container:
            yield container
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # damaged data leads to all kinds of errors
        raise RequestError(f"the {what} is damaged: {type(error).__name__}: {error}") from None


def codec_of(stream: Any, what: str) -> Any:
    """The decoder of a stream of a container, in one thread.

    Raises:
        RequestError: FFmpeg has nothing for it, or the file does not say what it is.
    """
    codec = stream.codec_context
    if codec is None:
        raise RequestError(f"the {what} is encoded in a way that cannot be decoded here")
    codec.thread_count = 1
    return codec


def check_whole(data: bytes, container: Any, stream: Any, what: str, seconds: float) -> None:
    """Refuse a file that is cut off, as far as its header says how long it was.

    Args:
        data: the file.
        container: of it.
        stream: that was read.
        what: for messages, what the file is.
        seconds: that the stream has.

    Raises:
        RequestError: much of it is missing.
    """
    form = container.format.name
    if form not in _COUNTED + _TIMED or (form == "mp3" and not _says_length(data)):
        return
    stated = float(stream.duration * stream.time_base) if stream.duration else 0.0
    if form == "wav":
        stated = seconds * _wave_share(data)
    elif not stated and len(container.streams) == 1:  # else it is that of the longest
        stated = (container.duration or 0) / 1e6
    fixed, share = _COUNTED_SPARE if form in _COUNTED else _TIMED_SPARE
    if seconds < stated - fixed - share * stated:
        raise RequestError(
            f"the {what} is truncated: it has {seconds:.2f} s, and its header says {stated:.2f} s"
        )


def _wave_share(data: bytes) -> float:
    """How much the header of a wave file says that there is, of what there is."""
    place = 12
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        place += 8
        if name == b"data":
            here = len(data) - place
            return max(1.0, size / here) if here and size < _ENDLESS else 1.0
        place += size + size % 2
    return 1.0


def _says_length(data: bytes) -> bool:
    """Whether the first frame of an MP3 file has a table with their number."""
    start = 0
    if data[:3] == b"ID3":
        start = 10 + sum((byte & 127) << 7 * (3 - place) for place, byte in enumerate(data[6:10]))
    return any(name in data[start : start + 200] for name in (b"Xing", b"Info"))


__all__ = ["check_whole", "codec_of", "opened"]
