"""Names of a vocabulary's tokens, and the bytes that each adds to a text (for guided text)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from engine_core.text.detokenizer import BYTE_TOKEN, byte_fallback_steps, byte_level_bytes
from engine_core.text.tokenizer import Tokenizer

SPECIAL = b"\xff"
"""No UTF-8 text has this byte; what begins with it is the name of a special token."""


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """For each token id the bytes that it adds to a text that has begun.

    They are what :class:`IncrementalDetokenizer` makes of the token: a SentencePiece token that
    begins a word begins with its space. A special token's name stands after :data:`SPECIAL`. Empty
    for an id without a token, and for tokens whose bytes are unknown: parts of characters in a
    vocabulary that is neither byte-level nor has byte-fallback.
    """
    special = tokenizer.special_ids
    convert = _converter(tokenizer)
    table = []
    for token_id in range(tokenizer.vocab_size):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            table.append(b"")
        elif token_id in special:
            table.append(SPECIAL + token.encode())
        else:
            added = convert(token_id, token)
            table.append(b"" if SPECIAL in added else added)
    return table


class TokenNames:
    """Names of single tokens, computed on first use and cached.

    Args:
        tokenizer: whose tokens they are.

    Attributes:
        text: from a token id to the text that the token adds after other text, which is empty for
            an id without a token. A special token's text is its name, and bytes that are no whole
            characters are U+FFFD.
        unique: the same, but ``bytes:\\xf0\\x9f`` for such bytes, as in OpenAI's completions.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._convert = _converter(tokenizer)
        self.text: Callable[[int], str] = cache(self._text)
        self.unique: Callable[[int], str] = cache(self._name)

    def _text(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return token or ""
        added = self._convert(token_id, token)
        if added:
            return added.decode(errors="replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _name(self, token_id: int) -> str:
        text = self.text(token_id)
        token = self._tokenizer.id_to_token(token_id)
        if token is None or "\ufffd" not in text or token_id in self._special:
            return text
        added = self._convert(token_id, token)
        try:
            return added.decode() or text
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added)


def _converter(tokenizer: Tokenizer) -> Callable[[int, str], bytes]:
    """Choose the function from a token's id and spelling to its bytes."""
    config = tokenizer.decoder_config
    if config is not None and config["type"] == "ByteLevel":
        return lambda token_id, token: byte_level_bytes(token)
    steps = None if config is None else byte_fallback_steps(config)
    if steps is not None:
        replacements = steps[0]
        return lambda token_id, token: _byte_fallback_bytes(token, replacements)
    # Decode after some text: a token adds the same anywhere but at the beginning.
    begun = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(begun, skip_special_tokens=False)

    def decoded(token_id: int, token: str) -> bytes:
        del token
        text = tokenizer.decode([*begun, token_id], skip_special_tokens=False)
        added = text.removeprefix(before)
        known = text.startswith(before) and "\ufffd" not in added
        return added.encode() if known else b""

    return decoded


def _byte_fallback_bytes(token: str, replacements: tuple[tuple[str, str], ...]) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return bytes((int(match[1], 16),))
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()
