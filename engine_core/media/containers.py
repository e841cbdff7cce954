"""Files of video and sound, opened for PyAV. What they hold comes from strangers: use a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from engine_core.errors import RequestError


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


__all__ = ["codec_of", "opened"]
