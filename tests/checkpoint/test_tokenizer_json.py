"""Merges in one text each: the tokenizer stays the same."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from engine_core.checkpoint.tokenizer_json import with_short_merges


def _tokenizer(merges: list[tuple[str, str]]) -> Tokenizer:
    pieces = dict.fromkeys("".join(a + b for a, b in merges))
    tokens = [*pieces, *dict.fromkeys(a + b for a, b in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return made


def _merges(data: bytes) -> Any:
    return json.loads(data)["model"]["merges"]


def test_merges_become_texts_and_mean_the_same() -> None:
    merges = [("é", "t"), ("ét", "é"), ("a", "b"), ("#", "a")]
    data = _tokenizer(merges).to_str().encode()
    short = with_short_merges(data)
    assert _merges(data) == [list(pair) for pair in merges]
    assert _merges(short) == ["é t", "ét é", "a b", "# a"]
    one, other = (Tokenizer.from_str(each.decode()) for each in (data, short))
    assert other.to_str() == one.to_str()
    assert other.encode("été ab#a").tokens == ["été", "ab", "#a"]
    assert with_short_merges(short) == short


@pytest.mark.parametrize("pair", [("a", " "), ("a b", "c"), ("#version", "a")])
def test_what_a_text_could_not_say_stays(pair: tuple[str, str]) -> None:
    data = json.dumps({"model": {"type": "BPE", "merges": [["a", "b"], pair]}}).encode()
    assert with_short_merges(data) == data


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"model": 1}',
        b'{"model": {"type": "WordPiece", "vocab": {}}}',
        b'{"model": {"type": "Unigram", "merges": [["a", "b"]]}}',
        b'{"model": {"type": "BPE", "merges": [["a", 1]]}}',
        b'{"model": {"type": "BPE", "merges": [["\\ud800", "b"]]}}',
        b"\xff",
    ],
)
def test_what_is_no_such_tokenizer_stays(data: bytes) -> None:
    assert with_short_merges(data) == data
