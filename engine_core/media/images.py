"""The work of a process that decodes a picture. It imports Pillow, and runs under limits."""

from __future__ import annotations

from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from engine_core.errors import RequestError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_decoder() -> None:
    """Load what decodes the formats, once for all pictures."""
    Image.init()
    # Sizes are checked before anything is decoded, by a limit of ours.
    Image.MAX_IMAGE_PIXELS = None


def decode_image(_: None, data: bytes, max_pixels: int) -> tuple[int, int, bytes]:
    """The height, width and RGB bytes of a picture.

    Raises:
        RequestError: it is none of the formats, damaged, animated or too large.
    """
    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise RequestError(
                f"the picture has {width} x {height} pixels, and {max_pixels} are taken at most; "
                "make it smaller"
            )
        if getattr(image, "n_frames", 1) > 1:
            raise RequestError(f"the picture is animated ({image.format}); send one frame of it")
        upright = ImageOps.exif_transpose(image)
        if upright.has_transparency_data:
            # On white, as transformers' processors see it.
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        upright = upright.convert("RGB")
    except UnidentifiedImageError:
        raise RequestError(f"the data is no picture in one of {', '.join(_FORMATS)}") from None
    except RequestError:
        raise
    except Exception as error:  # decoders raise all kinds of errors on damaged data
        raise RequestError(f"the picture is damaged: {type(error).__name__}: {error}") from None
    return upright.height, upright.width, upright.tobytes()
