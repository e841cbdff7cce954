"""The cost and the length of a prompt with pictures, before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine_core.engine.prompt_inputs import process_prompt
from engine_core.errors import EngineError
from engine_core.inputs import MediaItem, MediaProcessor
from engine_core.media.images import MAX_PIXELS, MAX_SIDE
from engine_core.media.parts import MediaPart
from engine_core.media.sizes import LARGE, cost_of, picture_size

# What a family resizes a picture to, for an embedding: 28 x 28 pixels and the like.
_PIXELS = 784


class Weight(NamedTuple):
    """Of a prompt that is to be processed.

    Attributes:
        cost: pixels that are decoded and processed, or what takes as long.
        length: its tokens at least, as far as the family says it before.
    """

    cost: int
    length: int

    @property
    def large(self) -> bool:
        """Whether it takes a worker for seconds."""
        return self.cost > LARGE


def weigh(
    processor: MediaProcessor,
    vocab_size: int,
    token_ids: Sequence[int],
    media: Mapping[str, Sequence[MediaPart]],
    options: Mapping[str, Any],
    longest: int | None,
) -> Weight:
    """The weight of a prompt, from the headers of its pictures.

    A header does not say how a camera was held. So a picture counts as the smaller of what it is
    as it lies and as it stands.

    Args:
        processor: the family's.
        vocab_size: the model's.
        token_ids: the prompt's.
        media: what it shows; items that are known count for its length alone.
        options: settings of the family's processing.
        longest: tokens that are taken; the length is of no interest if it is None.
    """
    cost, outlines, seen = 1, {}, set()
    for kind, parts in media.items():
        outlines[kind] = [_outline(processor, part, options) for part in parts]
        for part, outline in zip(parts, outlines[kind], strict=True):
            if isinstance(part.value, MediaItem) or id(part.value) in seen:
                continue
            seen.add(id(part.value))
            made = MAX_PIXELS if options else 0  # which may enlarge it
            cost += cost_of(part)
            cost += made if outline is None else outline.num_embeddings * _PIXELS
    length = 0
    if longest is not None:
        length = _length(processor, vocab_size, token_ids, outlines, options, longest)
    return Weight(cost, length)


def _length(
    processor: MediaProcessor,
    vocab_size: int,
    token_ids: Sequence[int],
    outlines: Mapping[str, Sequence[MediaItem | None]],
    options: Mapping[str, Any],
    longest: int,
) -> int:
    """The tokens of the prompt, as the family lays out outlines of its items."""
    items = [item for each in outlines.values() for item in each]
    shown = sum(item.num_embeddings for item in items if item is not None)
    # Where that is too much, nobody is to make a prompt of it.
    if shown > longest or None in items:
        return shown
    given = (list(token_ids), outlines, options)
    try:
        made = process_prompt(processor, "process_media", vocab_size, *given)
    except EngineError:  # it is refused once it is processed, as any other
        return 0
    return len(made.token_ids)


def _outline(processor: Any, part: MediaPart, options: Mapping[str, Any]) -> MediaItem | None:
    """The item as far as a part's size tells it; None if it does not."""
    if isinstance(part.value, MediaItem):
        return part.value
    say = getattr(processor, "picture_outline", None)
    if say is None or part.kind != "image" or (size := picture_size(part)) is None:
        return None
    if size[0] * size[1] > MAX_PIXELS or max(size) > MAX_SIDE:
        return None  # no picture that is taken: its decoder says so, and not that it is long
    try:
        outlines = [say(*each, options) for each in {size, size[::-1]}]
    except Exception:  # as above
        return None
    if not all(isinstance(each, MediaItem) for each in outlines):
        return None
    smaller: MediaItem = min(outlines, key=lambda each: each.num_embeddings)
    return smaller


__all__ = ["Weight", "weigh"]
