"""Files of tiktoken's ranks, beside tiktoken's rules written out."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from engine_core.configs import TiktokenFormat
from engine_core.errors import TokenizerError
from engine_core.text import Tokenizer, load_tokenizer

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FORMAT = TiktokenFormat(
    file="qwen.tiktoken",
    pattern=PATTERN,
    normalizer="NFC",
    added_tokens=("<|end|>", "<box>", "<img>"),
    shown_tokens=frozenset({"<box>"}),
    named_tokens={"eos_token": "<|end|>"},
)
CORPUS = (
    "the cat sat on the mat, aaaa aaaaaa a   b  c banana bananas\n\n "
    "那只猫坐在垫子上。猫在哪里 Ünïcödé — naïve café's they're it's I'll 12345 \t\t x=1;\r\n"
) * 3


@cache
def ranks() -> dict[bytes, int]:
    """All bytes, and what occurs most often beside each other, as such a file is trained."""
    found = {bytes([(byte * 7 + 3) % 256]): byte for byte in range(256)}
    words = [[bytes([byte]) for byte in word.encode()] for word in regex.findall(PATTERN, CORPUS)]
    while counts := Counter(pair for word in words for pair in pairwise(word)):
        (left, right), _ = counts.most_common(1)[0]
        found.setdefault(left + right, len(found))
        words = [joined(word, left + right) for word in words]
    return found


def joined(word: list[bytes], whole: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and out[-1] + part == whole:
            out[-1] = whole
        else:
            out.append(part)
    return out


def encoded(text: str) -> list[int]:
    """tiktoken's rules: join the pair of the lowest rank, the first of them, while there is one."""
    ids = []
    for word in regex.findall(PATTERN, unicodedata.normalize("NFC", text)):
        parts = [bytes([byte]) for byte in word.encode()]
        if word.encode() in ranks():
            parts = [word.encode()]
        while True:
            pairs = [ranks().get(a + b, 10**9) for a, b in pairwise(parts)]
            if not pairs or min(pairs) == 10**9:
                break
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks()[part] for part in parts]
    return ids


def lines(of: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in of.items())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiktoken")
    (folder / FORMAT.file).write_bytes(lines(ranks()))
    # The class is code of the checkpoint's own, and not needed.
    stated = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["a.B", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return load_tokenizer(folder, None, FORMAT)


TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="a bnt\n' 猫é", max_size=40),
    st.lists(st.sampled_from(CORPUS.split(" ")), max_size=12).map(" ".join),
)


@settings(max_examples=examples(400), deadline=None)
@given(TEXTS)
def test_texts_are_cut_as_by_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == encoded(text)
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_added_tokens_follow_the_file(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat<img><box>(1)<|end|>")
    first = len(ranks())
    expected = [*encoded("the cat"), first + 2, first + 1, *encoded("(1)"), first]
    assert ids == expected
    assert tokenizer.decode(ids) == "the cat<box>(1)"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the cat<img><box>(1)<|end|>"
    assert tokenizer.eos_token_id == first
    assert tokenizer.vocab_size == first + 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"YQ== 0\nno\n", "line 2 is no token in base64 and its rank"),
        (b"YQ== x\n", "line 1 is no token"),
        (b"", "no token for the byte 0x00"),
        (lines({b"a": 0, b"b": 2}), "not each number from 0 to 1"),
        (lines({bytes([byte]): byte for byte in range(255)}), "no token for the byte 0xff"),
        (b"Y=== 0\n", "cannot be read"),
    ],
)
def test_damaged_files_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / FORMAT.file).write_bytes(content)
    with pytest.raises(TokenizerError, match=said):
        load_tokenizer(tmp_path, None, FORMAT)
