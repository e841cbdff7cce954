"""Sampling parameters checked against a model, and words made into tokens."""

from __future__ import annotations

from collections.abc import Iterable

from engine_core.configs import SamplingParams
from engine_core.errors import RequestError
from engine_core.text import Tokenizer

# Tokens that a message names at most.
_SHOWN = 8


def resolve_sampling(
    params: SamplingParams, vocab_size: int, tokenizer: Tokenizer | None
) -> SamplingParams:
    """``params`` with bad words as token ids.

    Raises:
        RequestError: a token id is outside the vocabulary, more log-probabilities are asked for
            than it has, or text is given and there is no tokenizer.
    """
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise RequestError(
                f"{name} {count} is above the vocabulary of {vocab_size}; -1 reports every token",
                param=name,
            )
    bad_words = _tokenized(params.bad_words, tokenizer)
    if params.stop and tokenizer is None:
        raise RequestError(
            "stop strings need a tokenizer, and this engine has none (skip_tokenizer_init); use "
            "stop_token_ids",
            param="stop",
        )
    named: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias,
        "bad_words": (token for word in bad_words for token in word),
    }
    for name, tokens in named.items():
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            more = ", ..." if len(outside) > _SHOWN else ""
            raise RequestError(
                f"{name} [{', '.join(map(str, outside[:_SHOWN]))}{more}] are outside the "
                f"vocabulary of {vocab_size}",
                param=name,
            )
    return params.replace(bad_words=bad_words) if bad_words else params


def _tokenized(
    words: tuple[str | tuple[int, ...], ...], tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenised where it begins a text, and where a space precedes it.

    vLLM leaves the second out where it has more or fewer tokens than the first, and so lets pass
    a word that is one token after a space and several without it; here both are banned.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            sequences[word] = None
            continue
        if tokenizer is None:
            raise RequestError(
                "bad_words as text need a tokenizer, and this engine has none "
                "(skip_tokenizer_init); give token ids",
                param="bad_words",
            )
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not tokens:
                raise RequestError(
                    f"the bad word {word!r} has no tokens; leave it out", param="bad_words"
                )
            sequences[tokens] = None
    return tuple(sequences)
