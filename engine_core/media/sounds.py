"""Encoded sounds as samples. What is decoded comes from strangers: call it in a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import RequestError
from engine_core.media.containers import check_whole, codec_of, opened

MAX_SECONDS = 1200.0
_MOST_CHANNELS = 64  # of FFmpeg's decoders and resampler
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
        codec = codec_of(stream, "sound")
        rate: int = codec.sample_rate
        if not rate or not 0 < codec.channels <= _MOST_CHANNELS:
            raise RequestError(
                f"the sound has {codec.channels} channels of {rate} samples a second; it is to "
                f"have 1 to {_MOST_CHANNELS}, and some samples"
            )
        # Not planar: PyAV reads behind the pointers of 8 planes and more.
        floats = av.AudioResampler(format="flt")
        pieces: list[NDArray[np.float32]] = []
        left = int(max_seconds * rate)
        for frame in container.decode(stream):
            left -= frame.samples
            if left < 0 or frame.sample_rate != rate:
                raise RequestError(
                    f"the sound takes more than {max_seconds:g} s, or its rate changes; cut it"
                )
            pieces += map(_mean, floats.resample(frame))
        pieces += map(_mean, floats.resample(None))
        count = sum(map(len, pieces))
        if not count:
            raise RequestError("the sound has no samples")
        check_whole(data, container, stream, "sound", count / rate)
        return np.concatenate(pieces), rate


def _mean(frame: Any) -> NDArray[np.float32]:
    """Of the channels, which stand together for each sample."""
    samples = frame.to_ndarray().reshape(-1, frame.layout.nb_channels)
    mean: NDArray[np.float32] = samples.mean(axis=1)
    return mean


__all__ = ["decode_audio"]
