"""Images and videos of a prompt, as tiles in the places of their tokens. Imports no torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.errors import RequestError, shown
from engine_core.inputs import (
    MediaItem,
    MediaLimit,
    ProcessedPrompt,
    PromptState,
    check_media_kinds,
    find_placeholders,
    media_digest,
    once_each,
    packed_token_ids,
)
from engine_core.registry import text_processor

# numpy and what needs it are imported where they are used: every command imports this module.
if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine_core.configs import ModelConfig
    from engine_core_internvl.pixels import Tiler

_MOST_TILES = 64
MOST_FRAMES = 256


def frame_label(number: int) -> str:
    """The text before frame ``number`` of a video, counted from 1."""
    return f"Frame{number}: " if number == 1 else f"\nFrame{number}: "


@dataclass(frozen=True, slots=True)
class _Change:
    """Tokens in the place of a placeholder, ``[start, end)`` of the prompt.

    The item's embeddings are for those from ``offset`` on.
    """

    start: int
    end: int
    tokens: NDArray[Any]
    offset: int
    item: MediaItem


class InternVLProcessor:
    """Puts images and videos in the place of their tokens.

    What the text model's family does with prompts, it does with these too.
    """

    media_kinds: ClassVar[tuple[str, ...]] = ("image", "video")
    reuses_items: ClassVar[bool] = True

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether the model is of this family."""
        return model_config.architecture in (
            "InternVLChatModel",
            "InternVLForConditionalGeneration",
        )

    def __init__(self, model_config: ModelConfig) -> None:
        config = model_config.hf_config
        self._context: int = config.image_token_id
        self._ends = (config.image_start_token_id, config.image_end_token_id)
        self._video: int | None = config.video_token_id
        self._settings: Mapping[str, Any] = config.tiles
        self._tile_size: int = config.tile_size
        side = self._tile_size // config.vision_config["patch_size"] // config.merge_size
        self._per_tile = side**2
        self._labels = model_config.texts
        self._activations = _activations(config.vision_config, config.merge_size, self._per_tile)
        self._text = text_processor(model_config)
        # None if the text model's family does not say.
        self.prompt_state: PromptState | None = (
            PromptState() if self._text is None else getattr(self._text, "prompt_state", None)
        )

    def media_limits(self, options: Mapping[str, Any]) -> dict[str, MediaLimit]:
        """The most tiles of an image, and what the tower takes for an embedding of them."""
        stated = {**self._settings, **options}
        most = stated["max_dynamic_patch"] if stated["dynamic_image_size"] else 1
        largest = f"{most} tile{'s' * (most > 1)} of {self._tile_size} x {self._tile_size} pixels"
        if most > 1 and stated["use_thumbnail"]:
            most, largest = most + 1, f"{largest} and one of the whole"
        frames, modules = f"{MOST_FRAMES} frames, a tile each", ("vision_model", "mlp1")
        return {
            "image": MediaLimit(most * self._per_tile, largest, self._activations, modules),
            "video": MediaLimit(None, frames, self._activations, modules),
        }

    def picture_outline(self, height: int, width: int, options: Mapping[str, Any]) -> MediaItem:
        """An item as a picture of that size becomes, without its tiles.

        Raises:
            RequestError: an option is none.
        """
        from engine_core_internvl.pixels import Tiler

        settings = self._checked(options)
        tiles = 1
        if settings["dynamic_image_size"]:
            fewest, most = settings["min_dynamic_patch"], settings["max_dynamic_patch"]
            tiles = math.prod(Tiler(self._tile_size).grid(height, width, fewest, most))
            tiles += tiles > 1 and settings["use_thumbnail"]
        return MediaItem("image", b"", (0, tiles * self._per_tile))

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """A prompt of text.

        Raises:
            RequestError: it has a placeholder of an image or a video.
        """
        return self.process_media(token_ids, {}, {})

    def process_media(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[Any]],
        options: Mapping[str, Any],
    ) -> ProcessedPrompt:
        """The prompt with its images and videos, and as many placeholders as they have embeddings.

        Args:
            token_ids: has for each image one ``<IMG_CONTEXT>``, or as many as it has embeddings;
                around one alone ``<img>`` and ``</img>`` are added. It has for each video
                ``<img></img>``, or the token ``<video>`` where there is one.
            media: by "image" and "video", in the order of their placeholders. Each may be an item
                that was made before, with the same options. An image is else a PIL image, a uint8
                array ``[H, W, 3]`` or ``{"pixel_values": tiles [n, 3, S, S]}``; a video is a list
                of images or an array ``[F, H, W, 3]``, of which each frame becomes one tile.
            options: how images are cut: ``dynamic_image_size``, ``use_thumbnail``,
                ``min_dynamic_patch`` and ``max_dynamic_patch``, as a checkpoint's config has them.

        Raises:
            RequestError: placeholders and items do not agree, or an item or option is none.
        """
        import numpy as np

        check_media_kinds(media, self.media_kinds)
        settings = self._checked(options)
        ids: NDArray[np.int64] = np.frombuffer(packed_token_ids(token_ids), np.int64)
        items = {
            kind: once_each(media.get(kind, ()), partial(self._item, kind, options, settings))
            for kind in self.media_kinds
        }
        changes = [*self._images(ids, items["image"]), *self._videos(ids, items["video"])]
        changes.sort(key=lambda change: change.start)
        pieces, found, length, at = [], [], 0, 0
        for change in changes:
            pieces += [ids[at : change.start], change.tokens]
            begin = length + change.start - at + change.offset
            found.append(replace(change.item, span=(begin, begin + change.item.num_embeddings)))
            length += change.start - at + len(change.tokens)
            at = change.end
        ids = np.concatenate([*pieces, ids[at:]]) if changes else ids
        packed = array("q", ids.tobytes())
        prompt = ProcessedPrompt(packed) if self._text is None else self._text.process(packed)
        return replace(prompt, media=tuple(found))

    def _images(self, ids: NDArray[Any], items: Sequence[MediaItem]) -> list[_Change]:
        """Each image with its placeholders."""
        import numpy as np

        counts = [item.num_embeddings for item in items]
        places = find_placeholders(ids, self._context, "image", counts)
        changes = []
        for (start, number), item in zip(places, items, strict=True):
            end = start + number
            tokens, offset = np.full(item.num_embeddings, self._context), 0
            if number == 1 and (start == 0 or ids[start - 1] != self._ends[0]):
                tokens, offset = np.array([*self._begin(), *tokens, *self._ends[1:]]), 1
            changes.append(_Change(start, end, tokens, offset, item))
        return changes

    def _videos(self, ids: NDArray[Any], items: Sequence[MediaItem]) -> list[_Change]:
        """Each video with its placeholder: an image's two ends, or a token of its own."""
        import numpy as np

        begin, end = self._ends
        places = [(place, 1) for place in np.flatnonzero(ids == self._video).tolist()]
        if begin is not None:
            pairs = np.flatnonzero((ids[:-1] == begin) & (ids[1:] == end)).tolist()
            places += [(place, 2) for place in pairs]
        if len(places) != len(items):
            raise RequestError(
                f"the prompt has video placeholders (<img></img>) in {len(places)} places, for a "
                f"number of videos of {len(items)}",
                param="multi_modal_data",
            )
        changes = []
        for (start, size), item in zip(sorted(places), items, strict=True):
            # Where a checkpoint has a token for videos, its processor writes all labels.
            first = self._label(1) if size == 1 else ()
            tokens = np.array([*first, *item.features["token_ids"]], np.int64)
            changes.append(_Change(start, start + size, tokens, len(first), item))
        return changes

    def _item(
        self,
        kind: str,
        options: Mapping[str, Any],
        settings: Mapping[str, Any],
        index: int,
        item: Any,
    ) -> MediaItem:
        """An item as the caller gave it, as it would be in a prompt of its own."""
        import numpy as np

        from engine_core_internvl.pixels import Tiler, to_frames, to_pixels

        if isinstance(item, MediaItem):
            return item
        tiler = Tiler(self._tile_size)
        try:
            if isinstance(item, Mapping):
                if options:
                    raise RequestError(
                        f"{' and '.join(options)} have no effect on features that are made already"
                    )
                tiles = self._given_tiles(item)
                if kind == "video":
                    return self._video_item(tiles)
            elif kind == "video":
                frames = to_frames(item)
                return self._video_item(np.stack([tiler.tile(frame) for frame in frames]))
            else:
                tiles = self._tiles(tiler, to_pixels(item), settings)
        except RequestError as error:
            param = f"multi_modal_data.{kind}.{index}"
            raise RequestError(f"{kind} {index}: {error}", param=param) from None
        span = (0, len(tiles) * self._per_tile)
        return MediaItem(kind, media_digest(kind, tiles), span, {"pixel_values": tiles})

    def _tiles(
        self, tiler: Tiler, pixels: NDArray[Any], settings: Mapping[str, Any]
    ) -> NDArray[Any]:
        if not settings["dynamic_image_size"]:
            return tiler.tile(pixels)[None]
        return tiler.tiles(
            pixels,
            settings["min_dynamic_patch"],
            settings["max_dynamic_patch"],
            thumbnail=settings["use_thumbnail"],
        )

    def _video_item(self, tiles: NDArray[Any]) -> MediaItem:
        """A video, whose span begins with the start of its first frame's embeddings.

        Between frames the span has the labels' tokens, whose embeddings the model gives too.
        """
        import numpy as np

        if len(tiles) > MOST_FRAMES:
            raise RequestError(f"it has {len(tiles)} frames, and {MOST_FRAMES} are taken at most")
        tokens: list[int] = []
        starts = []
        for number in range(1, len(tiles) + 1):
            tokens += [*(self._label(number) if number > 1 else ()), *self._begin()]
            starts.append(len(tokens))
            tokens += [*[self._context] * self._per_tile, *self._ends[1:]]
        features = {
            "pixel_values": tiles,
            "token_ids": np.array(tokens, np.int64),
            "places": np.add.outer(starts, np.arange(self._per_tile)).reshape(-1),
        }
        digest = media_digest("video", tiles, features["token_ids"])
        return MediaItem("video", digest, (0, len(tokens)), features)

    def _begin(self) -> tuple[int]:
        begin, end = self._ends
        if begin is None or end is None:
            raise RequestError(
                "the checkpoint's tokenizer files have no <img> and </img> to put around images; "
                "write as many placeholders as there are embeddings, and all else around them"
            )
        return (begin,)

    def _label(self, number: int) -> Sequence[int]:
        text = frame_label(number)
        if not self._labels.get(text):
            raise RequestError(
                f"the text before a frame ({text.strip()!r}) needs the tokenizer, and this engine "
                "has none (skip_tokenizer_init); give frames as images, with text between them"
            )
        return self._labels[text]

    def _checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All settings, with the options in place of the checkpoint's."""
        settings = {**self._settings, **options}
        for key, value in options.items():
            if key not in self._settings:
                wrong = f"{shown(key)} is not one of {', '.join(self._settings)}"
            elif key.endswith("_patch"):
                if type(value) is int and 0 < value <= _MOST_TILES:
                    continue
                wrong = f"{key} must be an integer from 1 to {_MOST_TILES}, got {shown(value)}"
            elif isinstance(value, bool):
                continue
            else:
                wrong = f"{key} must be true or false, got {shown(value)}"
            raise RequestError(f"mm_processor_kwargs: {wrong}", param="mm_processor_kwargs")
        fewest, most = settings["min_dynamic_patch"], settings["max_dynamic_patch"]
        if fewest > most:
            raise RequestError(
                f"mm_processor_kwargs: min_dynamic_patch ({fewest}) is more than "
                f"max_dynamic_patch ({most})",
                param="mm_processor_kwargs",
            )
        return settings

    def _given_tiles(self, features: Mapping[str, Any]) -> NDArray[Any]:
        import numpy as np

        if set(features) != {"pixel_values"}:
            raise RequestError(f"features are pixel_values, got {', '.join(map(str, features))}")
        try:
            tiles = np.ascontiguousarray(features["pixel_values"], dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise RequestError(f"pixel_values must be an array: {error}") from None
        size = self._tile_size
        if tiles.ndim != 4 or not len(tiles) or tiles.shape[1:] != (3, size, size):
            raise RequestError(
                f"pixel_values must be tiles [n, 3, {size}, {size}], got {list(tiles.shape)}"
            )
        if not np.isfinite(tiles).all():
            raise RequestError("pixel_values has values that are not finite")
        return tiles


def _activations(vision: Mapping[str, Any], merge: int, per_tile: int) -> int:
    """Numbers that the tower holds at once for an embedding, at most; see ``model.py``.

    Of each patch, and of a tile's class token, the larger of attention (residual, normed, queries,
    keys and values, those normed where they are, and the output) and the feed-forward part; and
    pixels in float32, as they come and cut.
    """
    width: int = vision["hidden_size"]
    inner: int = vision["intermediate_size"]
    pixels: int = 3 * vision["patch_size"] ** 2
    tokens = merge**2 + 1 / per_tile
    attention = (10 if vision["qk_normalization"] else 8) * width
    return math.ceil(tokens * (max(attention, 3 * width + 2 * inner) + 8 * pixels))
