"""Incremental detokenisation, one token at a time.

A token is not a piece of text: a character may be spread over several tokens, and a token's text
may depend on the tokens before it. Which of the two happens depends on the tokenizer's decoder.
Each of the two common decoders has a class of its own, exact and without decoding anything twice.
One more class serves all other decoders; it decodes a short window again for each token.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from engine_core.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_PENDING_BYTES = 3  # of a character of four


class IncrementalDetokenizer:
    """The text of a growing sequence of tokens, in pieces that never change once given out.

    With ``D = tokenizer.decode(prompt + generated)`` and ``P = tokenizer.decode(prompt)`` (both
    with the same ``skip_special_tokens``), all pieces together, :meth:`finish` included, are
    ``D[len(P):]``; for an empty prompt this is ``D``. So a SentencePiece-type tokenizer keeps the
    leading space of the first generated word after a prompt, and drops it without one.

    Three exceptions:

    - If the prompt ends inside a character, the whole character belongs to the first piece.
    - Byte-fallback tokens that follow one another (``<0xE4><0xBD>...``): ``decode`` turns all of
      them into U+FFFD if together they are not valid UTF-8. A complete character at their
      beginning has been given out by then and stays; the bytes after it become U+FFFD, one each.
    - A decoder other than byte-level or byte-fallback may change text that it gave before
      (a clean-up over token boundaries, say); text given out stays.

    Time per token is constant. So is the part of the prompt that is read, whatever its length.

    Args:
        tokenizer: whose tokens they are.
        skip_special_tokens: leave special tokens out of the text.
        prompt_token_ids: the tokens before the first generated one.

    Attributes:
        push: the same as :meth:`append` of one token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._pieces = _pieces_for(tokenizer, skip_special_tokens, prompt_token_ids)
        self.push = self._pieces.push

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that became final with these tokens; often empty or more than one token's."""
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD. Call it once."""
        return self._pieces.flush()


@dataclass(slots=True)
class _Known:
    """Texts and bytes of a vocabulary's tokens, as far as they were asked for.

    Attributes:
        texts: of those that are whole characters and change nothing before them.
        data: the bytes of the others, if it is byte-level.
    """

    texts: dict[int, str] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)


# By tokenizer, without and with special tokens.
_seen: WeakKeyDictionary[Tokenizer, tuple[_Known, _Known]] = WeakKeyDictionary()


class _Pieces(ABC):
    """Turns tokens into final pieces of text, for one kind of decoder."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._known = _seen.setdefault(tokenizer, (_Known(), _Known()))[not skip_special_tokens]
        self._texts = self._known.texts
        # Whether what comes next has the same text after anything that was read.
        self._between = False

    def push(self, token_id: int) -> str:
        """The text that becomes final with this token."""
        text = self._texts.get(token_id) if self._between else None
        return self._read(token_id) if text is None else text

    @abstractmethod
    def _read(self, token_id: int) -> str:
        """The same of a token whose text is not known, or depends on what was read."""

    @abstractmethod
    def flush(self) -> str:
        """The text that was held back."""

    def _token(self, token_id: int) -> str | None:
        """The token, or None if it gives no text and the decoder does not see it."""
        return None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)

    def _tokens_from_the_end(self, token_ids: Sequence[int]) -> Iterable[str]:
        for token_id in reversed(token_ids):
            token = self._token(token_id)
            if token is not None:
                yield token


