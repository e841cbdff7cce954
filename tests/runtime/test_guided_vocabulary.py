"""The bytes of tokens: put together they are what the tokenizer decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine_core.text import FastTokenizer, Tokenizer, load_tokenizer, token_bytes

TOKENIZERS = Path(__file__).parents[2] / ".cache" / "tokenizers"


def wrapped(backend: Backend) -> Tokenizer:
    return FastTokenizer(backend, special_tokens={}, chat_templates={})


def byte_fallback() -> Tokenizer:
    """As SentencePiece's are: a space before each word, a byte for what has no token."""
    tokens = ["<unk>", "<s>", "▁", "▁a", "a", "b", "▁▁"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, [("▁", "a")]))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return wrapped(backend)


def word_pieces() -> Tokenizer:
    """A decoder that is neither byte-level nor has byte-fallback."""
    tokens = ["[UNK]", "a", "##b", "word", "##s", "."]
    backend = Backend(models.WordPiece({token: i for i, token in enumerate(tokens)}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return wrapped(backend)


MADE = {"byte-fallback": byte_fallback(), "word pieces": word_pieces()}


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_bytes_put_together_are_the_text(name: str, data: st.DataObject) -> None:
    tokenizer = MADE[name]
    table = token_bytes(tokenizer)
    # Neither special tokens nor those of which it is not known what they add, as the byte 0xFF.
    known = [i for i, token in enumerate(table) if token and token[:1] != b"\xff"]
    ids = data.draw(st.lists(st.sampled_from(known)))
    begun = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(begun)
    expected = tokenizer.decode([*begun, *ids])
    assert expected.startswith(before)
    whole = b"".join(table[i] for i in ids)
    try:
        text = whole.decode()
    except UnicodeDecodeError:
        return  # no text: decoding makes something up
    assert text == expected.removeprefix(before)


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "chatglm3"])
@pytest.mark.filterwarnings("ignore")
def test_real_vocabularies_encode_to_the_bytes_of_the_text(name: str) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / name)
    table = token_bytes(tokenizer)
    assert len(table) == tokenizer.vocab_size
    for text in (
        '{"name": "Zoë 😀", "n": [1, 2.5e3]}\n\t',
        "你好, мир! __init__(self)\r\n",
        "a  b",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(table[i] for i in ids).decode().removeprefix(" ") == text
    for special in tokenizer.special_ids:
        # Some of them stand for no token.
        assert table[special][:1] in (b"\xff", b"")
    assert len(set(table)) > 0.99 * len([token for token in table if token])


def test_special_tokens_and_impossible_bytes_are_no_text() -> None:
    tokenizer = byte_fallback()
    table = token_bytes(tokenizer)
    assert table[tokenizer.token_to_id("<s>")] == b"\xff<s>"
    assert table[tokenizer.token_to_id("<0xFF>")] == b""
    assert table[tokenizer.token_to_id("<0xC3>")] == b"\xc3"
    assert table[tokenizer.token_to_id("▁a")] == b" a"
