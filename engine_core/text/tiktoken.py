"""Vocabularies of the ``tiktoken`` library, as tokenizers of the ``tokenizers`` library."""

from __future__ import annotations

import base64
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine_core.configs import TiktokenFormat
from engine_core.errors import TokenizerError

_LINE = re.compile(rb"([A-Za-z0-9+/]+=*) (\d+)")
_SHOWN_BYTES = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


def read_tiktoken(file: Path, format: TiktokenFormat) -> Tokenizer:  # noqa: A002
    """The tokenizer of a file with a token, as base64, and its rank on each line.

    Of a word that is no token, tiktoken joins the two neighbours whose whole has the lowest rank,
    again and again. As merges that is every way to make a token of two others, by its rank.

    Raises:
        TokenizerError: it is no such file.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise TokenizerError(f"{file}: line {number} is no token in base64 and its rank")
        ranks[base64.b64decode(match[1])] = int(match[2])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{file}: the ranks are not each number from 0 to {len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(f"{file}: there is no token for the byte {missing[0]:#04x}")
    letters = _letters()
    names = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    made = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    if format.normalizer == "NFC":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(format.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_tokens(
        [
            AddedToken(token, normalized=False, special=token not in format.shown_tokens)
            for token in format.added_tokens
        ]
    )
    return made


def _letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in _SHOWN_BYTES else next(others)) for byte in range(256)]


__all__ = ["read_tiktoken"]
