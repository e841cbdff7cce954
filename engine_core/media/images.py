"""Encoded pictures as arrays. What is decoded comes from strangers: call it in a worker."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import warnings
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.errors import RequestError
from engine_core.media.headers import HEAD, header_size

# A picture of 50 million pixels has 150 MB as RGB; decoders take a few times that.
MAX_PIXELS = 50_000_000
# As JPEG has it. A decoder takes a row at a time: 50 million rows of a pixel take it a minute.
MAX_SIDE = 65_535
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# A decoder goes over all of a JPEG for each of its scans, which may have some bytes.
_MOST_SCANS = 128
# A marker that has a length, or ends the picture. In what is compressed it begins the next part.
_MARKER = re.compile(rb"\xff+([\x02-\xcf\xd9-\xfe])")
_END, _SCAN = 0xD9, 0xDA
_SCHEME = "data:"
# What a browser overlooks in the base64 of a data URL.
_BREAKS = dict.fromkeys(map(ord, "\t\n\f\r "))


def load_decoders() -> None:
    """Load what decodes the formats, as far as it is installed, once for all that is decoded."""
    with contextlib.suppress(ImportError):
        import av  # noqa: F401
    with contextlib.suppress(ImportError):
        from PIL import Image

        Image.init()
        # Sizes are checked before anything is decoded, by a limit of ours.
        Image.MAX_IMAGE_PIXELS = None
        # A stranger's picture has a line of its own for each mistake in it.
        warnings.filterwarnings("ignore", module=r"PIL\.")


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """A picture ``[H, W, 3]``.

    Raises:
        RequestError: it is none of the formats, damaged, animated or too large.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise RequestError(
            "pictures need Pillow, which is not installed: pip install 'engine-core-llm[media]'"
        ) from None
    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise RequestError(
                f"the picture has {width} x {height} pixels, and {max_pixels} are taken at most; "
                "make it smaller"
            )
        if max(width, height) > MAX_SIDE:
            raise RequestError(
                f"the picture has {width} x {height} pixels, and a side may have {MAX_SIDE} at most"
            )
        # Its turn was given to it by its first size; Pillow takes the last.
        stated = header_size(data[:HEAD])
        if stated is not None and stated != (height, width):
            raise RequestError(
                f"the picture has two sizes: it begins as one of {stated[1]} x {stated[0]} pixels, "
                f"and goes on as one of {width} x {height}; save it again"
            )
        if image.format in ("JPEG", "MPO") and _has_many_scans(data):
            raise RequestError(
                f"the picture has too many scans, and {_MOST_SCANS} are taken at most; save it "
                "as a JPEG that is not progressive"
            )
        # Beside a photograph a camera's file may have a preview, or what another lens saw.
        if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
            raise RequestError(f"the picture is animated ({image.format}); send one frame of it")
        return np.asarray(_opaque(image))
    except UnidentifiedImageError:
        raise RequestError(f"the data is no picture in one of {', '.join(_FORMATS)}") from None
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # decoders raise all kinds of errors on damaged data
        raise RequestError(f"the picture is damaged: {type(error).__name__}: {error}") from None


def _has_many_scans(data: bytes) -> bool:
    """Whether the first picture of a JPEG's file has more scans than are taken.

    Previews within it, and a video behind it as telephones have, have these two bytes too.
    """
    at, scans = 2, 0
    while scans <= _MOST_SCANS and (found := _MARKER.search(data, at)) is not None:
        marker, at = found[1][0], found.end()
        if marker == _END:
            return False
        scans += marker == _SCAN
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
    return scans > _MOST_SCANS


def _opaque(image: Any) -> Any:
    """A PIL image upright, in RGB, and on white, as transformers' processors see it."""
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        # Grey in 16 bits, of which Pillow's own conversion would make 255 of all above that.
        upright = Image.fromarray((np.asarray(upright) >> 8).clip(0, 255).astype(np.uint8))
    if upright.has_transparency_data:
        white = Image.new("RGBA", upright.size, "white")
        upright = Image.alpha_composite(white, upright.convert("RGBA"))
    return upright.convert("RGB")


def data_of(url: str, kind: str) -> bytes:
    """The content of a data URL of a ``kind``.

    Raises:
        RequestError: it is none.
    """
    head, comma, content = url.partition(",")
    head = head[:256].lower()
    if not head.startswith(_SCHEME):
        scheme = head.split(":", 1)[0][:20] if ":" in head[:20] else "text"
        raise RequestError(
            f"what is shown is taken as data URLs (data:{kind}/TYPE;base64,...); this is "
            f"{scheme!r}, and addresses and files are not fetched"
        )
    type_, *attributes = head[len(_SCHEME) :].split(";")
    if not comma or not type_.startswith(f"{kind}/") or "base64" not in attributes:
        raise RequestError(
            f"the data URL is to begin with data:{kind}/TYPE;base64, and begins with {head[:60]!r}"
        )
    try:
        # Lines of 76 characters, as e-mail has them, and ``base64`` writes.
        return base64.b64decode(content.translate(_BREAKS), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"its base64 is wrong: {error}") from None
