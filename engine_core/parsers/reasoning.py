"""Where a model's reasoning ends and its answer begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from engine_core.parsers.tools import held_back


class ReasoningParser(ABC):
    """Tells a model's reasoning from its answer; made anew for each answer.

    The parts put together do not depend on how the text was cut into pieces.

    Args:
        prompt_end: the last text of the prompt, with its special tokens: a chat template may open
            the reasoning, or open and close it.
    """

    skip_special_tokens: ClassVar[bool] = False
    """As :attr:`ToolParser.skip_special_tokens`."""

    @abstractmethod
    def __init__(self, prompt_end: str) -> None: ...

    @abstractmethod
    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and answer in the next piece of the text."""

    @abstractmethod
    def finish(self) -> tuple[str, str]:
        """Return the text held back; called once, at the end of the text."""

    def tags(self) -> tuple[str, str] | None:
        """The tags around reasoning that may come before a guided text, called before any text.

        The first is empty if the prompt has opened the reasoning. None leaves no room for it.
        """
        return None


class ThinkParser(ReasoningParser):
    """Reasoning between ``<think>`` and ``</think>``, before the answer.

    Line breaks directly inside the tags and after the second one belong to neither part, as the
    chat templates with these tags write them. If the text ends inside, all of it is reasoning.
    """

    def __init__(self, prompt_end: str) -> None:
        self._buffer = ""
        self._state = "undecided"
        if prompt_end.rfind("<think>") > prompt_end.rfind("</think>"):
            self._state = "opened"
        self._is_over = prompt_end.rstrip().endswith("</think>")

    def tags(self) -> tuple[str, str] | None:
        """See :meth:`ReasoningParser.tags`."""
        if self._is_over:
            return None
        return "" if self._state == "opened" else "<think>", "</think>"

    def feed(self, text: str) -> tuple[str, str]:
        """See :meth:`ReasoningParser.feed`."""
        self._buffer += text
        reasoning = ""
        if self._state == "undecided":
            begun = self._buffer.lstrip()
            if begun.startswith("<think>"):
                self._buffer = begun.removeprefix("<think>")
                self._state = "opened"
            elif not "<think>".startswith(begun):
                self._state = "answer"
        if self._state == "opened":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "reasoning"
        if self._state == "reasoning":
            before, tag, after = self._buffer.partition("</think>")
            if tag:
                reasoning = before.rstrip("\n")
                self._buffer = after
                self._state = "closed"
            else:
                held = held_back(before, "</think>", "\n")
                reasoning = before[: len(before) - held]
                self._buffer = before[len(before) - held :]
        if self._state == "closed":
            self._buffer = self._buffer.lstrip("\n")
            if self._buffer:
                self._state = "answer"
        answer = ""
        if self._state == "answer":
            answer, self._buffer = self._buffer, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """See :meth:`ReasoningParser.finish`."""
        rest, self._buffer = self._buffer, ""
        return ("", rest) if self._state == "undecided" else (rest, "")
