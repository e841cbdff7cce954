"""One completion's text: detokenisation and stop strings together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_core.text.detokenizer import IncrementalDetokenizer
from engine_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine_core.configs import SamplingParams


class StopStringMatcher:
    """Cuts a text, which arrives in pieces, before the first stop string.

    The text ends with the piece that completes a stop string. If that piece completes several, the
    one that begins first counts, and of those the longest. At most ``max(len(stop)) - 1``
    characters are held back.

    Args:
        stop: the stop strings, none of them empty; none at all is allowed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError(f"an empty stop string would end every text at once: {list(stop)!r}")
        self._stop = tuple(stop)
        self._by_first: defaultdict[str, list[str]] = defaultdict(list)
        for string in stop:
            self._by_first[string[0]].append(string)
        self._longest = max(map(len, stop), default=1) - 1
        self._held = ""
        self._stopped = False

    def append(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next piece of the text.

        Args:
            text: the piece.
            may_stop: False while stop strings that are completed do not count; they are then
                ordinary text.

        Returns:
            Text that is now certain not to be part of a stop string, and the stop string that was
            completed, or None; the text ends before it.
        """
        assert not self._stopped, "text appended after a stop string was completed"
        buffer = self._held + text
        if self._by_first.keys().isdisjoint(buffer):
            return buffer, None
        if may_stop:
            found = []
            for stop in self._stop:
                # Only what ends in the new piece: an earlier one was ordinary text.
                start = buffer.find(stop, max(len(self._held) - len(stop) + 1, 0))
                if start >= 0:
                    found.append((start, -len(stop), stop))
            if found:
                start, _, stopped_by = min(found)
                self._stopped = True
                self._held = ""
                return buffer[:start], stopped_by
        end = len(buffer)
        places = range(max(end - self._longest, 0), end)
        hold = next((place for place in places if self._may_begin(buffer, place)), end)
        self._held = buffer[hold:]
        return buffer[:hold], None

    def finish(self) -> str:
        """Return the text held back: no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, buffer: str, place: int) -> bool:
        """Whether what follows ``place`` is the beginning of a longer stop string."""
        if buffer[place] not in self._by_first:
            return False
        end = buffer[place:]
        return any(
            len(string) > len(end) and string.startswith(end)
            for string in self._by_first[buffer[place]]
        )


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
        push: without stop strings, reads one token and gives the new text, and does not count it;
            None with stop strings.
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
        self.push = None if sampling.stop else self._detokenizer.push
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
