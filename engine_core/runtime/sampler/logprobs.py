"""Log-probabilities for reports."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine_core.steps import Logprob, TokenLogprobs


def token_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability of each row's token and of its most probable ones.

    Args:
        logits: ``[S, V]`` float32, as the model gave them.
        tokens: ``[S]`` the token of each row.
        counts: how many of the most probable tokens each row reports besides it; -1 for all.

    Returns:
        One mapping per row, the row's token first.
    """
    vocab_size = logits.shape[-1]
    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in counts]
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens.unsqueeze(-1))
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    values, indices = logprobs.topk(max(counts), dim=-1)
    out: list[TokenLogprobs] = []
    for token, logprob, rank, top_values, top_indices, count in zip(
        tokens.tolist(),
        own.squeeze(-1).tolist(),
        ranks,
        values.tolist(),
        indices.tolist(),
        counts,
        strict=True,
    ):
        entry = {token: Logprob(logprob, rank)}
        for place in range(count):
            entry.setdefault(top_indices[place], Logprob(top_values[place], place + 1))
        out.append(entry)
    return out
