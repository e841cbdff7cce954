"""How a family's SentencePiece file, or one of tiktoken's ranks, is to be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceFormat:
    """Facts that a SentencePiece file lacks because a family keeps them in Python code.

    A config builder puts it into ``ModelConfig.sentencepiece``; it is used for a tokenizer folder
    that has ``file`` and no tokenizer.json. Keys of tokenizer_config.json go before it:
    ``add_bos_token``, ``add_eos_token``, ``legacy``, named and added tokens.

    Attributes:
        file: its name in the checkpoint folder.
        added_tokens: special tokens that are no pieces of the file; they get the ids after its
            last one, in this order.
        special_pieces: pieces that count as special tokens, beside the control pieces.
        prefix: tokens before each text.
        suffix: tokens after each text.
        replacements: text -> the piece that stands for it; made before encoding, longest first.
        named_tokens: ``{"eos_token": "</s>"}`` and the like.
    """

    file: str = "tokenizer.model"
    added_tokens: tuple[str, ...] = ()
    special_pieces: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    replacements: Mapping[str, str] = field(default_factory=dict)
    named_tokens: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiktokenFormat:
    """Facts that a file of tiktoken's ranks lacks because a family keeps them in Python code.

    A config builder puts it into ``ModelConfig.tiktoken``; it is used for a tokenizer folder that
    has ``file`` and no tokenizer.json.

    Attributes:
        file: its name in the checkpoint folder.
        pattern: the regular expression that cuts text to words.
        normalizer: what is done with text before: "NFC" or nothing.
        added_tokens: tokens that the file does not have; they get the ids after its last one.
        shown_tokens: those of them that belong to the text of an answer.
        named_tokens: ``{"eos_token": "<|endoftext|>"}`` and the like.
    """

    file: str
    pattern: str
    normalizer: Literal["NFC"] | None = None
    added_tokens: tuple[str, ...] = ()
    shown_tokens: frozenset[str] = frozenset()
    named_tokens: Mapping[str, str] = field(default_factory=dict)