class _ByteLevelPieces(_Pieces):
    """Every token is a run of bytes; the text is all bytes, read as UTF-8."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = b""
        for token in self._tokens_from_the_end(prompt_token_ids):
            tail = byte_level_bytes(token) + tail
            if len(tail) >= _MAX_PENDING_BYTES:
                break
        self._decoded(tail)

    def _read(self, token_id: int) -> str:
        data = self._known.data.get(token_id)
        if data is None:
            token = self._token(token_id)
            data = self._known.data[token_id] = b"" if token is None else byte_level_bytes(token)
            with suppress(UnicodeDecodeError):
                self._texts[token_id] = data.decode()
        return self._decoded(data)

    def _decoded(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        self._between = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallbackPieces(_Pieces):
    """Each token is text, except ``<0xHH>``: one byte of a character that has no token.

    Args:
        tokenizer: see :class:`_Pieces`.
        skip_special_tokens: see :class:`_Pieces`.
        prompt_token_ids: the tokens before the first one pushed.
        replacements: ``(old, new)`` in each token, such as ``("▁", " ")``.
        strip: a character, and how many of it are dropped at the beginning of the whole text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int],
        replacements: tuple[tuple[str, str], ...],
        strip: tuple[str, int],
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._replacements = replacements
        self._strip, self._strips_left = strip
        self._pending = b""
        self._run_is_invalid = False
        self._read_prompt(prompt_token_ids)
        self._note()

    def _read(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None:
            text = self._texts[token_id] = ""
        elif (match := BYTE_TOKEN.fullmatch(token)) is not None:
            text = self._stripped(self._push_byte(int(match[1], 16)))
        else:
            text = self._texts[token_id] = self._replaced(token)
            text = self._stripped(self._end_run() + text)
        self._note()
        return text

    def _note(self) -> None:
        self._between = not (self._pending or self._run_is_invalid or self._strips_left)

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _push_byte(self, byte: int) -> str:
        if self._run_is_invalid:
            return _REPLACEMENT
        self._pending += bytes((byte,))
        try:
            character = self._pending.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._run_is_invalid = True
            invalid, self._pending = self._pending, b""
            return _REPLACEMENT * len(invalid)
        self._pending = b""
        return character

    def _end_run(self) -> str:
        incomplete, self._pending = self._pending, b""
        self._run_is_invalid = False
        return _REPLACEMENT * len(incomplete)

    def _stripped(self, text: str) -> str:
        while self._strips_left and text:
            if text[0] != self._strip:
                self._strips_left = 0
                break
            text = text[1:]
            self._strips_left -= 1
        return text

    def _read_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        tail: list[str] = []
        # The run's last three bytes say what is pending. As many tokens more say whether the text
        # has begun.
        for token in self._tokens_from_the_end(prompt_token_ids):
            tail.append(token)
            if len(tail) > _MAX_PENDING_BYTES + self._strips_left:
                break
        run = bytearray()
        for token in tail:
            match = BYTE_TOKEN.fullmatch(token)
            if match is None or len(run) == _MAX_PENDING_BYTES:
                break
            run.insert(0, int(match[1], 16))
        self._pending = _incomplete_character(bytes(run))
        for token in reversed(tail):
            self._stripped(self._replaced(token))

    def _replaced(self, token: str) -> str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token


class _WindowPieces(_Pieces):
    """Any other decoder: decodes the last few tokens with and without the new one."""

    # Enough that what precedes the window does not change what the new token adds, and that an
    # unfinished character (at most three tokens) lies within it.
    _WINDOW = 8

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(self._window) == self._WINDOW:
                break
            if self._token(token_id) is not None:
                self._window.insert(0, token_id)
        self._given = len(_without_incomplete_end(self._decoded()))

    def _read(self, token_id: int) -> str:
        if self._token(token_id) is None:
            return ""
        self._window.append(token_id)
        decoded = self._decoded()
        final = _without_incomplete_end(decoded)
        piece = final[self._given :]
        self._given = max(self._given, len(final))
        if len(self._window) >= 2 * self._WINDOW:
            held_back = len(decoded) - self._given
            del self._window[: -self._WINDOW]
            self._given = len(self._decoded()) - held_back
        return piece

    def flush(self) -> str:
        return self._decoded()[self._given :]

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _pieces_for(
    tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
) -> _Pieces:
    config = tokenizer.decoder_config
    if config is not None and config["type"] == "ByteLevel":
        return _ByteLevelPieces(tokenizer, skip_special_tokens, prompt_token_ids)
    byte_fallback = None if config is None else byte_fallback_steps(config)
    if byte_fallback is not None:
        return _ByteFallbackPieces(tokenizer, skip_special_tokens, prompt_token_ids, *byte_fallback)
    return _WindowPieces(tokenizer, skip_special_tokens, prompt_token_ids)


def byte_fallback_steps(
    config: Mapping[str, Any],
) -> tuple[tuple[tuple[str, str], ...], tuple[str, int]] | None:
    """Replacements and strip of a decoder ``Replace*, ByteFallback, Fuse[, Strip]``, else None."""
    steps = list(config["decoders"]) if config["type"] == "Sequence" else [config]
    replacements = []
    while steps and steps[0]["type"] == "Replace":
        step = steps.pop(0)
        if "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteFallback", "Fuse"]:
        return tuple(replacements), ("", 0)
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        return tuple(replacements), (steps[2]["content"], steps[2]["start"])
    return None


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's ``encoder.py``).

    Printable Latin-1 characters stand for themselves, the others for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(0x100 + index): byte for index, byte in enumerate(others)},
    }


@lru_cache(maxsize=1 << 15)
def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for."""
    alphabet = _byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()  # an added token, written as it is


def _incomplete_character(run: bytes) -> bytes:
    """The bytes at the end of ``run`` that begin a character and do not end it."""
    for length in range(min(len(run), _MAX_PENDING_BYTES), 0, -1):
        try:
            run[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return run[-length:]
    return b""


def _without_incomplete_end(text: str) -> str:
    """``text`` without the U+FFFD at its end that may be a character not yet complete."""
    end = len(text)
    while end > len(text) - _MAX_PENDING_BYTES and end > 0 and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]
