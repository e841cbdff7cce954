"""Encoded videos as frames. What is decoded comes from strangers: call it in a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import RequestError
from engine_core.inputs import Video
from engine_core.media.containers import check_whole, codec_of, opened

# Of all frames that are taken together: 150 MB as RGB.
MAX_PIXELS = 50_000_000
MAX_FRAMES = 64
MAX_SECONDS = 3600.0
# Frames of a second that are taken, as transformers' processors do; and of a video at least.
_FPS, _FEWEST = 2.0, 4
_FORMATS = ("mp4", "mov", "matroska", "webm", "avi", "mpegts", "mpeg", "ogg", "flv")


def decode_video(data: bytes, max_pixels: int = MAX_PIXELS, max_frames: int = MAX_FRAMES) -> Video:
    """Frames of a video, evenly spread over it: two a second, within the limits.

    Raises:
        RequestError: it is none of the formats, damaged, too large or too long, or has no frames.
    """
    with opened(data, "video", _FORMATS) as container:
        if not container.streams.video:
            raise RequestError("the video has no frames: the file holds no stream of pictures")
        stream = container.streams.video[0]
        codec = codec_of(stream, "video")
        pixels = codec.width * codec.height
        if pixels * min(_FEWEST, max_frames) > max_pixels:
            raise RequestError(
                f"the video has frames of {codec.width} x {codec.height} pixels, of which "
                f"{max_pixels // max(1, pixels)} are within {max_pixels} pixels; make it smaller"
            )
        codec.options = {"max_pixels": str(max_pixels)}
        packets = [packet for packet in container.demux(stream) if packet.size]
        if not packets:
            raise RequestError("the video has no frames")
        times = [packet.pts for packet in packets]
        unit = float(stream.time_base or 0)
        # Else each follows the one before at the stream's rate. AVI knows the order of decoding.
        if None in times or not unit or container.format.name == "avi":
            times, unit = list(range(len(packets))), 1 / float(stream.average_rate or 25)
        shown = sorted(times)
        step = (shown[-1] - shown[0]) / max(1, len(shown) - 1)
        seconds = (shown[-1] - shown[0] + step) * unit or 1 / float(stream.average_rate or 25)
        if seconds > MAX_SECONDS:
            raise RequestError(
                f"the video takes {seconds:.0f} s, and {MAX_SECONDS:.0f} are taken at most; cut it"
            )
        check_whole(data, container, stream, "video", seconds)
        count = max(_FEWEST, round(seconds * _FPS))
        count = min(count, max_frames, len(packets), max_pixels // max(1, pixels))
        places = np.linspace(0, len(shown) - 1, count).round().astype(int)
        wanted = [shown[place] for place in places]
        frames = _Reader(codec, packets, times).frames(wanted)
        if len({frame.shape for frame in frames}) != 1:
            raise RequestError("the video has frames of several sizes, or none at all")
        return Video(np.stack(frames), fps=count / seconds)


class _Reader:
    """Decodes the packets of a stream, in their order, as far as they are needed.

    Args:
        codec: of the stream.
        packets: all of them.
        times: when each is shown; their numbers if nothing says it.
    """

    def __init__(self, codec: Any, packets: Sequence[Any], times: Sequence[int]) -> None:
        self._codec = codec
        self._packets = packets
        self._times = times
        self._counted = list(times) == list(range(len(times)))
        self._next = 0
        self._ready: deque[Any] = deque()
        self._last: tuple[int, Any] | None = None  # when it is shown, and the frame

    def frames(self, wanted: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The frame that is shown at each of the times, which ascend."""
        made = []
        for time in wanted:
            frame = self._at(time)
            if frame is not None:
                made.append(_upright(frame))
        return made

    def _at(self, time: int) -> Any:
        keys = [
            place
            for place in range(self._next, len(self._packets))
            if self._packets[place].is_keyframe and self._times[place] <= time
        ]
        if keys and keys[-1] > self._next and not self._counted:
            self._codec.flush_buffers()
            self._ready.clear()
            self._next = keys[-1]
        while self._last is None or self._last[0] < time:
            if not self._ready and not self._decode():
                break
            if self._ready:
                frame = self._ready.popleft()
                number = 0 if self._last is None else self._last[0] + 1
                self._last = (number if self._counted or frame.pts is None else frame.pts, frame)
        return None if self._last is None else self._last[1]

    def _decode(self) -> bool:
        """Decode one packet more; False if there is none."""
        if self._next > len(self._packets):
            return False
        packet = self._packets[self._next] if self._next < len(self._packets) else None
        self._ready += self._codec.decode(packet)
        self._next += 1
        return True


def _upright(frame: Any) -> NDArray[np.uint8]:
    """A frame ``[H, W, 3]`` as it is meant to be seen."""
    turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.rot90(frame.to_ndarray(format="rgb24"), turns)


__all__ = ["decode_video"]
