"""A prompt's family-specific inputs beyond its tokens.

A plugin whose model needs more than token ids and linear positions returns an
:class:`InputProcessor` from its ``input_processors`` hook. The values are plain sequences or numpy
arrays: this module, and a plugin's processor, import no torch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig


def packed_token_ids(token_ids: Sequence[int]) -> array[int]:
    """Token ids as an array of 64-bit integers, which is fast to copy and to send.

    Raises:
        struct.error: one is not an integer, or does not fit 64 bits.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return token_ids[:]
    # Twice as fast as making the array from a list.
    return array("q", struct.pack(f"{len(token_ids)}q", *token_ids))


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt as the scheduler and the runner need it.

    Attributes:
        token_ids: the prompt's tokens; the result of :func:`packed_token_ids` is fastest.
        row_state: named values that hold for the whole request; each becomes a row of a device
            tensor ``[max_num_seqs, ...]``. Numbers, plain sequences or numpy arrays, that fit the
            dtype and shape of the first request's. ``prompt_len`` is built in.
        token_state: named integer arrays ``[k, prompt_len]``, sliced for each prefill chunk.
        atomic_spans: half-open ranges of prompt positions that are never split over two chunks;
            a cache block that overlaps one is hashed with the whole span.
        cache_salts: values that enter every block hash of the request. Requests share cached blocks
            only if their salts are equal.
    """

    token_ids: Sequence[int]
    row_state: Mapping[str, Any] = field(default_factory=dict)
    token_state: Mapping[str, Any] = field(default_factory=dict)
    atomic_spans: tuple[tuple[int, int], ...] = ()
    cache_salts: tuple[Hashable, ...] = ()


@runtime_checkable
class InputProcessor(Protocol):
    """Turns a prompt's token ids into a :class:`ProcessedPrompt` for one family."""

    @classmethod
    def condition(cls, model_config: ModelConfig) -> bool:
        """Whether this processor is the one for the model."""

    def __init__(self, model_config: ModelConfig) -> None: ...

    def process(self, token_ids: Sequence[int]) -> ProcessedPrompt:
        """The processed prompt.

        Raises:
            RequestError: the prompt is not one that the model can take.
        """
