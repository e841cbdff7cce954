"""Images of a prompt, and the salts of long prompts. Imports no torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.errors import RequestError, shown
from engine_core.inputs import (
    MediaItem,
    MediaLimit,
    ProcessedPrompt,
    PromptState,
    check_media_kinds,
    media_digest,
    once_each,
    packed_token_ids,
)
from engine_core_qwen_vl.config import EMBEDDINGS

# numpy and what needs it are imported where they are used: every command imports this module.
if TYPE_CHECKING:
    from engine_core.configs import ModelConfig


class QWenProcessor:
    """Qwen's prompts of text.

    Under dynamic NTK the keys of a prompt are rotated by a base that depends on its length. So
    prompts share cached blocks only if they have the same base.
    """

    prompt_state: ClassVar[PromptState] = PromptState()

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether the model is of this family, and does not see."""
        return _is_qwen(model_config) and not _sees(model_config)

    def __init__(self, model_config: ModelConfig) -> None:
        config = model_config.hf_config
        self._trained: int | None = config.seq_length if config.use_dynamic_ntk else None

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """The prompt with its salt."""
        return ProcessedPrompt(packed_token_ids(token_ids), cache_salts=self._salts(len(token_ids)))

    def _salts(self, length: int) -> tuple[Hashable, ...]:
        """How often a prompt of that length doubles the trained one; nothing if it does not."""
        if self._trained is None or length <= self._trained:
            return ()
        return ((-(-length // self._trained) - 1).bit_length(),)


class QWenVLProcessor(QWenProcessor):
    """Qwen-VL's prompts, in which an image stands between two marks as 256 tokens.

    These are pads, or the path of a file as bytes and pads behind it. The image's embeddings take
    their place, but a path still tells one prompt from another.
    """

    media_kinds: ClassVar[tuple[str, ...]] = ("image",)
    reuses_items: ClassVar[bool] = True

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether the model is of this family, and sees."""
        return _is_qwen(model_config) and _sees(model_config)

    def __init__(self, model_config: ModelConfig) -> None:
        import engine_core_qwen_vl.pixels  # noqa: F401 - here, and not in each prompt's process

        super().__init__(model_config)
        visual = model_config.hf_config.visual
        self._begin: int = visual["image_start_id"]
        self._end, self._pad = self._begin + 1, self._begin + 2
        self._size: int = visual["image_size"]
        self._activations = _activations(visual)

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """A prompt of text.

        Raises:
            RequestError: it has the marks of an image.
        """
        return self.process_media(token_ids, {}, {})

    def media_limits(self, options: Mapping[str, Any]) -> dict[str, MediaLimit]:
        """Every image is as large, and the tower takes the same for each."""
        largest = f"{self._size} x {self._size} pixels after resizing"
        return {"image": MediaLimit(EMBEDDINGS, largest, self._activations, ("visual",))}

    def picture_outline(self, height: int, width: int, options: Mapping[str, Any]) -> MediaItem:
        """An item as a picture of any size becomes, without its pixels."""
        return MediaItem("image", b"", (0, EMBEDDINGS))

    def named_media(self, token_ids: Sequence[int]) -> Mapping[str, Sequence[str]]:
        """The paths of files in a prompt, by kind, if each of its images is named by one.

        Raises:
            RequestError: the marks do not stand in pairs, or a path is none.
        """
        ids = list(token_ids)
        paths = [self._path(ids[start:end]) for start, end in self._places(ids)]
        return {"image": [path for path in paths if path]} if all(paths) and paths else {}

    def process_media(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[Any]],
        options: Mapping[str, Any],
    ) -> ProcessedPrompt:
        """The prompt with its images, each between its marks as 256 tokens.

        Args:
            token_ids: between the marks of an image are up to 256 tokens: nothing, pads, or a path
                and pads. Missing pads are added.
            media: by "image", in the order of their places: PIL images, uint8 arrays
                ``[H, W, 3]``, or ``pixel_values [3, S, S]`` as the original code makes them; or
                items that were made before.
            options: none is known.

        Raises:
            RequestError: places and images do not agree, a pad is outside, or an item is none.
        """
        check_media_kinds(media, self.media_kinds)
        if options:
            raise RequestError(
                "mm_processor_kwargs: this model has no options of images, got "
                f"{', '.join(map(shown, options))}",
                param="mm_processor_kwargs",
            )
        ids = packed_token_ids(token_ids)
        images = media.get("image", ())
        places = self._places(ids) if self._begin in ids or self._end in ids else []
        inside = sum(ids[start:end].count(self._pad) for start, end in places)
        if ids.count(self._pad) != inside:
            raise RequestError(
                f"the token {self._pad} (<imgpad>) stands for a part of an image, and only between "
                f"the tokens {self._begin} and {self._end}",
                param="multi_modal_data",
            )
        if len(places) != len(images):
            raise RequestError(
                f"the prompt has places of {len(places)} images (between the tokens {self._begin} "
                f"and {self._end}), and there are {len(images)} images",
                param="multi_modal_data",
            )
        whole, items, copied = array("q"), [], 0
        made = once_each(images, lambda index, image: self._image(image, index))
        for (start, end), item in zip(places, made, strict=True):
            whole += ids[copied:end]
            whole.extend([self._pad] * (EMBEDDINGS - (end - start)))
            copied = end
            span = (len(whole) - EMBEDDINGS, len(whole))
            items.append(replace(item, span=span))
        whole += ids[copied:]
        return ProcessedPrompt(whole, cache_salts=self._salts(len(whole)), media=tuple(items))

    def _places(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """The range between the marks of each image.

        Raises:
            RequestError: marks do not stand in pairs, or there is too much between two.
        """
        marks = [index for index, token in enumerate(ids) if token in (self._begin, self._end)]
        wanted = [self._begin, self._end] * (len(marks) // 2)
        if [ids[mark] for mark in marks] != wanted:
            raise RequestError(
                f"the tokens {self._begin} and {self._end} must stand in pairs, with an image "
                "between each",
                param="multi_modal_data",
            )
        places = [(start + 1, end) for start, end in zip(marks[::2], marks[1::2], strict=True)]
        for start, end in places:
            if end - start > EMBEDDINGS:
                raise RequestError(
                    f"between the marks of an image are {end - start} tokens, {EMBEDDINGS} at most",
                    param="multi_modal_data",
                )
        return places

    def _path(self, ids: Sequence[int]) -> str | None:
        """The path between the marks of an image; None if there are pads alone."""
        named = ids[: ids.index(self._pad)] if self._pad in ids else ids
        try:
            return bytes(named).decode() or None
        except ValueError:
            raise RequestError(
                "between the marks of an image are no bytes of a path in UTF-8, with pads (token "
                f"{self._pad}) behind them",
                param="multi_modal_data",
            ) from None

    def _image(self, item: Any, index: int) -> MediaItem:
        """An image as the caller gave it, as it would be in a prompt of its own."""
        from engine_core_qwen_vl.pixels import given_pixels, image_pixels

        if isinstance(item, MediaItem):
            return item
        try:
            pixels = (given_pixels if isinstance(item, Mapping) else image_pixels)(item, self._size)
        except RequestError as error:
            param = f"multi_modal_data.image.{index}"
            raise RequestError(f"image {index}: {error}", param=param) from None
        digest = media_digest("image", pixels)
        return MediaItem("image", digest, (0, EMBEDDINGS), {"pixel_values": pixels})


def _activations(visual: Mapping[str, Any]) -> int:
    """Numbers that the tower holds at once for an embedding, at most; see ``model.py``.

    Of each patch its pixels, twice in float32, and the largest of: attention in a layer (residual,
    normed, queries, keys and values, and the output, twice), its feed-forward part, and the
    resampler (besides the tower's output the projected patch, normed, its key and its value). Of
    each embedding the query, its place, what attention gives, and the output.
    """
    grid: int = visual["image_size"] // visual["patch_size"]
    width: int = visual["width"]
    hidden: int = visual["output_dim"]
    inner = int(width * visual["mlp_ratio"])
    most = max(9 * width, 3 * width + 2 * inner, 3 * width + 4 * hidden)
    pixels: int = 3 * visual["patch_size"] ** 2
    return math.ceil(grid**2 / EMBEDDINGS * (4 * pixels + most)) + 4 * hidden


def _is_qwen(model_config: ModelConfig) -> bool:
    return model_config.architecture == "QWenLMHeadModel"


def _sees(model_config: ModelConfig) -> bool:
    return model_config.hf_config.get("visual") is not None
