"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine_core.steps import Logprob, TokenLogprobs
from engine_core.text import IncrementalDetokenizer, Tokenizer, TokenNames
from engine_core.text.token_bytes import SPECIAL

# JSON has no infinity; OpenAI writes this for a token that cannot come.
_LOWEST = -9999.0


def _value(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def _token(token: int, entry: Logprob, table: Sequence[bytes], as_ids: bool) -> dict[str, Any]:
    text = f"token_id:{token}" if as_ids else _text(token, entry)
    own = table[token] if token < len(table) else b""
    # A special token's name is written as text where it is written at all.
    own = own.removeprefix(SPECIAL)
    return {"token": text, "logprob": _value(entry), "bytes": list(own) if own else None}


def _most_probable(entries: TokenLogprobs, count: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(entries.items(), key=lambda item: item[1].rank)
    return ranked[:count]


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    top: int,
    table: Sequence[bytes],
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """The ``logprobs`` object of a chat completion's choice.

    Args:
        token_ids: the tokens.
        logprobs: theirs.
        top: how many of the most probable tokens are reported.
        table: each token's bytes, as :func:`token_bytes` has them.
        as_ids: whether tokens are named by their ids.
    """
    return {
        "content": [
            {
                **_token(token, entries[token], table, as_ids),
                "top_logprobs": [
                    _token(*item, table, as_ids) for item in _most_probable(entries, top)
                ],
            }
            for token, entries in zip(token_ids, logprobs, strict=True)
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The ``logprobs`` objects of one text completion; its tokens' places count on.

    A token's place is the length of the text before it. Parts of one character share a place, and
    so do a token that is not in the text and the one after it.

    Args:
        tokenizer: None if there is no text.
        names: those of its tokens, or None.
        top: how many of the most probable tokens are reported, besides the token itself.
        prompt_token_ids: the prompt.
        skip_special_tokens: whether the completion's text is without special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        names: TokenNames | None,
        top: int,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._top = top
        self._prompt = prompt_token_ids
        self._length = 0
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                skip_special_tokens=skip_special_tokens,
                prompt_token_ids=prompt_token_ids,
            )

    def echo(
        self, text: str, logprobs: Sequence[TokenLogprobs | None], *, num_added: int
    ) -> dict[str, Any]:
        """The object for the prompt, which the completion's text begins with.

        Args:
            text: the prompt as it is written there.
            logprobs: those of its tokens; None for the first, which nothing precedes.
            num_added: tokens at its beginning that the tokenizer added: they are not in the text.
        """
        offsets = self._places_in_prompt(text, num_added)
        self._length = len(text)
        return self._object(self._prompt, logprobs, offsets)

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """The object for further tokens of the completion."""
        offsets = []
        for token in token_ids:
            offsets.append(self._length)
            if self._detokenizer is not None:
                self._length += len(self._detokenizer.append((token,)))
        return self._object(token_ids, logprobs, offsets)

    def _places_in_prompt(self, text: str, num_added: int) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [0] * len(self._prompt)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        offsets = []
        length = 0
        special = tokenizer.special_ids
        for index, token in enumerate(self._prompt):
            offsets.append(min(length, len(text)))
            name = tokenizer.id_to_token(token) or ""
            # One at the end may be the tokenizer's too.
            added = token in special and not text.startswith(name, length)
            if index >= num_added and not added:
                length += len(detokenizer.append((token,)))
        return offsets

    def _object(
        self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": offsets,
        }
        for token, entries in zip(token_ids, logprobs, strict=True):
            made["tokens"].append(self._name(token))
            if entries is None:
                made["token_logprobs"].append(None)
                made["top_logprobs"].append(None)
                continue
            made["token_logprobs"].append(_value(entries[token]))
            top: dict[str, float] = {}
            for other, entry in (*_most_probable(entries, self._top), (token, entries[token])):
                # Of two tokens of one name the more probable stays.
                top.setdefault(self._name(other), _value(entry))
            made["top_logprobs"].append(top)
        return made

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._names is None else self._names.unique(token)


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: for each prompt token, token id to its log-probability."""
    if entries is None:
        return None
    return [
        None
        if at is None
        else {
            str(token): {
                "logprob": _value(entry),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in at.items()
        }
        for at in entries
    ]
