"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine_core.steps import Logprob, TokenLogprobs
from engine_core.text.token_bytes import SPECIAL

# JSON has no infinity; OpenAI writes this for a token that cannot come.
_LOWEST = -9999.0


def _value(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)


def _text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def _token(token: int, entry: Logprob, table: Sequence[bytes]) -> dict[str, Any]:
    text = _text(token, entry)
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
) -> dict[str, Any]:
    """The ``logprobs`` object of a chat completion's choice.

    Args:
        token_ids: the tokens.
        logprobs: theirs.
        top: how many of the most probable tokens are reported.
        table: each token's bytes, as :func:`token_bytes` has them.
    """
    return {
        "content": [
            {
                **_token(token, entries[token], table),
                "top_logprobs": [_token(*item, table) for item in _most_probable(entries, top)],
            }
            for token, entries in zip(token_ids, logprobs, strict=True)
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """The ``logprobs`` objects of one text completion; its tokens' places count on.

    Args:
        top: how many of the most probable tokens are reported.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def add(
        self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs | None], texts: list[str]
    ) -> dict[str, Any]:
        """The object for further tokens.

        Args:
            token_ids: the tokens.
            logprobs: their log-probabilities; None for a token that nothing precedes.
            texts: the tokens' own texts, for those that have no log-probabilities.
        """
        made: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token, entries, own in zip(token_ids, logprobs, texts, strict=True):
            text = own if entries is None else _text(token, entries[token])
            made["tokens"].append(text)
            made["text_offset"].append(self._offset)
            self._offset += len(text)
            if entries is None:
                made["token_logprobs"].append(None)
                made["top_logprobs"].append(None)
                continue
            made["token_logprobs"].append(_value(entries[token]))
            made["top_logprobs"].append(
                {_text(*item): _value(item[1]) for item in _most_probable(entries, self._top)}
            )
        return made


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
