"""How a family's SentencePiece file is to be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
