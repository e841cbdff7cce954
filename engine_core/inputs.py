"""A prompt's family-specific inputs beyond its tokens.

A plugin whose model needs more than token ids and linear positions returns an
:class:`InputProcessor` from its ``input_processors`` hook, and one that sees or hears a
:class:`MediaProcessor`. The values are plain sequences or numpy arrays: this module, and a plugin's
processor, import no torch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from engine_core.errors import OptionError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine_core.configs import ModelConfig

_Made = TypeVar("_Made")


def packed_token_ids(token_ids: Sequence[int]) -> array[int]:
    """Token ids as an array of 64-bit integers, which is fast to copy and to send.

    Raises:
        struct.error: one is not an integer, or does not fit 64 bits.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return token_ids[:]
    # Twice as fast as making the array from a list.
    return array("q", struct.pack(f"{len(token_ids)}q", *token_ids))


def media_digest(*parts: Any) -> bytes:
    """A digest of arrays, bytes, text and numbers, in this order, for :class:`MediaItem`."""
    digest = blake2b(digest_size=16)
    for part in parts:
        if hasattr(part, "tobytes") and hasattr(part, "shape"):
            head, content = f"{part.dtype.str}{part.shape}", part.tobytes()
        else:
            head = type(part).__name__
            content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{head} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()


def once_each(values: Sequence[Any], make: Callable[[int, Any], _Made]) -> list[_Made]:
    """``make(index, value)`` of each value, called once for those that are the same object.

    An item that a prompt shows several times comes as one object.
    """
    made: dict[int, _Made] = {}
    for index, value in enumerate(values):
        if id(value) not in made:
            made[id(value)] = make(index, value)
    return [made[id(value)] for value in values]


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """A video whose frames are known by their time, where an array of them would do.

    Attributes:
        frames: ``[F, H, W, 3]`` uint8.
        fps: how many of these there are in a second; None if it is not known.
    """

    frames: Any
    fps: float | None = None

    def __len__(self) -> int:
        return len(self.frames)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.frames)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For numpy it is its frames."""
        import numpy as np

        made = np.asarray(self.frames, dtype=dtype)
        return made.copy() if copy else made


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A picture, video or sound of a prompt.

    Attributes:
        kind: "image", "video" or "audio".
        digest: of the content and of what it was processed with. Items of equal digests have equal
            embeddings, which are computed once.
        span: half-open range of prompt positions. Each takes one of the item's embeddings, in
            order, in place of its token's.
        features: named numpy arrays for the model's ``embed_media``.
    """

    kind: str
    digest: bytes
    span: tuple[int, int]
    features: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_embeddings(self) -> int:
        """How many embeddings it has."""
        return self.span[1] - self.span[0]


def check_media_kinds(media: Mapping[str, Sequence[Any]], kinds: Sequence[str]) -> None:
    """Refuse items of kinds that a model does not take.

    Raises:
        RequestError: there are some.
    """
    unknown = [kind for kind in media if kind not in kinds and len(media[kind])]
    if unknown:
        raise RequestError(
            f"this model takes media of the kind{'s' * (len(kinds) > 1)} {' and '.join(kinds)}, "
            f"not {', '.join(unknown)}",
            param="multi_modal_data",
        )


def check_media_options(
    processor: InputProcessor | None, options: Mapping[str, Any], architecture: str
) -> None:
    """Refuse the server's own ``mm_processor_kwargs``, which every request would be refused for.

    A family that looks at options only where there are items is asked in vain.

    Raises:
        OptionError: the family does not know them, or the model takes text alone.
    """
    if not options:
        return
    if not isinstance(processor, MediaProcessor):
        raise OptionError(
            "mm_processor_kwargs are for models that see or hear, and "
            f"{architecture} takes text alone; leave them out"
        )
    try:
        processor.process_media([], {}, options)
    except RequestError as error:
        if error.param == "mm_processor_kwargs":
            raise OptionError(str(error)) from None
    except Exception:  # of a prompt without tokens, which is none
        return


def find_placeholders(
    ids: NDArray[np.int64], token: int, kind: str, counts: Sequence[int], noun: str | None = None
) -> list[tuple[int, int]]:
    """Where the placeholders of each item of a kind begin, and how many they are.

    Args:
        ids: ``[L]``, the prompt's tokens.
        token: the placeholder of this kind.
        kind: for messages, as "image".
        counts: embeddings of each item, in the order of their placeholders.
        noun: for messages, what an item is; the kind if None.

    Returns:
        For each item the first place, and 1 or as many as it has embeddings.

    Raises:
        RequestError: there is not one placeholder for each item, nor one for each embedding.
    """
    import numpy as np

    places = np.flatnonzero(ids == token)
    given = [1] * len(counts) if len(places) == len(counts) else counts
    starts = np.cumsum([0, *given])
    whole = starts[-1] == len(places) and all(
        places[end - 1] - places[start] == end - 1 - start for start, end in pairwise(starts)
    )
    if not whole:
        runs = int(np.count_nonzero(np.diff(places) > 1)) + bool(len(places))
        sizes = f" with {', '.join(map(str, counts))} embeddings" if counts else ""
        noun = noun or kind
        raise RequestError(
            f"the prompt has {kind} placeholders (token {token}) in {runs} places, "
            f"{len(places)} in all, for a number of {noun}s of {len(counts)}{sizes}; it needs "
            f"one placeholder for each {noun}, or one for each of its embeddings",
            param="multi_modal_data",
        )
    return [(int(places[start]), number) for start, number in zip(starts[:-1], given, strict=True)]


