"""Sampling parameters of the persistent batch's rows, kept on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# The columns of SamplingState.numbers.
NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
# The first of them that is not of a draw.
FIRST_PENALTY = NUMBERS.index("repetition_penalty")
# Summands of Adjustments.kinds.
BIASED, PENALISED, COUNTED = 1, 2, 4
# Summands of Adjustments.seen.
PROMPTED, GENERATED = 1, 2


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Changes of the logits, by row of the persistent batch.

    Attributes:
        kinds: ``[max_rows]`` int32, a sum of ``BIASED`` (``bias`` is added), ``PENALISED`` (the
            penalties of ``numbers`` are applied) and ``COUNTED`` (the chosen token is counted in
            ``output_counts``).
        ban_ids: ``[max_rows, K]`` int32, tokens that are banned for some time; -1 for none.
        ban_ends: ``[max_rows]`` int64, the first position whose token is not banned.
        bias: ``[max_rows, V]`` float32; None if no row is ``BIASED``.
        seen: ``[max_rows, V]`` uint8, a sum of ``PROMPTED`` (the token is in the prompt) and
            ``GENERATED`` (its count is not 0, and only then it is read); modified. None if no row
            is ``PENALISED`` or ``COUNTED``.
        output_counts: ``[max_rows, V]`` int32, how often each token was generated; modified. None
            where ``seen`` is.
        seen_ids: ``[max_rows, V]`` int32, the tokens whose ``seen`` is not 0, in any order and each
            once, at the beginning of each row; modified. None where ``seen`` is.
        seen_sizes: ``[max_rows]`` int32, how many these are; modified. None where ``seen`` is.
    """

    kinds: Tensor
    ban_ids: Tensor
    ban_ends: Tensor
    bias: Tensor | None = None
    seen: Tensor | None = None
    output_counts: Tensor | None = None
    seen_ids: Tensor | None = None
    seen_sizes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Sampling parameters by row of the persistent batch.

    Attributes:
        numbers: ``[max_rows, 7]`` float64, columns as in ``NUMBERS``. A ``temperature`` of 0 is
            greedy; ``top_k`` that is not in ``[1, V)`` is none, and so are ``top_p`` of 1 and
            ``min_p`` of 0.
        seeds: ``[max_rows]`` int64.
        adjustments: None if no row has any.
    """

    numbers: Tensor
    seeds: Tensor
    adjustments: Adjustments | None = None
