"""From pictures to tiles, as the original code makes them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import RequestError

Pixels = NDArray[np.uint8]


@lru_cache(maxsize=16)
def _grids(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Columns and rows of all grids of so many tiles, those of few tiles first."""
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
        if columns * rows >= fewest
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


@dataclass(frozen=True, slots=True)
class Tiler:
    """Resizes pictures and cuts them to square tiles.

    Attributes:
        size: height and width of a tile in pixels.
    """

    size: int

    def grid(self, height: int, width: int, fewest: int, most: int) -> tuple[int, int]:
        """Columns and rows of tiles, in the shape that is nearest to the picture's.

        Of grids that are equally near, a larger one is taken if the picture has more than half of
        its pixels.
        """
        best, least = (1, 1), float("inf")
        for columns, rows in _grids(fewest, most):
            apart = abs(width / height - columns / rows)
            enough = height * width > 0.5 * self.size**2 * columns * rows
            if apart < least or (apart == least and enough):
                best, least = (columns, rows), apart
        return best

    def tile(self, pixels: Pixels) -> Pixels:
        """A picture ``[H, W, 3]`` as one tile ``[S, S, 3]``."""
        return _resized(pixels, self.size, self.size)

    def tiles(self, pixels: Pixels, fewest: int, most: int, *, thumbnail: bool) -> Pixels:
        """A picture ``[H, W, 3]`` as tiles ``[n, S, S, 3]``, row by row.

        If they are several and ``thumbnail`` is true, the whole picture is one more at the end.
        """
        size = self.size
        columns, rows = self.grid(pixels.shape[0], pixels.shape[1], fewest, most)
        whole = _resized(pixels, rows * size, columns * size)
        cut = whole.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
        if thumbnail and len(cut) > 1:
            return np.concatenate([cut, self.tile(pixels)[None]])
        return np.ascontiguousarray(cut)


def _resized(pixels: Pixels, height: int, width: int) -> Pixels:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    # A copy: PIL's own memory cannot be written to, which torch wants of arrays.
    return np.array(image.resize((width, height), Image.Resampling.BICUBIC))


def to_pixels(image: Any) -> Pixels:
    """A PIL image or an array as ``[H, W, 3]`` uint8; through what is transparent shows white.

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


def to_frames(video: Any) -> list[Pixels]:
    """A list of images or an array ``[F, H, W, 3]`` as frames.

    Raises:
        RequestError: it is neither, or has no frames.
    """
    if not isinstance(video, list | tuple) and np.ndim(video) != 4:
        raise RequestError(
            "a video must be a list of images or an array [frames, height, width, 3] of uint8, got "
            f"{type(video).__name__}"
        )
    frames = [to_pixels(frame) for frame in video]
    if not frames:
        raise RequestError("a video needs one or more frames, got none")
    return frames


def _opaque(image: Any) -> Any:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        from PIL import Image

        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
