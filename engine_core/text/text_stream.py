"""One completion's text: detokenisation and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine_core.text.detokenizer import IncrementalDetokenizer
from engine_core.text.stop_strings import StopStringMatcher
from engine_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine_core.configs import SamplingParams


class TextUpdate(NamedTuple):
    """Text added by some tokens. A named tuple, as there is one per token.

    Attributes:
        delta: the new text; never part of a stop string.
        stopped_by: the stop string that the tokens completed, or None.
        num_tokens_used: how many of the tokens were read: all of them, or those up to the one
            that completed the stop string. The others are to be dropped.
    """

    delta: str
    stopped_by: str | None
    num_tokens_used: int


class TextStream:
    """The text of one completion, given out as its tokens come.

    What is given out does not depend on how many tokens come at once. A stop string counts if it
    is completed by a token after the first ``sampling.min_tokens``, even if it began before;
    until then it is ordinary text (as in vLLM).

    A token that ends the sequence (end of sequence, ``stop_token_ids``) is not part of the text:
    the caller does not append it.

    Args:
        tokenizer: whose tokens they are.
        sampling: gives ``stop``, ``min_tokens`` and ``skip_special_tokens``.
        prompt_token_ids: the tokens before the first generated one.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            prompt_token_ids=prompt_token_ids,
        )
        self._matcher = StopStringMatcher(sampling.stop) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._stopped_by: str | None = None
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """Everything given out so far."""
        if self._matcher is None:
            return self._detokenizer.text
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped_by

    def append(self, token_ids: Sequence[int]) -> TextUpdate:
        """Reads tokens until they end or one of them completes a stop string."""
        matcher = self._matcher
        if matcher is None:
            return TextUpdate(self._detokenizer.append(token_ids), None, len(token_ids))
        given_out = []
        used = 0
        for token_id in token_ids:
            used += 1
            self._num_tokens += 1
            given_out.append(self._read(matcher, self._detokenizer.append((token_id,))))
            if self._stopped_by is not None:
                break
        return TextUpdate("".join(given_out), self._stopped_by, used)

    def finish(self) -> str:
        """The text that was held back; empty if a stop string ended the text. Call it once.

        An incomplete character becomes U+FFFD. The text still ends before a stop string if that
        completes one.
        """
        matcher = self._matcher
        if matcher is None:
            return self._detokenizer.finish()
        if self._stopped_by is not None:
            return ""
        text = self._read(matcher, self._detokenizer.finish())
        if self._stopped_by is None:
            held = matcher.finish()
            self._text.append(held)
            text += held
        return text

    def _read(self, matcher: StopStringMatcher, text: str) -> str:
        match = matcher.append(text, may_stop=self._num_tokens > self._min_tokens)
        self._stopped_by = match.stopped_by
        if match.text:
            self._text.append(match.text)
        return match.text
