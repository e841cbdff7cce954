"""SentencePiece models to test with: small ones trained here, and ones put together from pieces."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps",
    "hello world, hello there; the end of the world is the beginning",
    "def indented(code): return the_value  # with   runs    of spaces",
    "你好，世界！今天天气很好。晚上睡不着应该怎么办，我是人工智能助手。",  # noqa: RUF001
    "numbers 0 1 2 3 4 5 6 7 8 9 and signs + - * / = ( ) [ ] { } | _",
]


def train(file: Path, *, model_type: str = "bpe", vocab_size: int = 420, **settings: Any) -> None:
    """Write a model with byte fallback, trained on :data:`CORPUS`."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type=model_type,
        vocab_size=vocab_size,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    file.write_bytes(model.getvalue())


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _, BYTE = range(1, 7)


def assemble(file: Path, pieces: Iterable[tuple[str, float, int]]) -> None:
    """Write a BPE model of ``(piece, score, kind)``, without normalisation.

    Field numbers are those of sentencepiece_model.proto.
    """
    model = b"".join(
        _field(1, _field(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + _varint(3, kind))
        for piece, score, kind in pieces
    )
    trainer = _varint(3, 2) + _varint(35, 1)  # model_type BPE, byte_fallback
    normalizer = _field(1, b"identity") + _varint(3, 1) + _varint(4, 0) + _varint(5, 1)
    file.write_bytes(model + _field(2, trainer) + _field(3, normalizer))


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _field(field: int, content: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(content)) + content


def spaced_texts() -> Sequence[str]:
    """Texts with every kind of space, and what tokenizers stumble over."""
    return [
        "",
        " ",
        "hello world",
        " leading, and trailing ",
        "\n",
        "\n\nhello\n",
        "runs   of    spaces\t\ttabs\n    indented\n",
        " " * 79,
        " " * 80,
        "x" + " " * 81 + "y",
        " " * 165 + "z",
        "\t hello \t\n \t",
        "你好，世界！ 今天\u3000天气  很好。",  # noqa: RUF001
        "emoji 😀🎉 é e\u0301 ﬁ ½ ＡＢ",  # noqa: RUF001
        "def f(x):\n    return x ** 2  # square\n",
        "a" * 300,
        "<n> <|tab|> <|blank_3|> <0x41>",
        "\r\n\u200b\ufeff\x00",
    ]
