"""Decoding of pictures that strangers send, in a bounded pool of processes."""

from __future__ import annotations

import base64
import binascii
import threading
from concurrent.futures import CancelledError
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from engine_core.errors import EngineDeadError, RequestError
from engine_core.workers import Limits, WorkerError, WorkerPool

_ROOM = "engine_core.media.images"
# A picture of 50 million pixels has 150 MB as RGB; decoders take a few times that.
MAX_PIXELS = 50_000_000
_MEMORY_BYTES = 2**30
_STACK_BYTES = 2**20
_SECONDS = 10.0
# Pictures that are decoded at once, and that may wait for it.
_AT_ONCE = 2
_QUEUED = 64
_SCHEME = "data:"


class MediaDecoder:
    """Decodes pictures in processes with limits of memory and time.

    A file of some kilobytes may have gigabytes of pixels, and decoders have had bugs that a file
    exploits. It may be used from several threads.

    Args:
        max_pixels: of a picture, at most.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        self._max_pixels = max_pixels
        self._pool: WorkerPool | None = None
        self._lock = threading.Lock()
        self._closed = False

    def image(self, url: str, param: str) -> npt.NDArray[np.uint8]:
        """The picture ``[H, W, 3]`` of a data URL; blocks until it is decoded.

        ``param`` says where the URL stands in the request.

        Raises:
            RequestError: it is no data URL, or no picture within the limits.
            QueueFullError: too many pictures wait.
            EngineDeadError: the engine is being shut down.
        """
        data = _data(url, param)
        try:
            done = self._open().submit(f"{_ROOM}:decode_image", data, self._max_pixels).result()
        except RequestError as error:
            raise RequestError(f"{param}: {error}", param=param) from None
        except (WorkerError, CancelledError) as error:
            if self._closed:
                raise EngineDeadError("the engine is being shut down") from None
            message = f"{param}: the picture was not decoded: {error}"
            raise RequestError(message, param=param) from None
        height, width, pixels = done
        return np.frombuffer(pixels, dtype=np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        """End every decoding; there are no more after it."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _open(self) -> WorkerPool:
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is being shut down and takes no more requests")
            if self._pool is None:
                if find_spec("PIL") is None:
                    raise RequestError(
                        "pictures need Pillow, which is not installed: "
                        "pip install 'engine-core-llm[media]'"
                    )
                self._pool = WorkerPool(
                    f"{_ROOM}:open_decoder",
                    (),
                    Limits(_SECONDS, _MEMORY_BYTES, _STACK_BYTES),
                    max_workers=_AT_ONCE,
                    max_queued=_QUEUED,
                    what="the decoder of pictures",
                )
            return self._pool


def _data(url: str, param: str) -> bytes:
    """The content of a data URL of an image.

    Raises:
        RequestError: it is none.
    """
    head, comma, content = url.partition(",")
    if not head.startswith(_SCHEME) or not comma:
        kind = head.split(":", 1)[0][:20] if ":" in head[:20] else "text"
        raise RequestError(
            f"{param}: pictures are taken as data URLs (data:image/png;base64,...); this is "
            f"{kind!r}, and addresses and files are not fetched",
            param=param,
        )
    kind, *attributes = head[len(_SCHEME) :].split(";")
    if not kind.startswith("image/") or "base64" not in attributes:
        raise RequestError(
            f"{param}: the data URL is to begin with data:image/TYPE;base64, and begins with "
            f"{head[:60]!r}",
            param=param,
        )
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{param}: its base64 is wrong: {error}", param=param) from None