def expand_placeholders(
    ids: NDArray[np.int64], sites: Sequence[tuple[int, int, MediaItem]]
) -> tuple[NDArray[np.int64], list[MediaItem]]:
    """Give each item as many placeholders as it has embeddings, and its span among them.

    Args:
        ids: ``[L]``, the prompt's tokens.
        sites: as of :func:`find_placeholders`, with the item, in the order of the places.

    Returns:
        The prompt with all placeholders, and the items.
    """
    import numpy as np

    repeats = np.ones(len(ids), np.int64)
    found, grown = [], 0
    for place, given, item in sites:
        start, count = place + grown, item.num_embeddings
        if given < count:
            repeats[place] = count
            grown += count - 1
        found.append(replace(item, span=(start, start + count)))
    return (np.repeat(ids, repeats) if grown else ids), found


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt as the scheduler and the runner need it.

    Attributes:
        token_ids: the prompt's tokens; the result of :func:`packed_token_ids` is fastest.
        row_state: named values that hold for the whole request; each becomes a row of a device
            tensor ``[max_num_seqs, ...]``. Numbers, plain sequences or numpy arrays, that fit the
            dtype and shape that the processor declares or else the first request's have.
            ``prompt_len`` is built in.
        token_state: named integer arrays ``[k, prompt_len]``, sliced for each prefill chunk.
        atomic_spans: half-open ranges of prompt positions that are never split over two chunks;
            a cache block that overlaps one is hashed with the whole span.
        cache_salts: values that enter every block hash of the request. Requests share cached blocks
            only if their salts are equal.
        media: what the prompt shows besides text, by span; spans are disjoint. A chunk may end
            inside of one.
    """

    token_ids: Sequence[int]
    row_state: Mapping[str, Any] = field(default_factory=dict)
    token_state: Mapping[str, Any] = field(default_factory=dict)
    atomic_spans: tuple[tuple[int, int], ...] = ()
    cache_salts: tuple[Hashable, ...] = ()
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptState:
    """The row and token state that every :class:`ProcessedPrompt` of a processor has.

    Attributes:
        row_state: the dtype, by numpy's name, and the shape of each.
        token_state: k of each, whose arrays are ``[k, prompt_len]``.
    """

    row_state: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    token_state: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class InputProcessor(Protocol):
    """Turns a prompt's token ids into a :class:`ProcessedPrompt` for one family.

    It may have an attribute ``prompt_state``, a :class:`PromptState`. Then CUDA graphs are captured
    before the first request, and otherwise after it, which shows what state there is.
    """

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether this processor is the one for the model."""

    def __init__(self, model_config: ModelConfig) -> None: ...

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """The processed prompt.

        Raises:
            RequestError: the prompt is not one that the model can take.
        """


@dataclass(frozen=True, slots=True)
class MediaLimit:
    """The most that an item of a kind takes, by checkpoint and engine, without a request's options.

    Attributes:
        num_embeddings: of the largest item; None if items have no largest one, as videos.
        largest: what that is, in words, as in "1003520 pixels".
        activations: numbers, of the model's dtype, that ``embed_media`` holds at once for each
            embedding that it computes, features included and weights not; at most.
        modules: names of the model's modules that do nothing but encode.
    """

    num_embeddings: int | None = None
    largest: str = ""
    activations: int = 0
    modules: tuple[str, ...] = ()


@runtime_checkable
class MediaProcessor(InputProcessor, Protocol):
    """An input processor of a family whose prompts may show pictures, videos or sounds.

    It is made in several processes: :meth:`process_media` runs in one that is made for a prompt,
    of a copy of what ``__init__`` left; or offline in several threads at once. If it has an
    attribute ``reuses_items``, and this is true, then an item of ``media`` may also be a
    :class:`MediaItem` that it made of an earlier prompt, with the same options: the span is
    another, the digest and the features stay.

    It may have a method ``media_limits(options)``, which gives a :class:`MediaLimit` by kind, for
    the options that the engine has for requests that bring none. Memory for the encoder is then
    planned before the KV cache's, and ``check-model`` tells the limits.

    It may have a method ``picture_outline(height, width, options)``: the item of a picture of that
    size, with the span of a prompt of its own, an empty digest, and no features but those by which
    :meth:`process_media` lays it out, which takes it as it does items made before. A prompt that
    its pictures make too long is then refused before anything is decoded, and what it costs to make
    the others is known.

    It may have a method ``named_media(token_ids)``, for prompts whose own tokens name files: by
    kind the path or address of each, and nothing where items come with the prompt. They are read
    like addresses in a request, where that is allowed, and given to :meth:`process_media`.

    Attributes:
        media_kinds: those that it takes.
    """

    media_kinds: ClassVar[tuple[str, ...]]

    def process_media(
        self,
        token_ids: Sequence[int],
        media: Mapping[str, Sequence[Any]],
        options: Mapping[str, Any],
    ) -> ProcessedPrompt:
        """The processed prompt, with an item for each of ``media``.

        Args:
            token_ids: the prompt, in which each item has one placeholder, or as many as it has
                embeddings.
            media: by kind, in the order of their placeholders. An image is a PIL image, a uint8
                array ``[H, W, 3]`` or a mapping of features that the family's processor has made; a
                video is a list of images, an array ``[F, H, W, 3]`` or a :class:`Video`, as encoded
                ones are; a sound is an array and its rate.
            options: settings of the family's processing.

        Raises:
            RequestError: the prompt, an item or an option is not one that the model can take.
        """
