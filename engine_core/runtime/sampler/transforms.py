"""Changes of the logits by guides, before a token is chosen."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, words: Tensor) -> Tensor:
    """Logits of the tokens whose bit is set, in place; the others become minus infinity.

    Args:
        logits: ``[S, V]``.
        words: ``[S, B]`` uint8, eight tokens per byte, the lowest bit first; at least V bits per
            row.
    """
    bits = torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8, device=words.device),
        torch.arange(8, dtype=torch.uint8, device=words.device),
    )
    banned = ((words.unsqueeze(-1) & bits) == 0).flatten(1)
    return logits.masked_fill_(banned[:, : logits.shape[-1]], -torch.inf)
