"""The work of a process on what one prompt shows, made for it. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from engine_core.configs import ModelConfig
from engine_core.engine.prompt_inputs import process_prompt
from engine_core.errors import RequestError
from engine_core.inputs import MediaProcessor, ProcessedPrompt, once_each
from engine_core.media.images import data_of, decode_image, load_decoders
from engine_core.media.parts import MediaPart
from engine_core.media.shared import shared
from engine_core.media.sounds import decode_audio
from engine_core.media.videos import decode_video
from engine_core.registry import build_registry

_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "image": decode_image,
    "video": decode_video,
    "audio": decode_audio,
}


class Made(NamedTuple):
    """A processed prompt, and the seconds that its two parts took."""

    prompt: ProcessedPrompt
    decode_seconds: float
    process_seconds: float


def open_processor(
    model_config: ModelConfig, custom_module_map: tuple[str, ...]
) -> tuple[MediaProcessor, int]:
    """The family's processor, made once for all prompts, and the size of the vocabulary."""
    load_decoders()
    processor = build_registry(custom_module_map).input_processor(model_config)
    assert isinstance(processor, MediaProcessor), "there is one where items are taken"
    return processor, model_config.vocab_size


def process(
    opened: tuple[MediaProcessor, int],
    token_ids: Sequence[int],
    media: Mapping[str, Sequence[MediaPart]],
    options: Mapping[str, Any],
) -> Made:
    """The processed prompt, of encoded items or of others.

    Raises:
        RequestError: an item cannot be decoded, or the family's processor refuses the prompt.
        ModelError: the family's processor fails.
    """
    begin = time.perf_counter()
    items = {
        kind: once_each([part.value for part in parts], partial(_decoded, parts))
        for kind, parts in media.items()
    }
    decoded = time.perf_counter()
    processor, vocab_size = opened
    asked = (vocab_size, list(token_ids), items, options)
    made = process_prompt(processor, "process_media", *asked)
    made = in_shared_memory(made)
    return Made(made, decoded - begin, time.perf_counter() - decoded)


def in_shared_memory(prompt: ProcessedPrompt) -> ProcessedPrompt:
    """The prompt, whose items' features other processes may have without a copy."""
    features = once_each([item.features for item in prompt.media], lambda _, own: shared(own))
    items = zip(prompt.media, features, strict=True)
    return replace(prompt, media=tuple(replace(item, features=own) for item, own in items))


def _decoded(parts: Sequence[MediaPart], index: int, data: Any) -> Any:
    """The item, the value of a part, as the family's processor takes it."""
    if not isinstance(data, str | bytes):
        return data
    part = parts[index]
    try:
        if isinstance(data, str):
            data = data_of(data, part.kind)
        return _DECODERS[part.kind](data)
    except RequestError as error:
        raise RequestError(f"{part.param}: {error}", param=part.param) from None


__all__ = ["Made", "in_shared_memory", "open_processor", "process"]
