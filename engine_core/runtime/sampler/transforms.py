"""What changes logits before a token is chosen."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    prompt_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """Logits after the repetition penalty, then the frequency and presence penalties.

    The repetition penalty is that of Keskar et al., "CTRL" (2019), as transformers and vLLM have
    it, over prompt and output. The other two are OpenAI's, over the output alone:
    ``logit - count * frequency - (count > 0) * presence``.

    Args:
        logits: ``[S, V]`` float32.
        prompt_mask: ``[S, V]`` bool, the tokens of the prompt.
        output_counts: ``[S, V]`` integer, how often each token was generated.
        repetition: ``[S]``, 1 for none.
        frequency: ``[S]``, 0 for none.
        presence: ``[S]``, 0 for none.

    Returns:
        ``[S, V]`` float32, a new tensor.
    """
    generated = output_counts > 0
    penalty = repetition.to(logits.dtype).unsqueeze(-1)
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(prompt_mask | generated, repeated, logits)
    logits = logits - output_counts * frequency.to(logits.dtype).unsqueeze(-1)
    return logits - generated * presence.to(logits.dtype).unsqueeze(-1)


def ban_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Logits without some tokens, in place.

    Args:
        logits: ``[S, V]``.
        token_ids: ``[S, K]`` int64, repetitions allowed, -1 for none.
    """
    # The smaller of a logit and infinity is the logit, so that padding may point anywhere.
    none = token_ids < 0
    values = torch.full_like(token_ids, -torch.inf, dtype=logits.dtype).masked_fill(none, torch.inf)
    return logits.scatter_reduce_(-1, token_ids.clamp(min=0), values, "amin")


def apply_bitmask(logits: Tensor, words: Tensor) -> Tensor:
    """Logits of the tokens whose bit is set, in place; the others become minus infinity.

    Args:
        logits: ``[S, V]``.
        words: ``[S, B]`` uint8, eight tokens a byte, the lowest bit first; at least V bits a row.
    """
    bits = torch.bitwise_left_shift(
        torch.ones(8, dtype=torch.uint8, device=words.device),
        torch.arange(8, dtype=torch.uint8, device=words.device),
    )
    banned = ((words.unsqueeze(-1) & bits) == 0).flatten(1)
    return logits.masked_fill_(banned[:, : logits.shape[-1]], -torch.inf)
