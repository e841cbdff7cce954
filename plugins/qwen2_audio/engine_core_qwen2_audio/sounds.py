"""From sounds to log-mel features, as transformers' extractor of Whisper makes them.

That one is not used: to import it takes seconds and brings torch. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from engine_core.errors import RequestError

_HIGHEST = 8000.0  # Hertz; of the mel bins.
_RATES = (1000, 384_000)
# What is resampled may be a little louder, and is then in float32.
_LOUDEST = 2.0**127

# Of the low-pass filter that resamples: half its length, in zero crossings of the sinc; where it
# cuts, of the lower of the two rates' halves; and the shape of its window (Kaiser and Schafer,
# 1980). What is above that half is 90 dB lower.
_CROSSINGS = 64
_CUT = 0.955
_BETA = 0.1102 * (90 - 8.7)
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class MelExtractor:
    """Log-mel features of sounds.

    Attributes:
        rate: samples a second.
        hop: samples from a frame to the next.
        window: samples of a frame.
        most: samples of the longest sound.
        filters: ``[1 + window / 2, bins]``: what each frequency adds to each bin.
    """

    rate: int
    hop: int
    window: int
    most: int
    filters: NDArray[np.float64]

    @classmethod
    def from_config(cls, audio: Mapping[str, Any], extractor: Mapping[str, Any]) -> MelExtractor:
        """The extractor of a config as the builder leaves it."""
        rate, window = extractor["sampling_rate"], extractor["n_fft"]
        return cls(
            rate,
            extractor["hop_length"],
            window,
            extractor["chunk_length"] * rate,
            mel_filters(1 + window // 2, audio["num_mel_bins"], rate),
        )

    @property
    def frames(self) -> int:
        """Frames of the longest sound."""
        return self.most // self.hop

    def samples(self, sound: Any, *, cut: bool = False) -> NDArray[np.float32]:
        """A sound ``(array [n], rate)`` as samples from -1 to 1 at the model's rate.

        Args:
            sound: an array and its rate.
            cut: whether only the beginning is wanted of one that is longer than the model takes.

        Raises:
            RequestError: it is none, or longer than the model takes.
        """
        if not isinstance(sound, tuple | list) or len(sound) != 2:
            raise RequestError(
                f"a sound is an array and its rate, (array, rate), got {type(sound).__name__}"
            )
        samples, rate = np.asarray(sound[0]), sound[1]
        if not isinstance(rate, int | float | np.number) or not _RATES[0] <= rate <= _RATES[1]:
            raise RequestError(
                f"the rate of a sound is a number of samples a second from {_RATES[0]} to "
                f"{_RATES[1]}, got {rate!r}"
            )
        if rate != int(rate):
            raise RequestError(f"the rate of a sound is a whole number, got {rate!r}")
        if samples.ndim != 1 or not samples.size or samples.dtype.kind not in "fi":
            raise RequestError(
                "the samples of a sound are floats from -1 to 1, or signed integers, of one "
                f"channel, [n]; got {samples.dtype} {list(samples.shape)}"
            )
        seconds, longest = len(samples) / rate, self.most / self.rate
        if seconds > longest and not cut:
            raise RequestError(
                f"it is {seconds:.2f} s long, and a sound may be {longest:g} s at most: cut it "
                "into several, or have its end left out (mm_processor_kwargs: truncation)"
            )
        samples = samples[: math.ceil((longest + 1) * rate)]  # more than what is kept depends on
        scale = -float(np.iinfo(samples.dtype).min) if samples.dtype.kind == "i" else 1.0
        samples = samples.astype(np.float64) / scale
        if not (np.abs(samples) <= _LOUDEST).all():  # nor if one is no number
            raise RequestError(
                "its samples are not all finite, or some are far beyond those from -1 to 1: "
                f"{_LOUDEST:g} is the most"
            )
        resampled = resample(samples, int(rate), self.rate)
        return resampled[: self.most].astype(np.float32)

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """``[n]`` to ``[bins, frames]`` of the sound, and what the encoder sees behind its end.

        The original pads every sound with silence to the longest, and leaves out afterwards what
        the encoder makes of silence. Here its frames end where they no longer reach what is kept.
        """
        frames = -(-len(samples) // self.hop)
        half = self.window // 2
        # Two more have a part in the sound, and in the maximum below.
        wanted = min(frames + 2, self.frames)
        padded = np.zeros(self.most, np.float64)
        padded[: len(samples)] = samples
        padded = np.pad(padded, half, mode="reflect")
        cut = sliding_window_view(padded, self.window)[:: self.hop][:wanted]
        # A periodic window of Hann.
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.window) / self.window)
        power = np.abs(np.fft.rfft(cut * window)) ** 2
        mels = np.log10(np.maximum(power @ self.filters, 1e-10))
        mels = (np.maximum(mels, mels.max() - 8.0) + 4.0) / 4.0
        return self.trimmed(mels.T.astype(np.float32), frames)

    def trimmed(self, mels: NDArray[np.float32], frames: int) -> NDArray[np.float32]:
        """The part of ``[bins, n]`` that the encoder needs of a sound of so many frames.

        It makes a position of two frames and their neighbours; of an odd number the last position
        is the silence's too.

        Raises:
            RequestError: the sound is too short for one embedding, which is of two positions.
        """
        positions = (frames + 1) // 2
        if positions < 2:
            seconds = 2 * self.hop / self.rate
            raise RequestError(f"it is too short: a sound must be longer than {seconds:g} s")
        return np.ascontiguousarray(mels[:, : min(2 * positions + 1, self.frames)])


def num_embeddings(features: NDArray[np.float32]) -> int:
    """How many embeddings the encoder makes of features ``[bins, frames]``."""
    return int(features.shape[1]) // 4


def mel_filters(frequencies: int, bins: int, rate: int) -> NDArray[np.float64]:
    """Triangles of equal area ``[frequencies, bins]``, evenly spaced on Slaney's scale of mels.

    That is linear up to 1,000 Hz, which are 15 mels, and logarithmic above: 27 mels for a factor of
    6.4 (Slaney, 1998).
    """
    step = math.log(6.4) / 27
    mels = np.linspace(0.0, 15 + math.log(_HIGHEST / 1000) / step, bins + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    at = np.linspace(0.0, rate // 2, frequencies)[:, None]
    low, peak, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (at - low) / (peak - low), (high - at) / (high - peak)
    filters: NDArray[np.float64] = np.maximum(0, np.minimum(rising, falling)) * (2 / (high - low))
    return filters


def resample(samples: NDArray[np.float64], rate: int, wanted: int) -> NDArray[np.float64]:
    """``[n]`` samples at ``rate`` as ``[ceil(n * wanted / rate)]`` at the rate ``wanted``.

    Each is a sum of the samples around it, weighted by a sinc under a window of Kaiser's.
    """
    if rate == wanted:
        return samples
    up, down = (number // math.gcd(rate, wanted) for number in (wanted, rate))
    count = -(-len(samples) * up // down)
    cut = _CUT * min(1.0, up / down)
    reach = math.ceil(_CROSSINGS / cut)
    windows = sliding_window_view(np.pad(samples, (reach, reach + down)), 2 * reach)
    out = np.empty(count)
    grid = np.linspace(0.0, 1.0, 4097)
    window = np.i0(_BETA * np.sqrt(1 - grid**2)) / np.i0(_BETA)
    # Every up-th sample lies between its neighbours as this one does.
    for first in range(min(up, count)):
        place, between = divmod(first * down, up)
        # Windows begin one sample behind `reach` before the place.
        distance = np.arange(1 - reach, 1 + reach) - between / up
        weights = cut * np.sinc(cut * distance) * np.interp(abs(distance) / reach, grid, window)
        numbers = np.arange(first, count, up)
        for start in range(0, len(numbers), _BLOCK):
            block = numbers[start : start + _BLOCK]
            begin = 1 + place + start * down
            out[block] = windows[begin::down][: len(block)] @ weights
    return out
