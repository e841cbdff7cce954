"""From pictures to patches, as transformers' image processor of this family makes them.

That one is not used: to import it takes seconds and brings torch, and it knows no videos without
torchvision. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import RequestError

_MOST_ELONGATED = 200


@dataclass(frozen=True, slots=True)
class Patches:
    """A picture or video cut to pieces.

    Attributes:
        values: ``[N, channels * temporal_patch_size * patch_size**2]``, float32 that is normalised
            or uint8 that the model normalises; the latter of a picture has each patch's one frame.
            Patches that are merged to one embedding stand together.
        grid: patches in time, height and width, whose product is N.
    """

    values: NDArray[Any]
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Patcher:
    """Resizes and cuts.

    Attributes:
        patch_size: height and width of a patch in pixels.
        temporal_patch_size: its frames.
        merge_size: height and width, in patches, of what becomes one embedding.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int

    @classmethod
    def from_config(cls, vision: Mapping[str, Any]) -> Patcher:
        """The patcher of a config as the builder leaves it."""
        return cls(
            vision["patch_size"], vision["temporal_patch_size"], vision["spatial_merge_size"]
        )

    @property
    def width(self) -> int:
        """Numbers of a patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def size(self, height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """The height and width that a picture is resized to: whole embeddings, about its shape.

        Raises:
            RequestError: one side is more than 200 times the other.
        """
        if max(height, width) > _MOST_ELONGATED * min(height, width):
            raise RequestError(
                f"a picture of {width} x {height} pixels is too long: one side may be "
                f"{_MOST_ELONGATED} times the other at most"
            )
        factor = self.patch_size * self.merge_size
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > max_pixels:
            scale = math.sqrt(height * width / max_pixels)
            high = max(factor, math.floor(height / scale / factor) * factor)
            wide = max(factor, math.floor(width / scale / factor) * factor)
        elif high * wide < min_pixels:
            scale = math.sqrt(min_pixels / (height * width))
            high = math.ceil(height * scale / factor) * factor
            wide = math.ceil(width * scale / factor) * factor
        return high, wide

    def patches(
        self, frames: Sequence[NDArray[np.uint8]], min_pixels: int, max_pixels: int
    ) -> Patches:
        """``frames`` ``[H, W, 3]`` of one size, one for a picture, as patches of uint8.

        The last frame of several is repeated until they fill the last patches.
        """
        high, wide = self.size(frames[0].shape[0], frames[0].shape[1], min_pixels, max_pixels)
        resized = [_resize(frame, high, wide) for frame in frames]
        depth = 1 if len(resized) == 1 else self.temporal_patch_size
        resized += resized[-1:] * (-len(resized) % depth)
        patch, merge = self.patch_size, self.merge_size
        grid = (len(resized) // depth, high // patch, wide // patch)
        cut = np.stack(resized).reshape(
            grid[0], depth,
            grid[1] // merge, merge, patch,
            grid[2] // merge, merge, patch,
            3,
        )  # fmt: skip
        cut = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return Patches(cut.reshape(math.prod(grid), -1), grid)


def _resize(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if frame.shape[:2] == (height, width):
        return frame
    from PIL import Image

    image = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def to_pixels(image: Any) -> NDArray[np.uint8]:
    """A PIL image or an array as ``[H, W, 3]`` uint8.

    Raises:
        RequestError: it is neither.
    """
    if hasattr(image, "convert"):
        try:
            image = _opaque(image)
        except (OSError, SyntaxError, ValueError) as error:  # It reads a file, or it is closed.
            raise RequestError(f"an image cannot be read: {error}") from None
    try:
        pixels = np.asarray(image)
    except ValueError:  # of unequal parts
        pixels = np.asarray(None)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise RequestError(
            "an image must be a PIL image or an array [height, width, 3] of uint8, got "
            f"{type(image).__name__} of {pixels.dtype} {list(pixels.shape)}"
        )
    return pixels


def to_frames(video: Any) -> list[NDArray[np.uint8]]:
    """A list of images or an array ``[F, H, W, 3]`` as frames of one size.

    Raises:
        RequestError: it is neither, or has no frames.
    """
    if not isinstance(video, list | tuple) and np.ndim(video) != 4:
        raise RequestError(
            "a video must be a list of images or an array [frames, height, width, 3] of uint8, got "
            f"{type(video).__name__}"
        )
    frames = [to_pixels(frame) for frame in video]
    if len({frame.shape for frame in frames}) != 1:
        sizes = sorted({f"{frame.shape[1]} x {frame.shape[0]}" for frame in frames})
        raise RequestError(
            f"a video needs one or more frames of one size, got {len(frames)} of the sizes "
            f"{', '.join(sizes) or 'none'}"
        )
    return frames


def _opaque(image: Any) -> Any:
    """A PIL image in RGB; through what is transparent shows white, as with transformers."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        from PIL import Image

        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
