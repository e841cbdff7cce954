"""One completion's text: detokenisation and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_core.text.detokenizer import IncrementalDetokenizer
from engine_core.text.stop_strings import StopStringMatcher
from engine_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine_core.configs import SamplingParams


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

    Attributes:
        stopped_by: the stop string that ended the text, or None.
        num_tokens: tokens read: all that were appended, or those up to the one that completed the
            stop string.
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
        self.num_tokens = 0
        self.stopped_by: str | None = None

    def append(self, token_ids: Sequence[int]) -> str:
        """Read tokens until they end or one completes a stop string; return the new text.

        It never holds a part of a stop string.
        """
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            return self._detokenizer.append(token_ids)
        given_out = []
        for token_id in token_ids:
            self.num_tokens += 1
            given_out.append(self._read(self._matcher, self._detokenizer.append((token_id,))))
            if self.stopped_by is not None:
                break
        return "".join(given_out)

    def finish(self) -> str:
        """Return the text that was held back; empty if a stop string ended the text. Call it once.

        An incomplete character becomes U+FFFD. The text still ends before a stop string if that
        completes one.
        """
        if self.stopped_by is not None:
            return ""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        text = self._read(self._matcher, text)
        return text if self.stopped_by is not None else text + self._matcher.finish()

    def _read(self, matcher: StopStringMatcher, text: str) -> str:
        may_stop = self.num_tokens > self._min_tokens
        text, self.stopped_by = matcher.append(text, may_stop=may_stop)
        return text
