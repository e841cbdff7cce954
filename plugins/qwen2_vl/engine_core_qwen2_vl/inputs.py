"""Images and videos of a prompt, and the three positions of its tokens. Imports no torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.errors import RequestError, shown
from engine_core.inputs import (
    MediaItem,
    MediaLimit,
    ProcessedPrompt,
    PromptState,
    check_media_kinds,
    expand_placeholders,
    find_placeholders,
    media_digest,
    once_each,
    packed_token_ids,
)

# numpy and what needs it are imported where they are used: every command imports this module.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine_core.configs import ModelConfig
    from engine_core_qwen2_vl.pixels import Patches

# What transformers' processor calls the patches and the grid of each kind.
_FEATURES = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_LIMITS = ("min_pixels", "max_pixels")
_MOST_PIXELS = 50_000_000  # what a picture may be resized to takes memory
_FPS = 2.0  # transformers' processor takes this where nobody says another number.
# Between two pairs of frames: a day. Positions of much more are no integers.
_MOST_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class _Site:
    """An item and its placeholders in the prompt: one, or ``count``, from ``start`` on.

    ``item`` has the span that it would have in a prompt of its own.
    """

    start: int
    given: int
    item: MediaItem

    @property
    def grid(self) -> tuple[int, int, int]:
        """Its patches in time, height and width."""
        frames, high, wide = map(int, self.item.features["grid_thw"])
        return frames, high, wide

    @property
    def interval(self) -> float:
        """How far its patches are from each other in time, in positions."""
        return float(self.item.features.get("interval", 1.0))


class Qwen2VLProcessor:
    """Puts images and videos in the place of their tokens.

    The model's token state is ``mrope_positions`` ``[3, prompt length]``: positions in time, height
    and width. A token of text has three equal ones, which go on after the largest before it. The
    row state ``mrope_delta`` is what a later token's position is ahead of its index.
    """

    media_kinds: ClassVar[tuple[str, ...]] = ("image", "video")
    reuses_items: ClassVar[bool] = True
    prompt_state: ClassVar[PromptState] = PromptState(
        row_state={"mrope_delta": ("int64", ())}, token_state={"mrope_positions": 3}
    )

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether the model is of this family."""
        return model_config.architecture in (
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
        )

    def __init__(self, model_config: ModelConfig) -> None:
        from engine_core_qwen2_vl.pixels import Patcher

        config = model_config.hf_config
        self._tokens = {"image": config.image_token_id, "video": config.video_token_id}
        self._settings: Mapping[str, Mapping[str, Any]] = config.preprocessor
        self._patcher = Patcher.from_config(config.vision_config)
        self._merge: int = config.vision_config["spatial_merge_size"]
        self._activations = _activations(config.vision_config)
        # None where time goes on by one with each pair of frames.
        self._per_second: float | None = config.vision_config.get("tokens_per_second")

    def media_limits(self, options: Mapping[str, Any]) -> dict[str, MediaLimit]:
        """The largest image, and what the tower takes for an embedding of it."""
        factor = self._patcher.patch_size * self._merge
        pixels = {
            kind: options.get("max_pixels", settings["max_pixels"])
            for kind, settings in self._settings.items()
        }
        images = pixels["image"] // factor**2
        return {
            "image": MediaLimit(
                images, f"{pixels['image']} pixels", self._activations, ("visual",)
            ),
            "video": MediaLimit(
                None, f"{pixels['video']} pixels a frame", self._activations, ("visual",)
            ),
        }

    def picture_outline(self, height: int, width: int, options: Mapping[str, Any]) -> MediaItem:
        """An item as a picture of that size becomes, without its pixels.

        Raises:
            RequestError: it is too long, or an option is none.
        """
        import numpy as np

        limits, _ = self._limits("image", self._checked(options))
        high, wide = self._patcher.size(height, width, **limits)
        grid = (1, high // self._patcher.patch_size, wide // self._patcher.patch_size)
        span = (0, math.prod(grid) // self._merge**2)
        return MediaItem("image", b"", span, {"grid_thw": np.array(grid, np.int64)})

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
            token_ids: has for each item one placeholder, or as many as the item has embeddings.
            media: by "image" and "video", in the order of their placeholders. Each may be an item
                that was made before, with the same options. An image is else a PIL image, a uint8
                array ``[H, W, 3]``, or the features that transformers' processor makes of one:
                ``pixel_values`` and ``image_grid_thw``. A video is a list of images, an array
                ``[F, H, W, 3]``, a :class:`Video`, or ``pixel_values_videos`` and
                ``video_grid_thw``; none of its frames is left out.
            options: ``min_pixels`` and ``max_pixels`` of an image or a frame, after resizing; and
                where time is in seconds ``fps``, the frames of the videos in a second, else what a
                video says, else 2.

        Raises:
            RequestError: placeholders and items do not agree, or an item or option is none.
        """
        import numpy as np

        check_media_kinds(media, self.media_kinds)
        checked = self._checked(options)
        ids: NDArray[np.int64] = np.frombuffer(packed_token_ids(token_ids), np.int64)
        sites: list[_Site] = []
        for kind in self.media_kinds:
            items = once_each(media.get(kind, ()), partial(self._item, kind, checked))
            sites += self._sites(kind, ids, items)
        sites.sort(key=lambda site: site.start)
        ids, found = expand_placeholders(ids, [(s.start, s.given, s.item) for s in sites])
        positions, delta = self._positions(
            len(ids),
            [
                (item.span, site.grid, site.interval)
                for item, site in zip(found, sites, strict=True)
            ],
        )
        return ProcessedPrompt(
            token_ids=array("q", ids.tobytes()),
            row_state={"mrope_delta": delta},
            token_state={"mrope_positions": positions},
            media=tuple(found),
        )

    def _sites(self, kind: str, ids: NDArray[np.int64], items: Sequence[MediaItem]) -> list[_Site]:
        """Each item with its placeholders."""
        counts = [item.num_embeddings for item in items]
        places = find_placeholders(ids, self._tokens[kind], kind, counts)
        return [_Site(*place, item) for place, item in zip(places, items, strict=True)]

    def _positions(
        self, length: int, grids: Sequence[tuple[tuple[int, int], tuple[int, int, int], float]]
    ) -> tuple[NDArray[np.int64], int]:
        """``[3, length]``, and how far the position after them is ahead of ``length``."""
        import numpy as np

        positions = np.empty((3, length), np.int64)
        index = position = 0
        for (start, end), (frames, high, wide), interval in grids:
            positions[:, index:start] = np.arange(position, position + start - index)
            position += start - index
            shape = (frames, high // self._merge, wide // self._merge)
            axes = np.indices(shape).reshape(3, -1)
            axes[0] = (axes[0] * interval).astype(np.int64)
            positions[:, start:end] = position + axes
            # As the model was trained. Later transformers goes on after height and width alone,
            # which is another place for a video with more frames than that.
            position += int(axes.max()) + 1
            index = end
        positions[:, index:] = np.arange(position, position + length - index)
        return positions, position - index

    def _item(self, kind: str, options: dict[str, Any], index: int, item: Any) -> MediaItem:
        """An item as the caller gave it, as it would be in a prompt of its own."""
        from engine_core_qwen2_vl.pixels import to_frames, to_pixels

        if isinstance(item, MediaItem):
            return item
        interval = 1.0
        timed = kind == "video" and self._per_second is not None
        try:
            if isinstance(item, Mapping):
                if options:
                    raise RequestError(
                        f"{' and '.join(options)} have no effect on features that are made already"
                    )
                if timed:
                    item = dict(item)
                    interval = self._interval(item.pop("second_per_grid_ts", 1.0))
                patches = self._given_patches(kind, item)
                digest = media_digest(kind, patches.values, *patches.grid, interval)
                return self._made(kind, digest, patches, interval)
            frames = [to_pixels(item)] if kind == "image" else to_frames(item)
            limits, wrong = self._limits(kind, options)
            if wrong:
                raise RequestError(wrong)
            patches = self._patcher.patches(frames, **limits)
            if timed:
                interval = self._interval(self._seconds(item, options))
            digest = media_digest(kind, *frames, *patches.grid, interval)
            return self._made(kind, digest, patches, interval)
        except RequestError as error:
            param = f"multi_modal_data.{kind}.{index}"
            raise RequestError(f"{kind} {index}: {error}", param=param) from None

    def _made(self, kind: str, digest: bytes, patches: Patches, interval: float) -> MediaItem:
        import numpy as np

        features: dict[str, Any] = {"pixel_values": patches.values}
        features["grid_thw"] = np.array(patches.grid, np.int64)
        if interval != 1.0:
            features["interval"] = np.float64(interval)
        return MediaItem(kind, digest, (0, math.prod(patches.grid) // self._merge**2), features)

    def _seconds(self, video: Any, options: Mapping[str, Any]) -> float:
        """How long a pair of its frames is shown."""
        fps = options.get("fps", getattr(video, "fps", None))
        pair = self._patcher.temporal_patch_size
        if fps is None:
            return pair / _FPS
        number = isinstance(fps, Real) and not isinstance(fps, bool)
        if not number or not pair / _MOST_SECONDS <= fps < math.inf:
            raise RequestError(
                f"the frames of a video in a second (fps) are a number, and {pair} of them take at "
                f"most {_MOST_SECONDS:.0f} s; got {shown(fps)}"
            )
        return float(pair / fps)

    def _interval(self, seconds: Any) -> float:
        """How many positions are between two pairs of frames."""
        import numpy as np

        given = np.asarray(seconds)
        sound = given.size == 1 and given.dtype.kind in "iuf"
        if not sound or not 0 < given.item() <= _MOST_SECONDS:
            raise RequestError(
                f"second_per_grid_ts must be a positive number, {_MOST_SECONDS:.0f} at most, "
                f"got {shown(seconds)}"
            )
        assert self._per_second is not None, "only videos of a model that counts seconds have one"
        return float(given.item() * self._per_second)

    def _checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, which are known and make sense."""
        known = _LIMITS if self._per_second is None else (*_LIMITS, "fps")
        for key, value in options.items():
            kinds = (int, float) if key == "fps" else (int,)
            if key not in known:
                wrong = f"{shown(key)} is not one of {', '.join(known)}"
            elif key in _LIMITS and type(value) is int and value > _MOST_PIXELS:
                wrong = f"{key} may be {_MOST_PIXELS} at most, got {shown(value)}"
            elif type(value) not in kinds or not 0 < value < math.inf:
                number = "number" if key == "fps" else "integer"
                wrong = f"{key} must be a positive {number}, got {shown(value)}"
            else:
                continue
            raise RequestError(f"mm_processor_kwargs: {wrong}", param="mm_processor_kwargs")
        clashes = [self._limits(kind, options)[1] for kind in self.media_kinds]
        if all(clashes):
            message = f"mm_processor_kwargs: {clashes[0]}"
            raise RequestError(message, param="mm_processor_kwargs")
        return dict(options)

    def _limits(self, kind: str, options: Mapping[str, Any]) -> tuple[dict[str, int], str]:
        """The least and most pixels of a kind, and why they make no sense, or nothing."""
        limits = {key: options.get(key, self._settings[kind][key]) for key in _LIMITS}
        least, most = limits.values()
        wrong = f"min_pixels ({least}) is more than max_pixels ({most})" if least > most else ""
        return limits, wrong

    def _given_patches(self, kind: str, features: Mapping[str, Any]) -> Patches:
        import numpy as np

        from engine_core_qwen2_vl.pixels import Patches

        names = _FEATURES[kind]
        if set(features) != set(names):
            raise RequestError(
                f"features of this kind are {' and '.join(names)}, got {', '.join(features)}"
            )
        try:
            values = np.ascontiguousarray(features[names[0]], dtype=np.float32)
            grid = np.asarray(features[names[1]], dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise RequestError(f"{names[0]} and {names[1]} must be arrays: {error}") from None
        if grid.shape not in ((3,), (1, 3)) or grid.min() <= 0:
            raise RequestError(
                f"{names[1]} must be three positive numbers, [3] or [1, 3], got {grid.tolist()}"
            )
        frames, high, wide = map(int, grid.reshape(3))
        wanted = (frames * high * wide, self._patcher.width)
        if high % self._merge or wide % self._merge or values.shape != wanted:
            raise RequestError(
                f"{names[0]} of {list(values.shape)} is not that of {names[1]} "
                f"{[frames, high, wide]}: it must be {list(wanted)}, and height and width "
                f"multiples of {self._merge}"
            )
        if not np.isfinite(values).all():
            raise RequestError(f"{names[0]} has values that are not finite")
        return Patches(values, (frames, high, wide))


def _activations(vision: Mapping[str, Any]) -> int:
    """Numbers that the tower holds at once for an embedding, at most; see ``model.py``.

    Of each patch its pixels, twice in float32 and once in the model's type, its angles, and in a
    layer the larger of attention (residual, normed, queries, keys and values, two of them
    rotated, by way of float32, and the output) and the feed-forward part.
    """
    patch: int = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    width: int = vision["embed_dim"]
    inner: int = vision.get("intermediate_size", int(width * vision.get("mlp_ratio", 4)))
    merged: int = vision["spatial_merge_size"] ** 2
    angles: int = 4 * width // vision["num_heads"]
    return merged * (5 * patch + angles + max(17 * width, 4 * width + 3 * inner))
