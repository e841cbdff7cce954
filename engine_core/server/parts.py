"""Answers as parts in their order: reasoning, text and calls.

A chat's answer has them beside each other. Other services write one after the other, each with a
beginning and an end; what they share is here, and how they write it is their :class:`Form`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from fastapi.responses import Response

from engine_core.server.encoding import encode
from engine_core.server.errors import ApiError
from engine_core.server.generation import Events, Generation

if TYPE_CHECKING:
    from engine_core.parsers import ParsedDelta
    from engine_core.server.chat import Chat
    from engine_core.steps import RequestOutput

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Part:
    """One part of an answer.

    Attributes:
        kind: what it is.
        index: its place in the answer.
        name: of the function that is called.
        call_id: of the call.
        pieces: its text, or the arguments of the call.
        logprobs: of a text's tokens, as chats have them, if they are asked for.
        newest: those of its last piece.
    """

    kind: Kind
    index: int
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    newest: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.pieces)


@dataclass(slots=True)
class PartAnswer:
    """An answer as far as it has come.

    Attributes:
        parts: those that have begun; all but the last have ended.
        finish_reason: as chats have it; None while it goes on.
        stop_reason: the stop string or token that ended it.
        input_tokens: of the prompt.
        input_details: which of them were found in the prefix cache, and which are of pictures,
            videos and sounds, as a chat's ``prompt_tokens_details`` has them.
        output_tokens: all that were generated.
        reasoning_tokens: those that the reasoning's text has; known at the end.
    """

    parts: list[Part] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    input_tokens: int = 0
    input_details: dict[str, int] = field(default_factory=dict)
    output_tokens: int = 0
    reasoning_tokens: int = 0


class Form(ABC):
    """How a service writes an answer; each method but :meth:`whole` makes events of a stream."""

    @abstractmethod
    def begin(self, answer: PartAnswer) -> bytes:
        """Before the first part."""

    @abstractmethod
    def open(self, part: Part) -> bytes:
        """A part begins, without any of its text."""

    @abstractmethod
    def more(self, part: Part, text: str) -> bytes:
        """A part goes on."""

    @abstractmethod
    def close(self, part: Part, answer: PartAnswer) -> bytes:
        """A part has ended."""

    @abstractmethod
    def end(self, answer: PartAnswer) -> bytes:
        """After the last part."""

    @abstractmethod
    def failed(self, failure: ApiError, answer: PartAnswer) -> bytes:
        """The answer cannot go on."""

    @abstractmethod
    def whole(self, answer: PartAnswer) -> dict[str, Any]:
        """The object of an answer that is not streamed."""


class _Tokens:
    """Log-probabilities of tokens that are not in a part yet, and the bytes of each."""

    def __init__(self) -> None:
        self._logprobs: list[dict[str, Any]] = []

    def add(self, logprobs: list[dict[str, Any]]) -> None:
        """Take those of further tokens."""
        self._logprobs += logprobs

    def take(self, text: str) -> list[dict[str, Any]]:
        """Those of the tokens that a part's next piece has; what is before them is in no part.

        The piece is looked for at the end: before it there may be tags, after it only the beginning
        of one. Without its bytes, as where a character is not whole, all tokens count as its own.
        """
        if not self._logprobs:
            return []
        whole = [bytes(each["bytes"] or ()) for each in self._logprobs]
        place = b"".join(whole).rfind(text.encode())
        first, count = 0, len(whole)
        if place >= 0:
            ends = list(accumulate(map(len, whole)))
            first = bisect_right(ends, place)
            count = bisect_left(ends, place + len(text.encode())) + 1
        taken, self._logprobs = self._logprobs[first:count], self._logprobs[count:]
        return taken


class PartEvents(Events):
    """The parts of an answer that has one completion, and the events of its stream."""

    def __init__(self, chat: Chat, generation: Generation, form: Form) -> None:
        self._chat = chat
        self._generation = generation
        self._form = form
        self._answer = PartAnswer()
        self._streams = bool(chat.body.stream)
        self._begun = False
        self._open: Part | None = None
        # White space at a text's beginning, which may be all between two other parts.
        self._blank = ""
        self.takes_text = not chat.logs and not chat.body.logprobs
        self._tokens = _Tokens()

    async def whole(self) -> Response:
        """The response that has the whole answer."""
        async for index, output in self._generation.outputs():
            self.output(index, output)
        await self._finish()
        return Response(encode(self._form.whole(self._answer)), media_type="application/json")

    def output(self, index: int, output: RequestOutput) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        piece = b""
        if not self._begun:
            self._begun = True
            self._count()
            piece = self._form.begin(self._answer) if self._streams else b""
        for completion in output.outputs:
            self._chat.note(completion)
            ended = completion.finish_reason is not None
            logprobs = self._chat.logprobs(completion)
            if logprobs is not None:
                self._tokens.add(logprobs["content"])
            piece += self._take(self._chat.parse(completion.index, completion.text, ended=ended))
            if ended:
                self._answer.finish_reason = self._chat.finish_reason(completion)
                self._answer.stop_reason = completion.stop_reason
        return piece

    def text(self, index: int, text: str) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        return self._take(self._chat.parse(index, text))

    async def end(self) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        return await self._finish() + self._form.end(self._answer)

    def failed(self, failure: ApiError) -> bytes:
        """See :class:`~engine_core.server.generation.Events`."""
        return self._form.failed(failure, self._answer)

    def _count(self) -> None:
        usage = self._generation.usage()
        self._answer.input_tokens = usage["prompt_tokens"]
        self._answer.input_details = usage["prompt_tokens_details"]
        self._answer.output_tokens = usage["completion_tokens"]

    async def _finish(self) -> bytes:
        self._count()
        thoughts = "".join(part.text for part in self._answer.parts if part.kind == "reasoning")
        if thoughts:
            # By the text: outputs that come together would not tell which tokens were its last.
            count = await self._chat.count_tokens(thoughts)
            self._answer.reasoning_tokens = min(count, self._answer.output_tokens)
        piece = b""
        if self._blank and not self._answer.parts:
            piece = self._go_on(Part("text", 0), self._blank)
        return piece + self._close()

    def _take(self, parsed: ParsedDelta) -> bytes:
        piece = b""
        if parsed.reasoning:
            piece += self._say("reasoning", parsed.reasoning)
        if parsed.content:
            piece += self._say("text", parsed.content)
        for call in parsed.tool_calls:
            if call.name is not None:
                made = Part("call", len(self._answer.parts), call.name, call.id or "")
                piece += self._go_on(made, call.arguments)
            elif self._open is not None:
                piece += self._go_on(self._open, call.arguments)
        return piece

    def _say(self, kind: Kind, text: str) -> bytes:
        """More of a part that is no call."""
        if self._open is not None and self._open.kind == kind:
            return self._go_on(self._open, text)
        if kind == "text":
            text = self._blank + text
            if text.isspace():
                self._blank = text
                return b""
        return self._go_on(Part(kind, len(self._answer.parts)), text)

    def _go_on(self, part: Part, text: str) -> bytes:
        """Add to a part, which is begun if it is a new one."""
        piece = b""
        if part is not self._open:
            piece = self._close()
            self._open, self._blank = part, ""
            self._answer.parts.append(part)
            piece += self._form.open(part) if self._streams else b""
        if text:
            part.pieces.append(text)
            part.newest = self._tokens.take(text)
            if part.kind == "text":
                part.logprobs += part.newest
            piece += self._form.more(part, text) if self._streams else b""
        return piece

    def _close(self) -> bytes:
        part, self._open = self._open, None
        if part is None or not self._streams:
            return b""
        return self._form.close(part, self._answer)
