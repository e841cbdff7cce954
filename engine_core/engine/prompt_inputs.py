"""Results of a family's input processor, checked before the engine takes them."""

from __future__ import annotations

import reprlib
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.errors import EngineError, ModelError, RequestError
from engine_core.inputs import (
    InputProcessor,
    MediaItem,
    ProcessedPrompt,
    PromptState,
    packed_token_ids,
)
from engine_core.plugin_code import defined_at, failed_at, package_of, silent


def process_prompt(
    processor: InputProcessor, method: str, vocab_size: int, *arguments: Any
) -> ProcessedPrompt:
    """The prompt as a method of ``processor`` returns it; its row state is not looked into.

    Raises:
        RequestError: it refuses the prompt.
        ModelError: it fails, or returns something else.
    """
    process = getattr(processor, method)
    name = f"{type(processor).__name__}.{method}"

    def wrong(what: str) -> ModelError:
        return ModelError(f"{name} ({defined_at(process)}) returned {what}")

    try:
        with silent():
            given: Any = process(*arguments)
    except (EngineError, MemoryError):  # the latter is of a worker's limit
        raise
    except Exception as error:
        raise ModelError(
            f"{name} failed: {type(error).__name__}: {error}"
            f"{failed_at(error, package_of(type(processor)))}"
        ) from error
    if not isinstance(given, ProcessedPrompt):
        raise wrong(f"{reprlib.repr(given)}, not a ProcessedPrompt")
    try:
        packed = packed_token_ids(given.token_ids)
        # As unsigned numbers negative ones are the largest.
        fits = not packed or int(np.frombuffer(packed, dtype=np.uint64).max()) < vocab_size
    except (struct.error, TypeError):
        fits = False
    if not fits:
        shown = reprlib.repr(given.token_ids)
        raise wrong(f"token_ids {shown}, not ids of the vocabulary of {vocab_size}")
    for field in ("row_state", "token_state"):
        value = getattr(given, field)
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise wrong(f"{field} {reprlib.repr(value)}, no mapping of names")
    declared: PromptState | None = getattr(processor, "prompt_state", None)
    for field in ("row_state", "token_state") if declared else ():
        if getattr(given, field).keys() != (names := getattr(declared, field).keys()):
            listed = ", ".join(getattr(given, field)) or "none"
            raise wrong(f"{field} {listed}, and declares {', '.join(names) or 'none'}")
    for key, value in given.token_state.items():
        k = declared.token_state[key] if declared else None
        try:
            numbers = np.atleast_2d(np.asarray(value))
            fits = numbers.dtype.kind in "biu" and numbers.shape[1:] == (len(packed),)
        except ValueError:  # rows of several lengths
            fits = False
        if not fits or len(numbers) != (k or len(numbers)):
            shape = f"integers [{k or 'k'}, {len(packed)}]"
            raise wrong(f"token_state {key!r} {reprlib.repr(value)}, not {shape}")
    if not isinstance(given.cache_salts, tuple):
        raise wrong(f"cache_salts {reprlib.repr(given.cache_salts)}, no tuple")
    try:
        spans = [(int(start), int(end)) for start, end in given.atomic_spans]
    except (TypeError, ValueError):
        spans = [(1, 0)]
    if any(not 0 <= start < end <= len(packed) for start, end in spans):
        raise wrong(
            f"atomic_spans {reprlib.repr(given.atomic_spans)}, not pairs within the prompt",
        )
    if not isinstance(given.media, tuple) or not all(isinstance(i, MediaItem) for i in given.media):
        raise wrong(f"media {reprlib.repr(given.media)}, no tuple of MediaItem")
    return replace(given, token_ids=packed)


def fitted_state(name: str, value: Any, known: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """An input processor's row state with the dtype and shape of ``known``.

    That is what the processor declares, or the first request's.

    Python ints become int64, floats float32.

    Raises:
        RequestError: it does not fit, or is no number.
    """
    try:
        given = np.asarray(value)
        if given.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
            given = given.astype(np.float32)
        if given.dtype.kind not in "biuf":
            raise TypeError(f"{given.dtype} are no numbers")
        if known is None:
            return given
        spread = np.broadcast_to(given, known.shape)
        fitted = spread.astype(known.dtype, casting="same_kind")
        if given.dtype.kind in "biu" and not np.array_equal(fitted, spread):
            raise OverflowError(f"it does not fit {known.dtype}")
    except (TypeError, ValueError, OverflowError) as error:
        wanted = "a number or an array of numbers"
        if known is not None:
            wanted = f"{known.dtype} of shape {known.shape} as in every request"
        raise RequestError(
            f"the input processor gives row state {name!r} as {value!r}, which must be {wanted}: "
            f"{error}"
        ) from error
    return fitted


__all__ = ["fitted_state", "process_prompt"]
