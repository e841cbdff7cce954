"""Encoded sounds as samples. What is decoded comes from strangers: call it in a worker."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import RequestError
from engine_core.media.containers import opened

MAX_SECONDS = 1200.0
_FORMATS = ("wav", "mp3", "flac", "ogg", "mp4", "mov", "matroska", "webm", "aac", "aiff")


def decode_audio(data: bytes, max_seconds: float = MAX_SECONDS) -> tuple[NDArray[np.float32], int]:
    """The samples ``[N]`` of a sound from -1 to 1, the mean of its channels, and their rate.

    Raises:
        RequestError: it is none of the formats, damaged or too long, or has no samples.
    """
    with opened(data, "sound", _FORMATS) as container:
        import av

        if not container.streams.audio:
            raise RequestError("the file holds no sound")
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        rate: int = stream.codec_context.sample_rate
        floats = av.AudioResampler(format="fltp")
        pieces: list[NDArray[np.float32]] = []
        left = int(max_seconds * rate)
        for frame in container.decode(stream):
            left -= frame.samples
            if left < 0 or frame.sample_rate != rate:
                raise RequestError(
                    f"the sound takes more than {max_seconds:g} s, or its rate changes; cut it"
                )
            pieces += [made.to_ndarray().mean(axis=0) for made in floats.resample(frame)]
        pieces += [made.to_ndarray().mean(axis=0) for made in floats.resample(None)]
        if not sum(map(len, pieces)):
            raise RequestError("the sound has no samples")
        return np.concatenate(pieces), rate


__all__ = ["decode_audio"]
