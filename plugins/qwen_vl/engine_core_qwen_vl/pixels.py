"""From pictures to pixels, as the original code makes them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import RequestError


def image_pixels(image: Any, size: int) -> NDArray[np.uint8]:
    """A PIL image or an array ``[H, W, 3]`` of uint8 as ``[size, size, 3]``.

    Raises:
        RequestError: it is neither.
    """
    from PIL import Image

    if not hasattr(image, "convert"):
        try:
            pixels = np.asarray(image)
        except ValueError:  # of unequal parts
            pixels = np.asarray(None)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
            raise RequestError(
                "an image must be a PIL image or an array [height, width, 3] of uint8, got "
                f"{type(image).__name__} of {pixels.dtype} {list(pixels.shape)}"
            )
        image = Image.fromarray(pixels)
    try:
        image = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    except (OSError, SyntaxError, ValueError) as error:  # It reads a file, or it is closed.
        raise RequestError(f"an image cannot be read: {error}") from None
    # A copy: PIL's own memory cannot be written to, which torch wants of arrays.
    return np.array(image)


def given_pixels(features: Mapping[str, Any], size: int) -> NDArray[np.float32]:
    """Pixels that are made and normalised already, as ``[3, size, size]``.

    Raises:
        RequestError: they are none.
    """
    if set(features) != {"pixel_values"}:
        raise RequestError(f"features of an image are pixel_values, got {', '.join(features)}")
    try:
        pixels = np.ascontiguousarray(features["pixel_values"], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise RequestError(f"pixel_values must be an array: {error}") from None
    if pixels.shape not in ((3, size, size), (1, 3, size, size)):
        raise RequestError(f"pixel_values must be [3, {size}, {size}], got {list(pixels.shape)}")
    if not np.isfinite(pixels).all():
        raise RequestError("pixel_values has values that are not finite")
    return pixels.reshape(3, size, size)
